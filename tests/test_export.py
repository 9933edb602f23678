"""Exported programs lowered to the compiled leaves: the same bits, every check kept, one set of schemas."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mxfp4_ops import Activation, MXFP4Experts, Unsupported, _extension, _schemas, prepare
from mxfp4_ops.export import decompositions, lower, native_libraries
from problems import TINY, Problem, inputs, weights
from torch import Tensor
from torch.export import ExportedProgram

OPS = torch.ops.mxfp4
TABLE = torch.randint(8, (10, 2), generator=torch.Generator().manual_seed(5))
WORDS = torch.randint(10, (64,), generator=torch.Generator().manual_seed(6))
ORDER = torch.tensor([6, 2, 9, 0, 4, 3, 11], dtype=torch.int32)
TOKENS = (1, 2, 5, 64)
LONG = TINY.with_(tokens=64, activation="swigluoai")


class Call(torch.nn.Module):
    """A function as a module, which is what torch.export takes."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Tensor) -> Any:
        return self.call(*args)


def experts(problem: Problem = LONG, activation: Activation | None = None, **options: Any) -> MXFP4Experts:
    chosen = Activation(problem.activation, limit=7.0) if activation is None else activation
    return MXFP4Experts(prepare(weights(problem), activation=chosen, prefer="native_cpu"), **options)


def export(module: torch.nn.Module, *args: Tensor) -> ExportedProgram:
    """Export with tensors of 64 rows free in that dimension."""
    tokens = torch.export.Dim("T", min=0, max=4096)
    dynamic = [{0: tokens} if len(t) == LONG.tokens else None for t in args]
    return torch.export.export(module, args, dynamic_shapes=(tuple(dynamic),) if isinstance(module, Call) else dynamic)


def names(program: ExportedProgram) -> list[str]:
    return [str(n.target) for n in program.graph.nodes if "mxfp4" in str(n.target)]


def same(found: Any, wanted: Any) -> bool:
    pairs = [(found, wanted)] if isinstance(wanted, Tensor) else list(zip(found, wanted, strict=True))
    return all(torch.equal(a, b) and a.dtype is b.dtype and a.stride() == b.stride() for a, b in pairs)


# --- the same numbers -------------------------------------------------------------------------------------------------


