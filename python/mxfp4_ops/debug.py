"""A mode that looks at the data of every mixture-of-experts call and says where it first goes wrong.

The ops themselves read no data on a GPU, so that there a bad id is skipped and a bad scale byte becomes a NaN far from
its cause. Under ``debug()`` every call is checked first, on any device, at the price of a copy to the host and of one
unpacking of each expert that is used. Outside it costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .call_plan import CallPlan
from .errors import need
from .format import NAN_SCALE
from .layout import BIASES
from .moe_call import MoECall, localise
from .packing import unpack_expert
from .x_formats import INPUT_SCALES, expand_x

_OPS = tuple(
    getattr(getattr(torch.ops.mxfp4, name), overload)
    for name, overload in (("moe", "default"), ("moe", "out"), ("moe_unfinalized", "default"))
)


def debug() -> TorchDispatchMode:
    """Check ids, scale bytes, NaN and Inf, tags and shapes of every call in a ``with`` block; raise at the first bad
    one.

    The ValueError names the layer (by its place in the module that was called, where there is one), the tensor, the
    expert and the first bad index. Checked are: topk_ids in -1..E-1 and expert_ids without repeats, on every device;
    x, the routing weights of slots that count, and the result, for NaN and Inf; biases and scale bytes (255 is NaN) of
    the experts that are used, once for each packed tensor; layout, shapes and dtypes as always. For eager code: what
    torch.compile has compiled is not looked into.
    """
    return _Debug()


class _Debug(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._path: list[tuple[torch.nn.Module, str]] = []  # the modules whose forward is running, with their names
        self._seen: set[tuple[int, int]] = set()  # (data_ptr of w13, expert) whose bytes were found good
        self._hooks: list[Any] = []

    def __enter__(self) -> _Debug:
        hooks = torch.nn.modules.module
        self._hooks = [
            hooks.register_module_forward_pre_hook(self._enter_module),
            hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self._path.clear()

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        parent, prefix = self._path[-1] if self._path else (None, "")
        names = {id(m): name for name, m in parent.named_modules()} if parent is not None else {}
        name = names.get(id(module), type(module).__name__)
        self._path.append((module, f"{prefix}.{name}" if prefix else name))

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._path and self._path[-1][0] is module:
            self._path.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _OPS:
            return func(*args, **kwargs)
        call = MoECall(*args, **{k: v for k, v in kwargs.items() if k != "out"})
        where = f"mxfp4_ops.debug: layer {self._path[-1][1]!r}: " if self._path else "mxfp4_ops.debug: "
        self._check(call, where)
        out = func(*args, **kwargs)
        result = kwargs["out"] if func is torch.ops.mxfp4.moe.out else out[0] if isinstance(out, (tuple, list)) else out
        _finite(where, "the result", result)
        return out

    def _check(self, call: MoECall, where: str) -> None:
        """Look at everything that the call reads."""
        try:
            plan = call.plan()
            held = call.check(plan)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise type(error)(f"{where}{error}") from None
        experts = call.w13.shape[0]
        ids = call.topk_ids.cpu()
        if call.expert_ids is None:
            _ids_in_range(where, ids, experts)
        else:
            ids = localise(ids, call.expert_ids.cpu())
        x = call.x if call.x_scale is None else expand_x(call.x, call.x_scale, call.x_format, call.hidden)
        _finite(where, "x", x)
        counted = torch.where(ids >= 0, call.topk_weights.detach().cpu().float(), 0.0)
        _finite(where, "topk_weights", counted)
        for expert in ids.unique().tolist():
            if expert >= 0 and (call.w13.data_ptr(), expert) not in self._seen:
                self._check_expert(call, plan, held, where, expert)
                self._seen.add((call.w13.data_ptr(), expert))

    def _check_expert(
        self, call: MoECall, plan: CallPlan, held: Mapping[str, Tensor | None], where: str, expert: int
    ) -> None:
        """``held``: what ``call.check`` returned."""
        canonical = unpack_expert(
            {n: t for n, t in held.items() if t is not None and n not in INPUT_SCALES},
            expert,
            plan.backend.layout,
            hidden=call.hidden,
            intermediate=call.intermediate,
            gated=plan.activation.gated,
        )
        for name, tensor in canonical.items():
            here = f"{name} of expert {expert}"
            if name in BIASES:
                _finite(where, here, tensor)
            elif name.endswith("scale"):
                _need_none(where, here, tensor, tensor == NAN_SCALE, "hold no scale byte 255, which is NaN")


def _need_none(where: str, name: str, tensor: Tensor, bad: Tensor, rule: str) -> None:
    """Raise where ``bad`` is true anywhere, with the first place."""
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        value = tensor[tuple(place)].item()
        need(False, lambda: f"{where}{name} must {rule}, got {value} at {place}.")


def _finite(where: str, name: str, tensor: Tensor) -> None:
    _need_none(where, name, tensor, ~torch.isfinite(tensor), "be finite")


def _ids_in_range(where: str, ids: Tensor, experts: int) -> None:
    bad = (ids < -1) | (ids >= experts)
    _need_none(where, "topk_ids", ids, bad, f"be -1 (skip) or an expert below E = {experts}")
