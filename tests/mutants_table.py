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
QUANT = FORMAT + "test_n5_quant_against_fractions"
ACTIVATION = BACKENDS + "test_a1_activations"


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
    _python("tie_075", "format", "(0.75, True)", "(0.75, False)", "a tie goes to the odd code", QUANT),
    _python("tie_25", "format", "(2.5, False)", "(2.5, True)", "a tie goes to the odd code", QUANT),
    _python("bound_5", "format", "(5.0, False)", "(5.5, False)", "a rounding bound is moved", QUANT),
    _python("rule_even", "format", '"even": 0x5FFFFF', '"even": 0x600000', "scale rule even at 1.75", QUANT),
    _python("rule_rceil", "format", '"rceil": 0x400000', '"rceil": 0x3FFFFF', "scale rule rceil at 1.5", QUANT),
    _python("rule_floor", "format", '"floor": _MANTISSA', '"floor": 0x7FFFF0', "scale rule floor near 2", QUANT),
    _python("pack_order", "format", "codes[..., 0::2] | (codes[..., 1::2] << 4)",
            "codes[..., 1::2] | (codes[..., 0::2] << 4)", "nibble order of quant", QUANT),
    _python("unpack_order", "format", "(blocks & 15, blocks >> 4)", "(blocks >> 4, blocks & 15)",
            "nibble order of dequant", NUMBERS + "test_n1_the_even_element_lies_in_the_low_nibble"),
    _python("byte_0", "format", "special = (wide == 0) | (", "special = (wide == 1) | (", "scale byte 0 is zero",
            NUMBERS + "test_n2_scale_bytes_at_both_ends"),
    _python("inf_block", "format", "torch.isfinite(groups).all(-1)", "~torch.isnan(groups).any(-1)",
            "a block with Inf is finite", FORMAT + "test_n7_nan_and_inf_show_in_their_block_only"),
    _python("byte_clamp", "format", ").clamp_min(0)\n    return", ")\n    return", "bytes below 0 wrap", QUANT),
    _python("silu_clamp", "activation", "g.clamp(max=limit), u.clamp", "g.clamp(-limit, limit), u.clamp",
            "the gate is clamped on both sides", CASES + "test_v12_clamps"),
    _python("step_clamp", "activation", "gate.clamp(max=limit) * u", "gate * u", "swiglustep ignores its limit", ACTIVATION),
    _python("situ_beta", "activation", "else beta * torch.tanh(u / beta)", "else u", "situ ignores beta", ACTIVATION),
    _python("unused_parameter", "activation", "value is None or default is not None", "True",
            "a parameter without a use is ignored", ERRORS),
    _python("parameter_range", "activation", "_SMALLEST <= abs(number) <= _LARGEST", "True",
            "parameters beyond float32 pass", ERRORS),
)  # fmt: skip

_LAYER = (
    _python("weight_on_input", "reference", "h = h * weight if weight_on_input else h", "h = h",
            "weight_on_input is ignored", BACKENDS + "test_weight_on_input"),
    _python("bias_after_weight", "reference",
            "y = y if w2_bias is None else y + w2_bias[e].float()\n        y = y if weight_on_input else y * weight\n",
            "y = y if weight_on_input else y * weight\n        y = y if w2_bias is None else y + w2_bias[e].float()\n",
            "the bias comes after the routing weight", NUMBERS + "test_a3_biases_stand_where_they_belong"),
    _python("half_hidden", "reference", "a.to(torch.bfloat16).float()", "a.to(torch.float16).float()",
            "float16 between the products", BACKENDS + "test_a5_fp16_callers_do_not_overflow_between_the_products"),
    _python("hidden_not_rounded_back", "reference", "torch.where(chosen[slots, None], y, rows[slots])", "y * 1.01",
            "results are scaled", BACKENDS + "test_against_float64"),
    _python("not_localised", "moe_call", "ids = _localise(_OP, ids, call.expert_ids)", "ids = ids",
            "expert_ids are ignored", BACKENDS + "test_r3_expert_ids_of_two_shards_sum_to_the_whole"),
    _python("localise_order", "moe_call", "rows[place].to(ids.dtype), -1)", "place.to(ids.dtype), -1)",
            "rows of sorted numbers", BACKENDS + "test_r3_expert_ids_of_two_shards_sum_to_the_whole"),
    _python("ids_unchecked", "moe_call", "checks.id_values(_OP, ids, call.w13.shape[0])", "pass",
            "an id of E is skipped", ERRORS),
    _python("invariant_dropped", "moe_call", "batch_invariant=self.batch_invariant", "batch_invariant=False",
            "batch_invariant is ignored", BACKENDS + "test_n8_batch_invariance"),
    _python("on_input_dropped", "moe_call", "weight_on_input=self.weight_on_input", "weight_on_input=False",
            "weight_on_input is ignored", BACKENDS + "test_weight_on_input"),
    _python("negative_numbers", "checks", "need(least >= 0,", "need(True,", "expert_ids may hold -1",
            ROUTING + "test_r1_a_skipped_slot_finds_no_negative_expert_number"),
    _python("strided_packed", "checks", "            and tensor.is_contiguous()\n", "", "strided packed tensors pass", MEMORY),
    _python("repeated_numbers", "checks", "need(not twice,", "need(True,", "an expert counts twice", ERRORS),
    _python("id_of_e", "checks", "need(high < experts,", "need(high <= experts,", "an id of E passes", ERRORS),
    _python("none_passes", "checks", "isinstance(tensor, Tensor), lambda", "True, lambda", "None is no sentence", MEMORY),
    _python("block_of_16", "checks", "x.shape[-1] % BLOCK == 0", "x.shape[-1] % 16 == 0", "48 elements pass", ERRORS),
    _python("meta_mixed", "_ops", "t.device != x.device for t in rest", "False for t in rest",
            "memory as it was found is returned", "tests/test_rules_package.py::test_d5_the_device_of_the_tensors_counts"),
    _python("route_scale", "_ops", "(values * call.scale)", "(values)", "scale is ignored", "tests/test_ops.py::test_route_by_hand"),
    _python("route_ties", "_ops", "descending=True, stable=True", "descending=False, stable=True",
            "the least logits are chosen", "tests/test_ops.py::test_route_by_hand"),
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
    _native("limit_dropped", "cpu/ops.cpp", "static_cast<float>(limit)};", "__builtin_inff()};", "limit is ignored",
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

MUTANTS = _NUMBERS + _LAYER + _WEIGHTS + _CPU
