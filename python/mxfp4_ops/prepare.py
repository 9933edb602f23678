"""Pack experts for the backend that will run them, and get their checkpoint bytes back."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks, packing
from .activation import Activation, resolve
from .dispatch import backend_of, select
from .errors import need
from .experts import ExpertWeights, join_gate_up
from .layout import BIASES, SLOTS
from .packed import PackedExperts, need_canonical
from .problem import MoEProblem, arch_of

_OP = "mxfp4_ops.prepare"


def problem_of(
    experts: ExpertWeights,
    *,
    activation: Activation | str = "silu",
    top_k: int = 1,
    x_dtype: torch.dtype = torch.bfloat16,
    x_format: str = "none",
    device: torch.device | str | None = None,
) -> MoEProblem:
    """Describe the layer that ``experts`` make, on their own device or on ``device``: what ``select`` and ``explain``
    take."""
    need_canonical(_OP, experts)
    act = Activation(activation) if isinstance(activation, str) else activation
    resolve(_OP, act.name, act.alpha, act.beta, act.limit)
    weights = checks.canonical(_OP, experts.tensors(), gated=act.gated)
    return MoEProblem(
        arch=arch_of(weights["w13"].device if device is None else device),
        experts=weights["w2"].shape[0],
        hidden=weights["w2"].shape[1],
        intermediate=weights["w2"].shape[2] * 2,
        top_k=top_k,
        x_dtype=x_dtype,
        x_format=x_format,
        activation=act,
        bias=any(name in weights for name in BIASES),
    )


def prepare(
    experts: ExpertWeights,
    problem: MoEProblem | None = None,
    *,
    activation: Activation | str = "silu",
    interleaved: bool = False,
    prefer: str | None = None,
) -> PackedExperts:
    """Select a backend, then pack canonical weights into its layout, expert by expert.

    ``problem`` says what will be computed; left out, it is ``problem_of(experts, activation=activation)``. Where it is
    given, its own activation counts and ``activation`` must be left alone. ``interleaved`` says that the rows of w13
    and w13_bias are gate 0, up 0, gate 1, up 1, ... (gpt-oss) and not all gate rows, then all up rows. ``prefer``
    names the only candidate. Beside the result, memory holds one expert, padded and packed, and less than 64 MiB for
    experts of up to 25 MB; no reference to the inputs is kept, except by the backend ``reference``, whose layout is the
    canonical one: it relabels the tensors without a copy.
    Raises: Unsupported with every backend's reasons; ValueError and TypeError for weights that do not fit together, or
    for a problem of other sizes; TypeError for packed weights.
    """
    need(
        problem is None or activation == "silu",
        lambda: (
            f"{_OP}: activation must be left out where problem is given, which has {problem.activation.name!r}, "  # type: ignore[union-attr]
            f"got {activation!r}."
        ),
    )
    need_canonical(_OP, experts)
    found = problem_of(experts, activation=activation if problem is None else problem.activation)
    wanted = found if problem is None else problem
    _need_same(found, wanted)
    gated = wanted.activation.gated
    checks.interleaved(_OP, interleaved, gated=gated)
    layout = select(wanted, prefer).layout
    weights = checks.canonical(_OP, experts.tensors(), gated=gated)
    if layout.tag == "canonical" and not interleaved:  # the bytes lie right: relabel them (rule S3)
        tensors = [weights.get(name, weights["w13"].new_empty(found.experts, 0)) for name in SLOTS]
    else:
        tensors = packing.pack(weights, layout, gated=gated, interleaved=interleaved)
    return PackedExperts.from_tensors(tensors, layout.tag, wanted.hidden, wanted.intermediate, wanted.activation)


def _need_same(found: MoEProblem, wanted: MoEProblem) -> None:
    """The weights must be those of the problem they are packed for."""
    facts = [(p.experts, p.hidden, p.intermediate, p.bias) for p in (found, wanted)]
    need(
        facts[0] == facts[1],
        lambda: (
            f"{_OP}: problem must have the weights' (experts, hidden, intermediate, bias) = {facts[0]}, got {facts[1]}."
        ),
    )


def unprepare(packed: PackedExperts, *, interleaved: bool = False) -> ExpertWeights:
    """Get the canonical bytes back, exactly as ``prepare`` was given them; ``interleaved`` puts gate and up rows in
    turn."""
    op, gated = "mxfp4_ops.unprepare", packed.gated
    backend = backend_of(op, packed.layout)
    checks.interleaved(op, interleaved, gated=gated)
    held = checks.packed_list(op, packed.tensors(), backend, packed.hidden, packed.intermediate, gated=gated)
    stacks = packing.unpack(held, backend.layout, hidden=packed.hidden, intermediate=packed.intermediate, gated=gated)
    if interleaved:
        stacks = [
            _interleave(t) if name.startswith("w13") and t.numel() else t for name, t in zip(SLOTS, stacks, strict=True)
        ]
    w13, w13_scale, w13_bias, w2, w2_scale, w2_bias = stacks
    return ExpertWeights(
        w13, w13_scale, w13_bias if w13_bias.numel() else None, w2, w2_scale, w2_bias if w2_bias.numel() else None
    )


def _interleave(stack: Tensor) -> Tensor:
    return torch.stack([join_gate_up(expert) for expert in stack])


def repack_expert(packed: PackedExperts, expert: int, weights: ExpertWeights, *, interleaved: bool = False) -> None:
    """Overwrite one expert of packed weights with new checkpoint bytes, in place: pointers stay, captured graphs see
    them.

    ``weights`` holds one expert: w13 [S*I, H/2] and so on, biases [S*I] and [H] in the dtypes they have in ``packed``.
    """
    torch.ops.mxfp4.repack_expert(
        packed.tensors(),
        expert,
        *weights.tensors().values(),
        layout=packed.layout,
        interleaved=interleaved,
        activation=packed.activation,
        alpha=packed.alpha,
        beta=packed.beta,
        limit=packed.limit,
    )
