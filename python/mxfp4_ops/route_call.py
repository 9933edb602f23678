"""The op ``mxfp4::route``: its arguments, the check that fake and kernel share, and both of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._extension import runs_native
from .argument_checks import cpu_extremes, need_device, need_dims, need_dtype, need_float, need_float32, need_shape
from .errors import need
from .routing import METHODS, SCORES, Method, route

_OP = "mxfp4::route"
_ID_DTYPES = (torch.int32, torch.int64)


@dataclass(slots=True)
class RouteCall:
    """The arguments of ``route``, in the schema's order."""

    logits: Tensor
    correction_bias: Tensor | None
    input_ids: Tensor | None
    hash_table: Tensor | None
    top_k: int
    method: str = "softmax_topk"
    groups: int = 1
    topk_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0

    def check(self) -> Method:
        """Refuse bad arguments, whatever the data is; return the method."""
        need_float(_OP, "logits", self.logits)
        need_dims(_OP, "logits", self.logits, 2, "[T, E]")
        method = METHODS.get(self.method)
        if method is None:
            need(False, lambda: f"{_OP}: method must be one of {', '.join(METHODS)}, got {self.method!r}.")
        assert method is not None
        experts = self.logits.shape[1]
        need(
            self.top_k > 0 and bool(self.top_k <= experts),
            lambda: f"{_OP}: top_k must be between 1 and the number of experts {experts}, got {self.top_k}.",
        )
        need_float32(_OP, "scale", self.scale)
        self._check_unused(method)
        self._check_groups()
        if self.correction_bias is not None:
            self._check_bias(self.correction_bias)
        self._check_hash()
        return method

    def _check_unused(self, method: Method) -> None:
        used = {"correction_bias": method.bias, "input_ids": method.hash_table, "hash_table": method.hash_table}
        given = [name for name, use in used.items() if not use and getattr(self, name) is not None]
        need(not given, lambda: f"{_OP}: {given[0]} must be None for method {self.method!r}, which does not use it.")
        need(
            method.groups or (self.groups == 1 and self.topk_groups == 1),
            lambda: (
                f"{_OP}: groups and topk_groups must be 1 for method {self.method!r}, got {self.groups} and "
                f"{self.topk_groups}."
            ),
        )
        why = "whose weights sum to 1 by definition" if method.renormalize else "which takes the sigmoids as they are"
        need(
            method.renormalize in (None, self.renormalize),
            lambda: f"{_OP}: renormalize must be {method.renormalize} for method {self.method!r}, {why}.",
        )

    def _check_groups(self) -> None:
        experts = self.logits.shape[1]
        need(
            self.groups > 0 and bool(experts % self.groups == 0),
            lambda: f"{_OP}: groups must divide the number of experts {experts}, got {self.groups}.",
        )
        need(
            0 < self.topk_groups <= self.groups,
            lambda: f"{_OP}: topk_groups must be between 1 and groups {self.groups}, got {self.topk_groups}.",
        )
        size = experts // self.groups
        need(
            bool(self.top_k <= size * self.topk_groups),
            lambda: (
                f"{_OP}: top_k must be at most {size * self.topk_groups}, the experts of topk_groups "
                f"{self.topk_groups} groups, got {self.top_k}."
            ),
        )
        need(
            self.groups == 1 or self.correction_bias is None or bool(size > 1),
            lambda: (
                f"{_OP}: groups must leave two experts in a group where correction_bias is given, since the best two "
                f"are the group's score, got {self.groups} groups of {size}."
            ),
        )

    def _check_bias(self, bias: Tensor) -> None:
        need_float(_OP, "correction_bias", bias)
        need_shape(_OP, "correction_bias", bias, (self.logits.shape[1],), "[E]")
        need_device(_OP, "correction_bias", bias, self.logits, "logits'")
        need(
            self.hash_table is None,
            lambda: f"{_OP}: correction_bias must be None where hash_table is given, which makes the choice.",
        )

    def _check_hash(self) -> None:
        ids, table = self.input_ids, self.hash_table
        need(
            (ids is None) == (table is None),
            lambda: (
                f"{_OP}: input_ids and hash_table must be given together, got only "
                f"{'hash_table' if ids is None else 'input_ids'}."
            ),
        )
        if ids is None or table is None:
            return
        need_dtype(_OP, "input_ids", ids, _ID_DTYPES)
        need_shape(_OP, "input_ids", ids, (self.logits.shape[0],), "[T]")
        need_device(_OP, "input_ids", ids, self.logits, "logits'")
        need_dtype(_OP, "hash_table", table, _ID_DTYPES)
        need(
            table.dim() == 2 and bool(table.shape[0] > 0) and bool(table.shape[1] == self.top_k),
            lambda: (
                f"{_OP}: hash_table must be [vocabulary, top_k] with top_k = {self.top_k}, got {list(table.shape)}."
            ),
        )
        need_device(_OP, "hash_table", table, self.logits, "logits'")

    def check_values(self) -> None:
        """Refuse, on a CPU, tokens and experts that do not exist."""
        if self.input_ids is not None and self.hash_table is not None:
            vocabulary, experts = self.hash_table.shape[0], self.logits.shape[1]
            _need_values("input_ids", self.input_ids, f"the vocabulary {vocabulary} of hash_table", vocabulary)
            rows = self.hash_table[self.input_ids.long()] if self.logits.device.type == "cpu" else self.hash_table
            _need_values("hash_table", rows, f"the number of experts {experts}", experts)

    def given(self) -> Tensor | None:
        """Look the experts up, [T, top_k] int32; -1 stands for one that does not exist."""
        ids, table = self.input_ids, self.hash_table
        if ids is None or table is None:
            return None
        vocabulary, experts = table.shape[0], self.logits.shape[1]
        rows = table[ids.clamp(0, vocabulary - 1).long()]
        known = ((ids >= 0) & (ids < vocabulary))[:, None] & (rows >= 0) & (rows < experts)
        return torch.where(known, rows, -1).to(torch.int32)


def _need_values(name: str, values: Tensor, what: str, end: int) -> None:
    """Refuse integers outside 0..end-1. Reads data, so it runs on CPU tensors only."""
    low, high = cpu_extremes(values)
    need(
        low >= 0 and high < end,
        lambda: f"{_OP}: {name} must be at least 0 and below {what}, got {low if low < 0 else high}.",
    )


def route_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = RouteCall(*args, **kwargs)
    call.check()
    return native_route_fake(call.logits, call.correction_bias, None, call.top_k)


def native_route_fake(
    logits: Tensor, bias: Tensor | None, given: Tensor | None, top_k: int, *rest: Any
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


def route_kernel(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = RouteCall(*args, **kwargs)
    method = call.check()
    call.check_values()
    return run_route(call, method)


def run_route(call: RouteCall, method: Method) -> tuple[Tensor, Tensor]:
    """``route`` without its checks: reads no data on the host."""
    given = call.given()
    bias = None if call.correction_bias is None else call.correction_bias.float().contiguous()
    options = (call.groups, call.topk_groups, call.renormalize, call.scale)
    if runs_native(call.logits):
        score = SCORES.index(method.score)
        return torch.ops.mxfp4._native_route(call.logits.contiguous(), bias, given, call.top_k, score, *options)
    groups, topk_groups, renormalize, scale = options
    return route(
        call.logits,
        bias,
        given,
        call.top_k,
        score=method.score,
        groups=groups,
        topk_groups=topk_groups,
        renormalize=renormalize,
        scale=scale,
    )
