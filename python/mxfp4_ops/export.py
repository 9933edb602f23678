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
from .call_plan import CallPlan
from .errors import Unsupported, need
from .moe_call import MoECall, localise_fake, shard_rows
from .route_call import RouteCall, run_route
from .unfinalized import UnfinalizedCall, finalize_fake, rows_before_sum, weighted_sum

# Their kernels call leaves and aten ops alone and read no data: traced, a kernel is its own decomposition.
_TRACEABLE = ("quant", "dequant", "qdq")


def _moe(*args: Any, **kwargs: Any) -> Tensor:
    """``moe`` by the layout's backend, with the checks that look at values as assertions."""
    call = MoECall(*args, **kwargs)
    plan = _lowering_plan(call)
    packed = call.check(plan)
    return call.run(plan, _local_ids(call), packed)


def _moe_unfinalized(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = UnfinalizedCall(*args, **kwargs)
    plan = _lowering_plan(call)
    packed = call.check(plan)
    return rows_before_sum(call, plan, packed, _local_ids(call))


def _lowering_plan(call: MoECall) -> CallPlan:
    plan = call.plan()
    if not plan.backend.lowers:
        raise Unsupported(
            f"{call.op}: layout must be one whose backend lowers to compiled ops, got {call.layout!r} of "
            f"{plan.backend.name!r}, which needs Python. Prepare the weights for another backend, or leave the program "
            "as it is and import mxfp4_ops where it runs."
        )
    return plan


def _local_ids(call: MoECall) -> Tensor:
    ids = call.topk_ids
    if call.expert_ids is not None:
        return _localise(ids, call.expert_ids)
    if ids.device.type == "cpu":  # as in the op: elsewhere values are not looked at
        known = (ids >= -1) & (ids < call.w13.shape[0])
        _assert(known.all(), f"{call.op}: topk_ids must be -1 (skip) or below the number of experts.")
    return ids


def _finalize(rows: Tensor, row_of_slot: Tensor, topk_weights: Tensor) -> Tensor:
    finalize_fake(rows, row_of_slot, topk_weights)
    if rows.device.type == "cpu":
        known = (row_of_slot >= -1) & (row_of_slot < rows.shape[0])
        _assert(known.all(), "mxfp4::finalize: row_of_slot must be -1 (skip) or below the number of rows.")
    return weighted_sum(rows, row_of_slot, topk_weights)


def _route(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = RouteCall(*args, **kwargs)
    method = call.check()
    given = call.given()
    if given is not None and given.device.type == "cpu":
        _assert((given >= 0).all(), "mxfp4::route: input_ids and hash_table must name tokens and experts that exist.")
    return run_route(call, method)


def _localise(topk_ids: Tensor, expert_ids: Tensor) -> Tensor:
    localise_fake(topk_ids, expert_ids)
    if topk_ids.device.type == "cpu":
        ordered = expert_ids.sort().values
        _assert((topk_ids >= -1).all(), "mxfp4::localise: topk_ids must be -1 (skip) or an expert.")
        _assert((ordered >= 0).all(), "mxfp4::localise: expert_ids must be expert numbers from 0 on.")
        _assert((ordered[1:] != ordered[:-1]).all(), "mxfp4::localise: expert_ids must not repeat.")
    return shard_rows(topk_ids, expert_ids)


def _assert(ok: Tensor, sentence: str) -> None:
    """Refuse when the program runs, by RuntimeError. The sentence is fixed in the graph and cannot name the value.

    Leaves look at values too, but compiled programs of torch 2.11 go on when a custom op raises.
    """
    torch.ops.aten._assert_async.msg(ok, sentence)


_ROWS: dict[str, Callable[..., Any]] = {
    "moe": _moe,
    "moe_unfinalized": _moe_unfinalized,
    "finalize": _finalize,
    "route": _route,
    "localise": _localise,
}


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Return the table for ``ExportedProgram.run_decompositions``: every op that lowers, and what it lowers to.

    Join it with another table to lower aten ops too: ``{**torch.export.default_decompositions(), **decompositions()}``.
    """
    rows = {name: _ops.KERNELS[name][0] for name in _TRACEABLE} | _ops.ALIASES | _ROWS
    return {getattr(torch.ops.mxfp4, name).default: row for name, row in rows.items()}


def lower(program: ExportedProgram) -> ExportedProgram:
    """Replace our ops in an exported program by compiled leaves and aten ops, which run without Python.

    The result computes the same bits when it is run by torch. What the ops refuse is refused here, or, where it depends
    on data, by RuntimeError when the program runs.
    Raises: Unsupported for weights in a layout whose backend needs Python; ValueError for an op that does not lower
    (those that prepare weights, and the forms with ``out``).
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
