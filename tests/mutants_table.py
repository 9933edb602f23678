"""The mutants of mutants.py: what is changed where, what that breaks, and the tests that have to notice."""

from __future__ import annotations

from dataclasses import dataclass

PACKAGE = "python/mxfp4_ops/"
FORMAT, BACKENDS, CASES = "tests/test_format.py::", "tests/test_backends.py::", "tests/test_cases.py::"
NUMBERS, ROUTING, STATE = (
    "tests/test_rules_numbers.py::",
    "tests/test_rules_routing.py::",
    "tests/test_rules_state.py::",
)
LAYOUTS, NN, DISPATCH = "tests/test_layouts.py::", "tests/test_nn.py::", "tests/test_dispatch.py::"
ERRORS, MEMORY = "tests/test_errors.py", "tests/test_errors_memory.py"
ISA, ISA_INT = "tests/test_isa.py::", "tests/test_isa_int.py::"
QUANT = FORMAT + "test_n5_quant_against_integers"
ACTIVATION = BACKENDS + "test_a1_activations"
FORMS, ROUTE, MODES = "tests/test_x_formats.py::", "tests/test_route.py::", "tests/test_quant_modes.py::"
TWO_STEPS, GRADIENTS, OF_OPS = (
    "tests/test_out_and_finalize.py::",
    "tests/test_autograd.py::",
    "tests/test_autograd_ops.py::",
)
EXPORT, DEBUG = "tests/test_export.py::", "tests/test_debug.py::"
SECOND = FORMS + "test_against_a_second_definition"
SAME_BITS = ROUTE + "test_the_compiled_kernel_has_the_bits_of_plain_torch"
SLOPES = GRADIENTS + "test_slopes_are_those_of_autograd"
CORNERS = MODES + "test_corners_by_hand"