def test_a_layer_keeps_its_bits_through_lower_save_and_load() -> None:
    layer, args = experts(), inputs(LONG)
    lowered = lower(export(layer, *args))
    assert names(lowered) == ["mxfp4._native_moe.default"]
    file = io.BytesIO()
    torch.export.save(lowered, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for count in (*TOKENS, 0):
        some = [t[:count].clone() for t in args]
        assert same(loaded(*some), layer(*some)), count


@pytest.mark.parametrize(
    ("activation", "options"),
    [
        (Activation("silu"), {}),
        (Activation("silu"), {"weight_on_input": True}),
        (Activation("silu"), {"batch_invariant": True}),
        (Activation("situ", 2.0, 3.0), {}),
        (Activation("situ", 2.0, float("inf")), {}),
        (Activation("swiglustep", limit=float("inf")), {}),
        (Activation("swigluoai", 1.5, -0.5, 0.25), {}),
    ],
    ids=str,
)
def test_every_option_reaches_the_leaf(activation: Activation, options: dict[str, Any]) -> None:
    layer = experts(LONG.with_(activation=activation.name), activation, **options)
    args = inputs(LONG)
    lowered = lower(export(layer, *args))
    assert same(lowered.module()(*args), layer(*args))
    (leaf,) = [n for n in lowered.graph.nodes if "_native_moe" in str(n.target)]
    assert all(abs(a) < float("inf") for a in leaf.args if isinstance(a, float))  # AOTInductor cannot write infinity


def test_the_arguments_that_the_leaf_does_not_take_are_converted() -> None:
    """Strided x, int64 ids, float64 weights, biases as [E, 0], codes as float4: what the op does, the graph does."""
    x, ids, routing = inputs(LONG)
    wide = torch.cat([x, x], 1)
    held = OPS.prepare_moe(*weights(LONG.with_(bias=False)).tensors().values(), layout="native_cpu.tile32.v1")
    held[0] = held[0].view(torch.float4_e2m1fn_x2)

    def run(wide: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        sizes = {"layout": "native_cpu.tile32.v1", "hidden": LONG.hidden, "intermediate": LONG.intermediate}
        return OPS.mxfp4_moe(wide[:, : LONG.hidden], ids, routing, *held, None, **sizes)

    args = (wide, ids.long(), routing.double())
    lowered = lower(export(Call(run), *args))
    assert names(lowered) == ["mxfp4._native_moe.default"]
    assert same(lowered.module()(*args), run(*args))


def test_the_other_ops_lower() -> None:
    def run(x: Tensor, logits: Tensor, blocks: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
        return (
            *OPS.quant(x, scale_rule="ceil"),
            OPS.qdq(x.t(), scale_rule="floor"),
            OPS.qdq_mxfp4(x),
            OPS.dequant(blocks, scales, dtype=torch.float16),
            OPS.dequant(blocks, scales),
            OPS.dequant_mxfp4(blocks, scales, torch.float32),
            *OPS.route(logits, None, None, None, 3, scale=2.0),
            *OPS.route(logits, None, None, None, 3, renormalize=False),
            *OPS.route(logits, None, None, None, 3, method="topk_softmax"),
            *OPS.route(logits, logits[0], None, None, 2, method="sigmoid_topk", groups=2, topk_groups=1),
            *OPS.route(logits, None, WORDS, TABLE, 2, method="sqrtsoftplus_topk"),
        )

    blocks, scales = OPS.quant(torch.randn(8, 96))
    args = (torch.randn(64, 96), torch.randn(64, 8), blocks, scales)
    program = torch.export.export(Call(run), args)
    lowered = lower(program)
    assert same(lowered.module()(*args), run(*args))
    assert {n.removesuffix(".default").partition(".")[2] for n in names(lowered)} <= set(_schemas.LEAVES)
    assert same(program.run_decompositions(decompositions()).module()(*args), run(*args))


def test_unfinalized_rows_and_their_sum_lower() -> None:
    packed = experts().packed

    def run(x: Tensor, ids: Tensor, routing: Tensor, order: Tensor) -> tuple[Tensor, ...]:
        rows, row_of_slot = packed.unfinalized(x, ids, routing, expert_ids=order)
        return rows, row_of_slot, OPS.finalize(*packed.unfinalized(x, ids, routing), routing)

    args = (*inputs(LONG), ORDER)
    lowered = lower(export(Call(run), *args))
    assert names(lowered) == ["mxfp4._native_moe.default"] * 2
    for count in (2, 3, LONG.tokens):
        few = (*(a[:count].clone() for a in args[:3]), ORDER)
        assert same(lowered.module()(*few), run(*few))


def test_a_table_of_experts_is_checked_when_the_program_runs() -> None:
    class Hash(torch.nn.Module):
        def forward(self, logits: Tensor, tokens: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
            return OPS.route(logits, None, tokens, table, 2, method="sqrtsoftplus_topk")

    args = (torch.randn(64, 8), WORDS, TABLE)
    run = lower(torch.export.export(Hash(), args)).module()
    assert same(run(*args), Hash()(*args))
    for words, table in ((WORDS + 10, TABLE), (WORDS - 10, TABLE), (WORDS, TABLE + 8), (WORDS, TABLE - 8)):
        with pytest.raises(RuntimeError, match="input_ids and hash_table must name tokens and experts that exist"):
            run(args[0], words, table)


def test_rows_of_finalize_are_checked_when_the_program_runs() -> None:
    class Finalize(torch.nn.Module):
        def forward(self, rows: Tensor, places: Tensor, routing: Tensor) -> Tensor:
            return OPS.finalize(rows, places, routing)

    args = (torch.randn(7, 32), torch.tensor([[0, 6], [-1, 3]], dtype=torch.int32), torch.rand(2, 2))
    run = lower(torch.export.export(Finalize(), args)).module()
    assert same(run(*args), OPS.finalize(*args))
    for wrong in (-2, 7):
        with pytest.raises(RuntimeError, match="mxfp4::finalize: row_of_slot must be -1"):
            run(args[0], torch.full_like(args[1], wrong), args[2])


# --- what is refused, and when ----------------------------------------------------------------------------------------


def test_ids_are_checked_when_the_program_runs() -> None:
    layer, args = experts(), inputs(LONG)
    x, ids, routing = args
    run, local = lower(export(layer, *args)).module(), lower(export(layer, *args, ORDER)).module()
    for wrong in (-2, LONG.experts):
        with pytest.raises(RuntimeError) as caught:
            run(x, torch.full_like(ids, wrong), routing)
        assert str(caught.value) == "mxfp4::moe: topk_ids must be -1 (skip) or below the number of experts."
    assert same(local(*args, ORDER), layer(*args, ORDER))
    assert same(local(x, ids + 1000, routing, ORDER), torch.zeros_like(x))
    for order, wrong, sentence in (
        (ORDER, ids - 7, "mxfp4::localise: topk_ids must be -1 (skip) or an expert."),
        (ORDER // 2, ids, "mxfp4::localise: expert_ids must not repeat."),
        (ORDER - 20, ids, "mxfp4::localise: expert_ids must be expert numbers from 0 on."),
    ):
        with pytest.raises(RuntimeError) as caught:
            local(x, wrong, routing, order)
        assert str(caught.value) == sentence


def test_localise_lowers_by_itself() -> None:
    ids = inputs(LONG)[1]
    lowered = lower(export(Call(OPS.localise), ids, ORDER))
    assert names(lowered) == [] and same(lowered.module()(ids, ORDER), OPS.localise(ids, ORDER))
    nobody = lower(export(Call(OPS.localise), ids, ORDER[:0])).module()
    assert same(nobody(ids, ORDER[:0]), torch.full_like(ids, -1))


def test_a_backend_that_needs_python_is_named() -> None:
    layer = MXFP4Experts(prepare(weights(LONG.with_(activation="silu")), prefer="reference"))
    with pytest.raises(Unsupported) as caught:
        lower(export(layer, *inputs(LONG)))
    assert str(caught.value).partition("\n")[0] == (  # torch adds the node and where it comes from
        "mxfp4::moe: layout must be one whose backend lowers to compiled ops, got 'canonical' of 'reference', which "
        "needs Python. Prepare the weights for another backend, or leave the program as it is and import mxfp4_ops "
        "where it runs."
    )


def test_an_op_that_does_not_lower_is_named() -> None:
    six = tuple(weights(TINY).tensors().values())

    def pack(w13: Tensor, s13: Tensor, b13: Tensor, w2: Tensor, s2: Tensor, b2: Tensor) -> list[Tensor]:
        return OPS.prepare_moe(w13, s13, b13, w2, s2, b2, layout="canonical")

    def repack(*stack: Tensor) -> Tensor:
        OPS.repack_expert(list(stack), 0, *(t[1] for t in stack), layout="canonical")
        return stack[0]

    known = ", ".join(sorted(op.name() for op in decompositions()))
    for call, name in ((pack, "prepare_moe"), (repack, "repack_expert")):
        with pytest.raises(ValueError) as caught:
            lower(export(Call(call), *six))  # type: ignore[arg-type]
        assert str(caught.value) == (
            f"mxfp4_ops.export.lower: program must call only ops that lower ({known}), got mxfp4.{name}.default. "
            "Prepare weights before the export."
        )


def test_the_small_leaves_refuse_what_they_cannot_read() -> None:
    """A lowered graph calls them without the checks of their ops."""
    x = torch.randn(4, 64)
    blocks, scales = OPS.quant(x)
    wrong: list[tuple[Any, ...]] = [(OPS._native_quant, x.t(), 0), (OPS._native_qdq, x.t(), 0)]
    for leaf in (OPS._native_quant, OPS._native_qdq):
        wrong += [(leaf, x[:, :48].contiguous(), 0), (leaf, x.double(), 0), (leaf, x.int(), 0)]
        wrong += [(leaf, x, -1), (leaf, x, 4), (leaf, torch.tensor(1.0), 0)]
    for b, s in (
        (blocks.t(), scales.t()), (blocks, scales.t().contiguous().t()), (blocks, scales[:3]), (blocks.int(), scales),
        (blocks, scales.float()), (blocks[:, :24].contiguous(), scales), (blocks, scales.flatten()),
        (blocks[:, :1].contiguous(), scales[:, :0].contiguous()), (blocks[0, 0], scales), (blocks, scales[0, 0]),
    ):  # fmt: skip
        wrong.append((OPS._native_dequant, b, s, 0))
    wrong += [(OPS._native_dequant, blocks, scales, code) for code in (-1, 3)]
    for leaf, *args in wrong:
        with pytest.raises(RuntimeError, match="mxfp4_ops"):
            leaf(*args)


# --- the libraries ----------------------------------------------------------------------------------------------------


def run(code: str) -> str:
    """Run Python without this package on its path, unless the code puts it there."""
    paths = f"package, schemas, cpu = {[str(p) for p in (_extension.FOLDER.parent, *native_libraries())]!r}\n"
    code = "import sys, torch\nload = torch.ops.load_library\n" + paths + code
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_compiled_schemas_are_those_of_python() -> None:
    out = run(
        "load(schemas)\nfor s in torch._C._jit_get_all_schemas():\n    if s.name.startswith('mxfp4::'): print(s)\n"
    )
    wanted = [str(torch._C.parse_schema(f"mxfp4::{name}{text}")) for name, text in _schemas.LEAVES.items()]
    assert sorted(out.splitlines()) == sorted(wanted)


@pytest.mark.parametrize("order", ["schemas, cpu", "cpu, schemas"])
def test_the_leaves_run_without_the_package(order: str) -> None:
    out = run(
        f"for library in ({order}): load(library)\n"
        "print(torch.ops.mxfp4._native_qdq(torch.full((32,), 5.9), 0)[0].item(), 'mxfp4_ops' in sys.modules)"
    )
    assert out.split() == ["6.0", "False"]


@pytest.mark.parametrize(
    "code",
    [
        "load(schemas); load(cpu); import mxfp4_ops",
        "import mxfp4_ops; load(schemas)",
        "load(schemas); import mxfp4_ops",
    ],
)
def test_the_schemas_beside_the_package_do_no_harm(code: str) -> None:
    out = run(
        f"sys.path.insert(0, package); {code}\n"
        "f = torch.compile(lambda x: torch.ops.mxfp4.qdq(x) * 2, backend='eager', fullgraph=True)\n"
        "print(f(torch.full((32,), 5.9))[0].item())"
    )
    assert out.split() == ["12.0"]


def test_the_libraries_are_files_and_their_absence_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [p.name for p in native_libraries()] == ["_C_schemas.so", "_C_cpu.so"]
    assert all(p.is_absolute() and p.is_file() for p in native_libraries())
    monkeypatch.setattr(_extension, "FOLDER", Path("/nowhere"))
    _extension.load_cpu.cache_clear()
    with pytest.raises(Unsupported) as caught:
        native_libraries()
    _extension.load_cpu.cache_clear()
    assert str(caught.value) == (
        "mxfp4_ops.export.native_libraries: needs the compiled kernels: the compiled CPU library is absent "
        "(installed with MXFP4_BUILD=none, or not built)."
    )
