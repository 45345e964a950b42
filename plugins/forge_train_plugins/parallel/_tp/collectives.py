"""Collectives of tensor parallelism with their gradients, along the sequence (axis 1) or the last axis.

They are torch's functional collectives, written out so that eager, torch.compile and its overlap of collectives with
matrix products (“async TP” matches chunk, cat, collective and product) see the same operations, in torch 2.11 as later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Group:
    """The ranks that split one copy of the model."""

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Group:
        return cls(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, on each of them."""
    reduced: Tensor = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group.name))
    return reduced


def all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """All ranks' tensors, which have one shape, behind each other."""
    gathered: Tensor = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), group.size, group.name))
    return torch.cat(torch.chunk(gathered, group.size, dim=0), dim=dim)


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's piece of the sum over the ranks."""
    pieces = torch.cat(torch.chunk(x, group.size, dim=dim), dim=0)
    scattered: Tensor = _ops.wait_tensor(_ops.reduce_scatter_tensor(pieces, "sum", group.size, group.name))
    return scattered


class GatherSequence(torch.autograd.Function):
    """Whole sequences from this rank's piece; every rank's gradient is a part of a sum (ḡ of arXiv:2205.05198)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(x, 1, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(gradients[0], 1, ctx.group), None


class ScatterSequence(torch.autograd.Function):
    """This rank's piece of the sum of everybody's sequences (g of arXiv:2205.05198)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, 1, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradients[0], 1, ctx.group), None


class Copy(torch.autograd.Function):
    """The same, its gradient summed over the ranks (f of arXiv:1909.08053)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradients[0], ctx.group), None


class Sum(torch.autograd.Function):
    """The sum over the ranks, whose gradient is the same on each of them (g of arXiv:1909.08053)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class SumEverywhere(torch.autograd.Function):
    """The sum over the ranks. Each rank uses it for something different, so its gradient is a sum too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradients[0], ctx.group), None


class GatherWhole(torch.autograd.Function):
    """Everybody's pieces of an axis of `size`; what follows is the same on every rank, and so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, group: Group) -> Tensor:
        ctx.dim, ctx.group, ctx.own = dim, group, x.shape[dim]
        ctx.each = -(-size // group.size)
        return all_gather(_pad(x, dim, ctx.each), dim, group).narrow(dim, 0, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        padded = _pad(gradients[0], ctx.dim, ctx.each * ctx.group.size)
        return padded.narrow(ctx.dim, ctx.group.rank * ctx.each, ctx.own).contiguous(), None, None, None


class TakeShare(torch.autograd.Function):
    """This rank's piece of sequences that every rank has whole; each rank's gradient is of its own piece."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.size = group, x.shape[1]
        ctx.each = -(-x.shape[1] // group.size)
        # A block may take views of it, as of what it is given on one process.
        return _pad(x, 1, ctx.each * group.size).narrow(1, group.rank * ctx.each, ctx.each).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradients[0], 1, ctx.group).narrow(1, 0, ctx.size), None


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    """Zeros behind, up to `size`."""
    missing = size - x.shape[dim]
    return F.pad(x, [*[0, 0] * (x.ndim - 1 - dim % x.ndim), 0, missing]) if missing else x
