"""Exported programs that run without Python: the ops as what they are made of, and the libraries that hold it.

``torch.export`` takes every op as it is, and such a program runs wherever this package is imported. ``lower`` replaces
the ops by the compiled leaves and by aten ops, so that a package which AOTInductor makes of the program runs in a
process without Python, once the ``native_libraries`` are loaded there. ``docs/export.md`` shows both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram

from . import _extension, _ops, _schemas
from .errors import Unsupported, need
from .moe_call import MoECall, localise_fake, shard_rows

# Their kernels call leaves and aten ops alone and read no data: traced, a kernel is its own decomposition.
_TRACEABLE = ("route", "quant", "dequant", "qdq")


def _moe(*args: Any, **kwargs: Any) -> Tensor:
    """``moe`` by the layout's backend, with the checks that look at values as assertions."""
    call = MoECall(*args, **kwargs)
    plan = call.plan()
    if not plan.backend.lowers:
        raise Unsupported(
            f"mxfp4::moe: layout must be one whose backend lowers to compiled ops, got {call.layout!r} of "
            f"{plan.backend.name!r}, which needs Python. Prepare the weights for another backend, or leave the program "
            "as it is and import mxfp4_ops where it runs."
        )
    packed = call.check(plan)
    ids = call.topk_ids
    if call.expert_ids is not None:
        ids = _localise(ids, call.expert_ids)
    elif ids.device.type == "cpu":  # as in the op: elsewhere values are not looked at
        known = (ids >= -1) & (ids < call.w13.shape[0])
        _assert(known.all(), "mxfp4::moe: topk_ids must be -1 (skip) or below the number of experts.")
    return call.run(plan, ids, packed)


def _localise(topk_ids: Tensor, expert_ids: Tensor) -> Tensor:
    localise_fake(topk_ids, expert_ids)
    if topk_ids.device.type == "cpu":
        ordered = expert_ids.sort().values
        _assert((topk_ids >= -1).all(), "mxfp4::localise: topk_ids must be -1 (skip) or an expert.")
        _assert((ordered[1:] != ordered[:-1]).all(), "mxfp4::localise: expert_ids must not repeat.")
    return shard_rows(topk_ids, expert_ids)


def _assert(ok: Tensor, sentence: str) -> None:
    """Refuse when the program runs, by RuntimeError. The sentence is fixed in the graph and cannot name the value.

    Leaves look at values too, but compiled programs of torch 2.11 go on when a custom op raises.
    """
    torch.ops.aten._assert_async.msg(ok, sentence)


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Return the table for ``ExportedProgram.run_decompositions``: every op that lowers, and what it lowers to.

    Join it with another table to lower aten ops too: ``{**torch.export.default_decompositions(), **decompositions()}``.
    """
    rows = {name: _ops.KERNELS[name][0] for name in _TRACEABLE} | _ops.ALIASES | {"moe": _moe, "localise": _localise}
    return {getattr(torch.ops.mxfp4, name).default: row for name, row in rows.items()}


def lower(program: ExportedProgram) -> ExportedProgram:
    """Replace our ops in an exported program by compiled leaves and aten ops, which run without Python.

    The result computes the same bits when it is run by torch. What the ops refuse is refused here, or, where it depends
    on data, by RuntimeError when the program runs.
    Raises: Unsupported for weights in a layout whose backend needs Python; ValueError for an op that does not lower
    (``prepare_moe``, ``unprepare_moe``, ``repack_expert``).
    """
    table = decompositions()
    lowered = program.run_decompositions(table)
    left = sorted({str(op) for op in _our_ops(lowered) if op.name().partition("::")[2] not in _schemas.LEAVES})
    known = sorted({op.name() for op in table})
    need(
        not left,
        lambda: (
            f"mxfp4_ops.export.lower: program must call only ops that lower ({', '.join(known)}), got "
            f"{', '.join(left)}. Prepare weights before the export."
        ),
    )
    return lowered


def _our_ops(program: ExportedProgram) -> Iterator[OpOverload]:
    """The ops of this package in all graphs of a program, also where a higher-order op has them as arguments."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                for value in (node.target, *node.args):
                    if isinstance(value, OpOverload) and value.namespace == "mxfp4":
                        yield value


def native_libraries() -> list[Path]:
    """Return the libraries that a process without Python loads before a lowered program, in this order.

    The first defines the schemas of the leaves, the second their kernels for CPUs. Both need a torch >= 2.11 in the
    process and no Python.
    Raises: Unsupported where the package is installed without its compiled part.
    """
    absent = _extension.load_cpu()
    if absent:
        raise Unsupported(f"mxfp4_ops.export.native_libraries: needs the compiled kernels: {absent}.")
    return [_extension.FOLDER / "_C_schemas.so", _extension.FOLDER / "_C_cpu.so"]