@dataclass(frozen=True)
class Mutant:
    """``old`` stands in ``file`` exactly once and becomes ``new``; one of ``tests`` has to fail."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]

    @property
    def compiled(self) -> bool:
        return self.file.startswith("csrc/")


def _python(name: str, file: str, old: str, new: str, breaks: str, *tests: str) -> Mutant:
    return Mutant(name, f"{PACKAGE}{file}.py", old, new, breaks, tests)


def _native(name: str, file: str, old: str, new: str, breaks: str, *tests: str) -> Mutant:
    return Mutant(name, f"csrc/{file}", old, new, breaks, tests)


_NUMBERS = (
    _python("tie_075", "format", '"even": (False, True,', '"even": (False, False,', "a tie goes to the odd code", QUANT),
    _python("tie_25", "format", '"even": (False, True, False, True, False,', '"even": (False, True, False, True, True,',
            "a tie goes to the odd code", QUANT),
    _python("bound_5", "format", "3.5, 5.0)", "3.5, 5.5)", "a rounding bound is moved", QUANT),
    _python("rule_even", "format", '"even": 0x5FFFFF', '"even": 0x600000', "scale rule even at 1.75", QUANT),
    _python("rule_rceil", "format", '"rceil": 0x400000', '"rceil": 0x3FFFFF', "scale rule rceil at 1.5", QUANT),
    _python("rule_floor", "format", '"floor": _MANTISSA', '"floor": 0x7FFFF0', "scale rule floor near 2", QUANT),
    _python("pack_order", "format", "codes[..., 0::2] | (codes[..., 1::2] << 4)",
            "codes[..., 1::2] | (codes[..., 0::2] << 4)", "nibble order of quant", QUANT),
    _python("unpack_order", "format", "(blocks & 15, blocks >> 4)", "(blocks >> 4, blocks & 15)",
            "nibble order of dequant", NUMBERS + "test_n1_the_even_element_lies_in_the_low_nibble"),
    _python("byte_0", "format", "special = (wide == 0) | (", "special = (wide == 1) | (", "scale byte 0 is zero",
            NUMBERS + "test_n2_scale_bytes_at_both_ends"),
    _python("inf_block", "format", "torch.isfinite(blocks).all(-1)", "~torch.isnan(blocks).any(-1)",
            "a block with Inf is finite", FORMAT + "test_n7_nan_and_inf_show_in_their_block_only"),
    _python("byte_clamp", "format", "to(torch.int32)).clamp_min(0).to(torch.uint8)", "to(torch.int32)).to(torch.uint8)",
            "bytes below 0 wrap", QUANT),
    _python("silu_clamp", "activation", "g.clamp(max=limit), u.clamp", "g.clamp(-limit, limit), u.clamp",
            "the gate is clamped on both sides", CASES + "test_v12_clamps"),
    _python("step_clamp", "activation", "gate.clamp(max=limit) * u", "gate * u", "swiglustep ignores its limit", ACTIVATION),
    _python("situ_beta", "activation", "else beta * torch.tanh(u / beta)", "else u", "situ ignores beta", ACTIVATION),
    _python("unused_parameter", "activation", "value is None or default is not None", "True",
            "a parameter without a use is ignored", ERRORS),
    _python("parameter_range", "activation", "need_float32(op, key, number)", "pass", "parameters beyond float32 pass", ERRORS),
)  # fmt: skip

_LAYER = (
    _python("weight_on_input", "reference", "return product(rows, w13, batch_invariant) * weight",
            "return product(rows, w13, batch_invariant)", "weight_on_input is ignored", BACKENDS + "test_weight_on_input"),
    _python("bias_after_weight", "reference",
            "y = y if w2_bias is None else y + w2_bias[e].float()\n        y = y if weight_on_input else y * weight\n",
            "y = y if weight_on_input else y * weight\n        y = y if w2_bias is None else y + w2_bias[e].float()\n",
            "the bias comes after the routing weight", NUMBERS + "test_a3_biases_stand_where_they_belong"),
    _python("half_hidden", "reference", "a.to(torch.bfloat16).float()", "a.to(torch.float16).float()",
            "float16 between the products", BACKENDS + "test_a5_fp16_callers_do_not_overflow_between_the_products"),
    _python("hidden_not_rounded_back", "reference", "torch.where(chosen[slots, None], y, rows[slots])", "y * 1.01",
            "results are scaled", BACKENDS + "test_against_float64"),
    _python("not_localised", "moe_call", "return _localised(self.op, self.topk_ids, self.expert_ids)", "return self.topk_ids",
            "expert_ids are ignored", BACKENDS + "test_r3_expert_ids_of_two_shards_sum_to_the_whole"),
    _python("localise_order", "moe_call", "rows[place].to(ids.dtype), -1)", "place.to(ids.dtype), -1)",
            "rows of sorted numbers", BACKENDS + "test_r3_expert_ids_of_two_shards_sum_to_the_whole"),
    _python("ids_unchecked", "moe_call", "token_checks.id_values(self.op, self.topk_ids, self.w13.shape[0])", "pass",
            "an id of E is skipped", ERRORS),
    _python("invariant_dropped", "moe_call", "batch_invariant=self.batch_invariant", "batch_invariant=False",
            "batch_invariant is ignored", BACKENDS + "test_n8_batch_invariance"),
    _python("on_input_dropped", "moe_call", "weight_on_input=self.weight_on_input", "weight_on_input=False",
            "weight_on_input is ignored", BACKENDS + "test_weight_on_input"),
    _python("negative_numbers", "token_checks", "need(least >= 0,", "need(True,", "expert_ids may hold -1",
            ROUTING + "test_r1_a_skipped_slot_finds_no_negative_expert_number"),
    _python("strided_packed", "checks", "            and tensor.is_contiguous()\n", "", "strided packed tensors pass", MEMORY),
    _python("repeated_numbers", "token_checks", "need(not twice,", "need(True,", "an expert counts twice", ERRORS),
    _python("id_of_e", "token_checks", "need(high < experts,", "need(high <= experts,", "an id of E passes", ERRORS),
    _python("none_passes", "argument_checks", "need_type(isinstance(tensor, Tensor), lambda", "need_type(True, lambda",
            "None is no sentence", MEMORY),
    _python("block_of_16", "checks", "x.shape[-1] % BLOCK == 0", "x.shape[-1] % 16 == 0", "48 elements pass", ERRORS),
    _python("meta_mixed", "_ops", "t.device != x.device for t in rest", "False for t in rest",
            "memory as it was found is returned", "tests/test_rules_package.py::test_d5_the_device_of_the_tensors_counts"),
)  # fmt: skip

_WEIGHTS = (
    _python("padding_scale", "experts", 'fill = NEUTRAL_SCALE if name.endswith("scale") else 0', "fill = 0",
            "padding has scale byte 0", LAYOUTS + "test_tile32_by_its_index_formula"),
    _python("gate_up_order", "experts", "torch.cat((rows[0::2], rows[1::2]))", "torch.cat((rows[1::2], rows[0::2]))",
            "interleaved rows come up first", STATE + "test_l1_the_order_of_gate_and_up_is_an_argument"),
    _python("row_of_expert", "packing", "out[name][row].copy_(tensor)", "out[name][index].copy_(tensor)",
            "repacking writes expert 0", STATE + "test_t2_an_update_in_place_rewrites_padding_too"),
    _python("wrong_dtype_of_bias", "packing", "like[name].dtype if spec.dtype is None", "torch.float32 if spec.dtype is None",
            "biases change their dtype", LAYOUTS + "test_biases_keep_their_dtype"),
    _python("nibbles_of_a_word", "backends/native_cpu", "return even | (odd << 16)", "return odd | (even << 16)",
            "the packed layout changes", LAYOUTS + "test_tile32_by_its_index_formula"),
    _python("any_arch", "backends/native_cpu", '    yield from need_arch(problem, "cpu")\n', "",
            "CPU kernels are offered to GPUs", DISPATCH + "test_d3_prefer_restricts_and_refuses_at_once"),
    _python("limit_lost", "packed", "            activation.limit,\n", "            None,\n", "packed experts forget the limit",
            CASES + "test_v12_clamps"),
    _python("packed_twice", "packed", "isinstance(experts, ExpertWeights),", "True,", "packed experts are packed again",
            CASES + "test_w04_preparing_twice_is_refused"),
    _python("tag_unchecked", "nn", 'found.get("layout") == self.layout', "True", "another layout's state loads",
            NN + "test_l2_another_layout_is_refused_before_a_byte_is_copied"),
    _python("activation_unchecked", "nn", "found == mine", "True", "another activation's state loads",
            NN + "test_another_activation_is_refused"),
    _python("always_warn", "dispatch", "if backend.slow and not chosen", "if backend.slow", "a chosen fallback warns",
            DISPATCH + "test_d2_the_fallback_warns_once_with_its_cost"),
    _python("prefer_ignored", "dispatch", "tuple(b for b in candidates if b.name == name)", "candidates", "prefer is ignored",
            DISPATCH + "test_d3_prefer_restricts_and_refuses_at_once"),
)  # fmt: skip

_CPU = (
    _native("header_tie", "format.h", "(magnitude >= 0.75f)", "(magnitude > 0.75f)", "a tie goes to the odd code",
            ISA + "test_quant"),
    _native("header_rule", "format.h", "amax_bits + 0x200000", "amax_bits + 0x1fffff", "scale rule even at 1.75",
            CASES + "test_v05_scale_rules"),
    _native("scalar_bf16", "cpu/scalar.cpp", "(bits + 0x7fff + ((bits >> 16) & 1))", "(bits + 0x8000)",
            "bf16 ties go up", ISA + "test_conversions"),
    _native("scalar_residual", "cpu/scalar.cpp", "value = row.residuals[residual++].value;", "value = row.residuals[residual].value;",
            "the first residual is taken again", ISA_INT + "test_dot_int"),
    _native("avx2_tie", "cpu/avx2.cpp", "from(0.75f)", "above(0.75f)", "a tie goes to the odd code", QUANT),
    _native("avx2_nibbles", "cpu/avx2.cpp", "_mm256_set1_epi16(0x1001)", "_mm256_set1_epi16(0x0110)",
            "nibble order of quant", QUANT),
    _native("avx2_sign", "cpu/avx2.cpp", "_mm256_srli_epi32(wide, 3), 31)", "_mm256_srli_epi32(wide, 4), 31)",
            "dequant loses signs", FORMAT + "test_n2_n3_all_codes_times_all_scale_bytes"),
    _native("avx2_panel", "cpu/avx2_dot.cpp", "store(step * kStepK + 2, first);", "store(step * kStepK + 3, first);",
            "odd nibbles meet other k", BACKENDS + "test_against_float64"),
    _native("avx2_overflow", "cpu/avx2_vector.h", "kOverflowByte = 253", "kOverflowByte = 255",
            "codes that overflow are not Inf", ISA + "test_dot_extreme_scales"),
    _native("avx2_residual", "cpu/avx2_int.cpp", "in_step % 2 * 16 + in_step / 2 * 4", "in_step / 2 * 8 + in_step % 2 * 4",
            "residuals meet another nibble", ISA_INT + "test_dot_int"),
    _native("avx2_odd_tile", "cpu/avx2_int.cpp", "if (p.count % 2 != 0) dot", "if (p.count % 2 != 0 && p.count > 1) dot",
            "a tile alone is left out", ISA_INT + "test_dot_int"),
    _native("plane_limit", "cpu/int_row.h", "(whole > kMost)", "(whole > kMost + 1)", "an integer does not fit its planes",
            ISA_INT + "test_integers_lose_nothing", ISA_INT + "test_rows_that_integers_cannot_hold"),
    _native("limit_dropped", "cpu/ops.cpp", "static_cast<float>(limit.value_or(kInfinity))};", "__builtin_inff()};", "limit is ignored",
            CASES + "test_v12_clamps"),
    _native("narrow_ids", "cpu/ops.cpp", "wide ? checked_ids<int64_t>", "wide ? checked_ids<int32_t>", "int64 ids are cut",
            ROUTING + "test_r2_both_widths_of_ids_give_the_same_bits"),
    _native("on_input_twice", "cpu/moe.cpp", "a_.weight_on_input ? 1.0f : a_.topk_weights[slot]", "a_.topk_weights[slot]",
            "the routing weight counts twice", BACKENDS + "test_weight_on_input"),
    _native("skip_counts", "cpu/moe.cpp", "                if (a_.topk_ids[slot] == kSkip) continue;\n", "",
            "a skipped slot counts", ROUTING + "test_r1_minus_one_contributes_nothing"),
    _native("invariance", "cpu/moe.cpp", "k_.few_limit) && !a_.batch_invariant;", "k_.few_limit);",
            "batch_invariant is ignored", BACKENDS + "test_n8_batch_invariance"),
    _native("bias_stride", "cpu/moe.cpp", "group.expert * shape_.hidden_padded + first", "group.expert * a_.hidden + first",
            "the bias of another expert", BACKENDS + "test_against_float64"),
    _native("x_padding", "cpu/moe.cpp", "memset(row + a_.hidden * ws_.x.item, 0,", "memset(row + a_.hidden * ws_.x.item, 255,",
            "padding of x is NaN", BACKENDS + "test_against_float64"),
    _native("many_rows", "cpu/routing.h", "for_even_parts(stop - begin, kMaxRows,",
            "for_even_parts(std::min<int64_t>(stop - begin, kMaxRows), kMaxRows,", "rows from 193 on are left out",
            ROUTING + "test_e2_all_tokens_on_one_expert_or_on_none"),
    _native("beta_dropped", "cpu/activation.h", "(clamp_symmetric(u, limit) + beta)", "(clamp_symmetric(u, limit) + 1.0f)",
            "swigluoai ignores beta", ACTIVATION),
)  # fmt: skip

_FORMS = (
    _python("form_threshold", "x_formats", "(bits & 0x7FFFFF) > 0x600000", "(bits & 0x7FFFFF) >= 0x600000",
            "448 itself takes the next scale", SECOND),
    _python("int8_top", "x_formats", "_divided(_amax(x), _INT8_MAX)", "_divided(_amax(x), 128)", "int8 by 128", SECOND),
    _python("int15_half", "x_formats", "high = (q + 128) >> 8", "high = q >> 8", "low bytes wrap", SECOND),
    _python("fp8x2_low", "x_formats", "_to_e4m3(16 * (value", "_to_e4m3(8 * (value", "lo loses a bit", SECOND),
    _python("fp8_group", "x_formats", '128,\n        "e4m3: x/s, s the least', 'BLOCK,\n        "e4m3: x/s, s the least',
            "fp8 by groups of 32", SECOND),
    _python("rounded_before_the_weight", "reference", "product(_entered(rows * weight, x_format, input_scale), w13, batch_invariant)",
            "product(_entered(rows, x_format, input_scale), w13, batch_invariant) * weight", "x is rounded before its weight",
            FORMS + "test_both_products_take_the_form"),
    _python("second_product", "reference", "product(_entered(a, x_format, scale2), down", "product(a, down",
            "the second product is not rounded", FORMS + "test_both_products_take_the_form"),
    _python("static_swapped", "reference", "for s in (w13_input_scale, w2_input_scale)", "for s in (w2_input_scale, w13_input_scale)",
            "the static scales change places", FORMS + "test_static_scales_are_the_expert_s_own"),
    _python("form_of_module", "nn", "x_format=self.x_format,", 'x_format="none",', "the module ignores x_format",
            FORMS + "test_graphs_modules_and_unfinalized"),
    _python("skipped_has_a_row", "unfinalized", "(ids < 0) | (ids", "(ids < -1) | (ids", "a skipped slot has a row",
            TWO_STEPS + "test_unfinalized_by_hand"),
    _python("rows_without_weight", "unfinalized", "call.topk_weights if call.weight_on_input else ", "",
            "weight_on_input is ignored", TWO_STEPS + "test_unfinalized_by_hand"),
    _python("strided_map", "unfinalized", "-1, slots).contiguous()", "-1, slots)", "row_of_slot keeps strides of ids",
            TWO_STEPS + "test_c1_opcheck_out_and_unfinalized"),
    _python("rows_without_scale", "unfinalized", "_take(call.x_scale, token)", "call.x_scale", "scales of other tokens",
            FORMS + "test_c1_opcheck_with_quantized_x"),
    _python("sum_without_weight", "unfinalized", "row * weight[:, None]", "row", "finalize ignores weights",
            TWO_STEPS + "test_finalize_by_hand"),
    _python("out_and_gradient", "moe_call", "no_gradient(op, out, call.x, call.topk_weights,", "no_gradient(op, out,",
            "a gradient is lost in silence", TWO_STEPS + "test_out_where_a_gradient_is_needed"),
    _python("piece_of_scales", "_ops", "(scales, _PIECE // BLOCK)", "(scales, _PIECE // BLOCK // 2)",
            "pieces of codes meet others of scales", "tests/test_rules_memory.py::test_m3_dequant_into_a_given_output"),
)  # fmt: skip

_ROUTES = (
    _python("route_scale", "routing", "if renormalize else total) * scale", "if renormalize else total)", "scale is ignored",
            SAME_BITS),
    _python("route_ties", "routing", "descending=True, stable=True", "descending=False, stable=True",
            "the least logits are chosen", SAME_BITS),
    _python("bias_weighs", "routing", "values.gather(1, ids.clamp(min=0))", "choice.gather(1, ids.clamp(min=0))",
            "the bias is part of the weights", SAME_BITS),
    _python("group_of_one", "routing", "by_group.topk(2, dim=-1).values.sum(-1) if two else", "by_group.amax(-1) if two else",
            "a group counts as its best, with a bias too", SAME_BITS),
    _python("not_renormalized", "routing", "_sum_in_order(chosen) if renormalize else total", "total", "renormalize is ignored",
            SAME_BITS),
    _python("hash_ids", "route_call", "table[ids.clamp(0, vocabulary - 1).long()]", "table[: len(ids)]", "input_ids are ignored",
            ROUTE + "test_hash_table"),
    _python("hash_unchecked", "route_call", "(rows >= 0) & (rows < experts)", "(rows >= 0)", "an expert E is looked up",
            EXPORT + "test_a_table_of_experts_is_checked_when_the_program_runs"),
    _python("route_range", "route_call", 'need_float32(_OP, "scale", self.scale)', "pass", "scales beyond float32 pass",
            "tests/test_errors_route.py"),
    _python("packed_mask", "packed_topk", ".to(torch.int32) & 0xFFFF", ".to(torch.int32)", "a negative weight spoils the id",
            "tests/test_packed_topk.py::test_bits_by_hand"),
    _native("native_bias_weighs", "cpu/route.cpp", "weights[k] = logits[ids[k]];", "weights[k] = choice[ids[k]];",
            "the bias is part of the weights", ROUTE + "test_sigmoid_topk"),
    _native("native_group", "cpu/route.cpp", "return two ? first + second : first;", "return first;",
            "a group counts as its best, with a bias too", ROUTE + "test_softmax_topk"),
    _native("native_renormalize", "cpu/route.cpp", "if (args.renormalize) {", "if (!args.renormalize) {",
            "renormalize is turned round", ROUTE + "test_sigmoid_topk"),
    _native("native_ties", "cpu/route.cpp", "bits >> 31) != 0 ? bits : bits ^ 0x7fffffff",
            "bits >> 31) != 0 ? bits : (bits ^ 0x7fffffff) >> 8 << 8", "close logits tie", ROUTE + "test_ties_go_to_the_lower_index"),
    _native("native_zero", "cpu/route.cpp", "number_or_lowest(value) + 0.0f", "number_or_lowest(value)", "-0 is below 0",
            ROUTE + "test_ties_go_to_the_lower_index"),
    _native("native_scale", "cpu/route.cpp", "nonzero(total) * args.scale", "nonzero(total)", "scale is ignored",
            ROUTE + "test_sigmoid_topk"),
)  # fmt: skip

_TRAINING = (
    _python("mask_of_x", "moe_backward", "if output_mask[0]:", "if True:", "output_mask is ignored",
            GRADIENTS + "test_the_mask_leaves_out_what_nobody_needs", OF_OPS + "test_c1_opcheck_moe_backward"),
    _python("weight_without_bias", "moe_backward", "grad_weight + _row_sums(grad_output * expert.w2_bias, batch_invariant)", "grad_weight",
            "the bias is no part of the weight's gradient", GRADIENTS + "test_b1_against_float64"),
    _python("back_not_rounded", "moe_backward", "a.to(torch.bfloat16).to(a.dtype) if round_intermediate else a", "a",
            "the weight's factor is not the rounded one",
            GRADIENTS + "test_the_rounded_intermediate_is_the_factor_of_the_weight"),
    _python("back_on_input", "moe_backward", "_row_sums(grad_h * bare, batch_invariant), grad_h * weight",
            "_row_sums(grad_h * bare, batch_invariant), grad_h",
            "x's gradient misses its weight", GRADIENTS + "test_b1_weight_on_input_by_hand"),
    _python("back_other_forms", "moe_backward", 'if call.x_format != "none":', "if False:", "a wrong gradient of rounded x",
            OF_OPS + "test_b1_other_forms_of_x_are_refused_by_name"),
    _python("slope_beyond", "activation", "dg.masked_fill(beyond_g, 0)", "dg", "a clamp lets the gradient through", SLOPES),
    _python("slope_step", "activation", ".masked_fill(gate > limit, 0)", "", "swiglustep lets the gradient through", SLOPES),
    _python("slope_situ", "activation", " + alpha * t * (1 - s)", "", "situ's sigmoid has no slope", SLOPES),
    _python("route_slope", "route_gradient", "    if not renormalize:", "    if True:", "the divisor is a constant",
            OF_OPS + "test_route_by_hand"),
    _python("route_slope_skip", "route_gradient", "torch.where(ids < 0, 0.0, chosen)", "chosen", "-1 has a gradient",
            OF_OPS + "test_a_table_of_experts_gives_no_gradient_to_a_slot_of_minus_one"),
)  # fmt: skip

_OTHERS = (
    _python("mode_ties", "quant_modes", 'ties="away", source="amd-quark', 'source="amd-quark', "ties of one library", CORNERS),
    _python("mode_byte0", "quant_modes", "to_mx\", byte0=2.0**126", "to_mx\", byte0=2.0**127", "byte 0 of one library", CORNERS),
    _python("mode_sign", "quant_modes", '"x < 0 and code > 0", nan=', '"x < 0", nan=', "-0 of one library", CORNERS),
    _python("mode_nan", "quant_modes", 'inf="seen", nan="skipped")\n_TORCHAO', 'inf="seen", nan="seen")\n_TORCHAO',
            "NaN makes the scale of one library", CORNERS),
    _python("search_tie", "scale_search", "(difference < 0)", "(difference <= 0)", "of equal errors the lower byte",
            MODES + "test_mse_is_the_least_error_of_all_scale_bytes"),
    _python("dense_order", "quantize", 'expert.detach() if order == "out_in" else expert.detach().T', "expert.detach()",
            "order is ignored", "tests/test_quantize_experts.py::test_b2_mxfp4_values_come_back_exactly"),
    _python("dense_device", "quantize", "        _on_device(name, matrix, device)\n", "", "matrices of two devices",
            "tests/test_quantize_experts.py::test_sentence"),
    _python("exported_ids", "export", "(ids >= -1) & (ids < call.w13.shape[0])", "(ids >= -1)", "a program takes an id of E",
            EXPORT + "test_ids_are_checked_when_the_program_runs"),
    _python("exported_numbers", "export", "(ordered[1:] != ordered[:-1]).all()", "(ordered[1:] >= ordered[:-1]).all()",
            "a program counts an expert twice", EXPORT + "test_ids_are_checked_when_the_program_runs"),
    _python("exported_rows", "export", "(row_of_slot >= -1) & (row_of_slot < rows.shape[0])", "(row_of_slot >= -1)",
            "a program skips a row that does not exist", EXPORT + "test_rows_of_finalize_are_checked_when_the_program_runs"),
    _python("debug_x", "debug", '_finite(where, "x", x)', "pass", "a NaN in x is not named", DEBUG + "test_bad_inputs"),
    _python("debug_result", "debug", '_finite(where, "the result", result)', "pass", "an Inf in the result is not named",
            DEBUG + "test_a_result_that_overflows"),
    _python("debug_scales", "debug", "tensor, tensor == NAN_SCALE,", "tensor, tensor > NAN_SCALE,", "scale byte 255 is not named",
            DEBUG + "test_a_nan_scale_byte"),
    _python("golden_half", "format", "magnitude * (126 <<", "magnitude * (125 <<", "code 1 is a quarter",
            "tests/test_golden.py::test_dequant"),
)  # fmt: skip

MUTANTS = _NUMBERS + _LAYER + _WEIGHTS + _CPU + _FORMS + _ROUTES + _TRAINING + _OTHERS
