"""A module that holds packed experts: buffers under the canonical names, and the layout's tag in its state."""

from __future__ import annotations

import json
from typing import Any, cast

import torch
from torch import Tensor

from . import token_checks
from .activation import Activation
from .errors import dtype_name, need, need_type
from .functional import mxfp4_moe
from .layout import BIASES, SLOTS
from .packed import PackedExperts
from .x_formats import INPUT_SCALES

_VERSION = 1
_LONGEST = 4096  # bytes of a description; ours have about 150


class MXFP4Experts(torch.nn.Module):
    """Experts as a layer: ``module(x, topk_ids, topk_weights)`` is one op, on packed weights that stay packed.

    The packed tensors are buffers named w13, w13_scale, w13_bias, w2, w2_scale, w2_bias, aux0, ..., w13_input_scale,
    w2_input_scale; an absent one is no buffer. x_format, weight_on_input and batch_invariant as ``mxfp4_moe``; x comes
    unquantized. The layout's tag, sizes and activation travel in ``state_dict`` as a uint8 tensor of JSON under
    ``_extra_state``, so a state dict holds tensors only and safetensors takes it as it is. Loading packed tensors of
    another layout is refused.
    """

    def __init__(
        self,
        packed: PackedExperts,
        *,
        x_format: str = "none",
        weight_on_input: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        token_checks.x_format("MXFP4Experts", x_format)
        self.layout, self.hidden, self.intermediate = packed.layout, packed.hidden, packed.intermediate
        self.activation = Activation(packed.activation, packed.alpha, packed.beta, packed.limit)
        self.x_format, self.weight_on_input, self.batch_invariant = x_format, weight_on_input, batch_invariant
        self._aux_names = [f"aux{i}" for i in range(len(packed.aux))]
        for name in (*SLOTS, *INPUT_SCALES):
            self.register_buffer(name, getattr(packed, name))
        for name, tensor in zip(self._aux_names, packed.aux, strict=True):
            self.register_buffer(name, tensor)

    def _slots(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SLOTS}

    @property
    def packed(self) -> PackedExperts:
        """The tensors as they are now (after ``to(device)``, ``load_state_dict``), sharing storage."""
        aux = tuple(getattr(self, name) for name in self._aux_names)
        act = self.activation
        return PackedExperts(
            **self._slots(),
            aux=aux,
            layout=self.layout,
            hidden=self.hidden,
            intermediate=self.intermediate,
            activation=act.name,
            alpha=act.alpha,
            beta=act.beta,
            limit=act.limit,
            **{name: getattr(self, name) for name in INPUT_SCALES},
        )

    def _aux(self) -> list[Tensor]:
        scales = INPUT_SCALES if self.x_format == "fp8_static" else ()
        found = [getattr(self, name) for name in (*self._aux_names, *scales)]
        return [tensor for tensor in found if tensor is not None]

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, expert_ids: Tensor | None = None) -> Tensor:
        """Shapes, dtypes and errors as ``mxfp4_ops.mxfp4_moe``; x may have leading dimensions [..., H], ids and
        weights [..., K]."""
        act = self.activation
        # Not self.packed: dynamo of torch 2.11 cannot build a frozen dataclass inside a graph.
        out = mxfp4_moe(
            x.reshape(-1, x.shape[-1]),
            topk_ids.reshape(-1, topk_ids.shape[-1]),
            topk_weights.reshape(-1, topk_weights.shape[-1]),
            **self._slots(),
            aux=self._aux(),
            expert_ids=expert_ids,
            layout=self.layout,
            hidden=self.hidden,
            intermediate=self.intermediate,
            activation=act.name,
            alpha=act.alpha,
            beta=act.beta,
            limit=act.limit,
            x_format=self.x_format,
            weight_on_input=self.weight_on_input,
            batch_invariant=self.batch_invariant,
        )
        return out.reshape(x.shape)

    def describe(self) -> dict[str, Any]:
        """What the bytes are: the tag, the logical sizes, the activation. This is what travels in the state."""
        act = self.activation
        return {
            "version": _VERSION,
            "layout": self.layout,
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "activation": [act.name, act.alpha, act.beta, act.limit],
        }

    def get_extra_state(self) -> Tensor:
        return torch.frombuffer(bytearray(json.dumps(self.describe()).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """The check ran before any buffer was written: ``_load_from_state_dict``."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Compare tag, sizes, activation, names, dtypes and shapes before a byte is copied, whether ``strict`` or not:
        another layout's bytes of equal shape are garbage, and so are half of one expert and half of another."""
        names = (*SLOTS, *self._aux_names, *INPUT_SCALES)
        held = {n: state_dict[prefix + n] for n in names if prefix + n in state_dict}
        state = state_dict.get(prefix + "_extra_state")
        need(
            state is not None or not held,
            lambda: (
                f"MXFP4Experts: the state must have {prefix}_extra_state beside {prefix}{next(iter(held))}, got none. "
                "It says what layout the bytes are in; state_dict() writes it."
            ),
        )
        if state is not None:
            self._need_same(_described(prefix, state))
        mine = dict(self.named_buffers())
        need(
            not held or held.keys() == mine.keys(),
            lambda: f"MXFP4Experts: the state must have {', '.join(mine)} of {prefix or 'it'}, got {', '.join(held)}.",
        )
        for name, tensor in held.items():
            _need_like(f"MXFP4Experts: the state's {prefix}{name}", tensor, mine[name], bias=name in BIASES)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _need_same(self, found: dict[str, Any]) -> None:
        mine = self.describe()
        need(
            found.get("layout") == self.layout,
            lambda: (
                f"MXFP4Experts: the state's layout must be {self.layout!r}, got {found.get('layout')!r}. "
                "Call mxfp4_ops.unprepare() where it was packed, and prepare() here."
            ),
        )
        need(
            found == mine,
            lambda: f"MXFP4Experts: the state must describe {mine}, got {found}.",
        )

    def extra_repr(self) -> str:
        return (
            f"experts={len(self.packed.w13)}, hidden={self.hidden}, intermediate={self.intermediate}, "
            f"activation={self.activation.name!r}, layout={self.layout!r}"
        )


def _described(prefix: str, state: object) -> dict[str, Any]:
    """Read an extra state back. Whatever else stands there is refused."""
    fits = isinstance(state, Tensor) and state.dtype is torch.uint8 and state.numel() <= _LONGEST
    got = f"{state.dtype} of {list(state.shape)}" if isinstance(state, Tensor) else type(state).__name__
    sentence = (
        f"MXFP4Experts: the state's {prefix}_extra_state must be a JSON object in at most {_LONGEST} bytes of uint8"
    )
    need(fits, lambda: f"{sentence}, got {got}.")
    text = bytes(cast(Tensor, state).flatten().cpu().tolist())
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{sentence}, got {error}.") from None
    need(isinstance(found, dict), lambda: f"{sentence}, got {text[:80]!r}.")
    return cast(dict[str, Any], found)


def _need_like(what: str, tensor: object, mine: Tensor, *, bias: bool) -> None:
    """A buffer takes only what it can copy without converting bytes: 127 of float8_e8m0fnu would become 1."""
    need_type(isinstance(tensor, Tensor), lambda: f"{what} must be a tensor, got {type(tensor).__name__}.")
    found = cast(Tensor, tensor)
    fits = found.dtype.is_floating_point and found.dtype.itemsize > 1 if bias else found.dtype is mine.dtype
    wanted = "a float dtype" if bias else dtype_name(mine.dtype)
    need_type(fits, lambda: f"{what} must be {wanted}, got {dtype_name(found.dtype)}.")
    need(found.shape == mine.shape, lambda: f"{what} must be {list(mine.shape)}, got {list(found.shape)}.")
