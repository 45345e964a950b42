"""Carries tokens to their experts and back: within this process, or over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .order import Collect, Order, Spread
from .payload import Rounded, RoundedGradient, pack, unpack

_ops = torch.ops._c10d_functional


class Local:
    """All experts are local: rows are sorted, nothing is sent, and the host never waits.

    Args:
        narrow: whether rows are rounded as in `Exchange`, so that every layout computes the same.
    """

    def __init__(self, *, narrow: bool = False) -> None:
        self.narrow = narrow

    def dispatch(
        self, x: Tensor, experts: Tensor, count: int, *, meanwhile: Callable[[], None] | None = None
    ) -> tuple[Tensor, Tensor, Order]:
        """See `forge_train.TokenDispatch`."""
        order = Order.of(experts, count)
        rows = _apply(Spread, x, order, experts.numel())
        return _apply(Rounded, rows) if self.narrow else rows, order.sizes, order

    def combine(self, rows: Tensor, weights: Tensor, handle: Order) -> Tensor:
        """See `forge_train.TokenDispatch`."""
        return _apply(Collect, _apply(RoundedGradient, rows) if self.narrow else rows, weights, handle)


@dataclass(frozen=True)
class Sent:
    """State with which `Exchange.combine` undoes `dispatch`."""

    order: Order
    forth: Tensor
    """Index of a row in the experts' order → index in the order of arrival."""
    back: Tensor
    """The reverse."""
    leaving: list[int]
    """Number of rows for each rank."""
    coming: list[int]
    """Number of rows from each rank."""


class Exchange:
    """Experts are spread over the ranks of a group, in order; every rank sends each row to its expert's rank.

    The host waits once per layer and direction, for the split sizes.

    Args:
        group: the ranks.
        narrow: whether rows are sent as e4m3 with scales.
    """

    def __init__(self, group: dist.ProcessGroup, *, narrow: bool = False) -> None:
        self.name, self.size, self.narrow = group.group_name, group.size(), narrow

    def dispatch(
        self, x: Tensor, experts: Tensor, count: int, *, meanwhile: Callable[[], None] | None = None
    ) -> tuple[Tensor, Tensor, Sent]:
        """See `forge_train.TokenDispatch`; `meanwhile` is called while rows are being sent."""
        order = Order.of(experts, count)
        mine = order.sizes.view(self.size, -1)
        theirs = _ops.wait_tensor(self.send(mine, [1] * self.size, [1] * self.size))
        leaving, coming = _splits(mine, theirs, experts.numel())
        rows = _apply(Spread, x, order, sum(leaving))
        under_way, payload = Start.apply(rows, self, leaving, coming)  # type: ignore[no-untyped-call]
        if meanwhile is not None:
            meanwhile()
        arrived = _apply(Finish, under_way, payload)
        local = torch.arange(mine.shape[1], device=x.device).repeat(self.size)
        forth = local.repeat_interleave(theirs.flatten(), output_size=sum(coming)).argsort(stable=True)
        back = torch.empty_like(forth).index_copy(0, forth, torch.arange(len(forth), device=x.device))
        return _apply(Permute, arrived, forth, back), theirs.sum(0), Sent(order, forth, back, leaving, coming)

    def combine(self, rows: Tensor, weights: Tensor, handle: Sent) -> Tensor:
        """See `forge_train.TokenDispatch`."""
        returned = _apply(Return, _apply(Permute, rows, handle.back, handle.forth), self, handle)
        return _apply(Collect, returned, weights, handle.order)

    def send(self, x: Tensor, leaving: list[int], coming: list[int]) -> Tensor:
        """Send runs of rows to each rank; the received rows are valid after `wait_tensor`."""
        arriving: Tensor = _ops.all_to_all_single(x.contiguous(), coming, leaving, self.name)
        return arriving

    def send_narrow(self, x: Tensor, leaving: list[int], coming: list[int]) -> Tensor:
        """The same in e4m3, including the wait."""
        packed = _ops.wait_tensor(self.send(pack(x), leaving, coming))
        return unpack(packed, x.shape[1], x.dtype)


def _splits(mine: Tensor, theirs: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Rows to and from each rank. The host waits only here. A plan has no values, so it spreads rows evenly."""
    if isinstance(mine, FakeTensor):
        even = [rows // len(mine)] * len(mine)
        return even, even
    leaving, coming = torch.stack([mine.sum(1), theirs.sum(1)]).tolist()
    return leaving, coming


class Start(torch.autograd.Function):
    """Start sending rows. Returns a placeholder for the rows to arrive, which carries gradients, and a tensor to wait
    for: the rows, or their packed form."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, to: Exchange, leaving: list[int], coming: list[int]) -> tuple[Tensor, Tensor]:
        ctx.to, ctx.leaving, ctx.coming = to, leaving, coming
        payload = to.send(pack(rows) if to.narrow else rows, leaving, coming)
        ctx.mark_non_differentiable(payload)
        return rows.new_empty(1, 1).expand(sum(coming), rows.shape[1]), payload

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _ops.wait_tensor(ctx.to.send(gradients[0], ctx.coming, ctx.leaving)), None, None, None


class Finish(torch.autograd.Function):
    """Finish receiving rows."""

    @staticmethod
    def forward(ctx: Any, under_way: Tensor, payload: Tensor) -> Tensor:
        arrived: Tensor = _ops.wait_tensor(payload)
        return unpack(arrived, under_way.shape[1], under_way.dtype) if payload.dtype is torch.uint8 else arrived

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Return(torch.autograd.Function):
    """Send rows back to their origin; their gradients travel as the rows did on the way here."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, to: Exchange, sent: Sent) -> Tensor:
        ctx.to, ctx.sent = to, sent
        returned: Tensor = _ops.wait_tensor(to.send(rows, sent.coming, sent.leaving))
        return returned

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        to, sent = ctx.to, ctx.sent
        if to.narrow:
            return to.send_narrow(gradients[0], sent.leaving, sent.coming), None, None
        return _ops.wait_tensor(to.send(gradients[0], sent.leaving, sent.coming)), None, None


class Permute(torch.autograd.Function):
    """`x[forth]`, where `back` is the inverse of `forth`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return x.index_select(0, forth)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, ctx.back), None, None


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    return cast(Tensor, function.apply(*arguments))  # type: ignore[no-untyped-call]
