"""Tensors on their way between ranks, with their gradients: sequences gathered, and exchanged for heads.

They are torch's functional collectives, written out, in torch 2.11 as later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .cut import Span

_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Group:
    """Ranks that exchange something."""

    process_group: dist.ProcessGroup
    size: int
    rank: int

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> Group:
        return cls(process_group, process_group.size(), process_group.rank())

    @property
    def name(self) -> str:
        return self.process_group.group_name


class Move(NamedTuple):
    """Tokens that lie together in a rank's slice, and in the sequence that the slices make."""

    rank: int
    at: int
    to: int
    size: int


def moves(slices: Sequence[Sequence[Span]]) -> tuple[Move, ...]:
    """Return the moves that assemble slices into one sequence, in order of positions."""
    pieces = []
    for rank, spans in enumerate(slices):
        at = 0
        for start, stop in spans:
            pieces.append((start, rank, at, stop - start))
            at += stop - start
    found, to = [], 0
    for _, rank, at, size in sorted(pieces):
        found.append(Move(rank, at, to, size))
        to += size
    return tuple(found)


def put_together(slices: Tensor, how: Sequence[Move]) -> Tensor:
    """`[ranks, batch, slice, …]` → `[batch, sequence, …]`"""
    ranks, batch, each, *rest = slices.shape
    whole = slices.new_empty(batch, ranks * each, *rest)
    for rank, at, to, size in how:
        whole[:, to : to + size] = slices[rank, :, at : at + size]
    return whole


def take_apart(whole: Tensor, how: Sequence[Move], slices: Tensor) -> None:
    """The way back."""
    for rank, at, to, size in how:
        slices[rank, :, at : at + size] = whole[:, to : to + size]


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Everybody's tensors, `[ranks, …]`."""
    gathered: Tensor = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), group.size, group.name))
    return gathered.view(group.size, *x.shape)


class GatherSequence(torch.autograd.Function):
    """Keys and values of whole sequences from everybody's slices; the gradients of all ranks are summed up."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, how: Sequence[Move], group: Group) -> tuple[Tensor, Tensor]:
        ctx.how, ctx.group, ctx.sizes = how, group, (key.shape[-1], value.shape[-1])
        both = all_gather(torch.cat([key, value], -1), group)
        keys, values = (put_together(one, how) for one in torch.split(both, ctx.sizes, -1))
        return keys, values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        group = ctx.group
        batch, length, heads, _ = gradients[0].shape
        pieces = gradients[0].new_empty(group.size, batch, length // group.size, heads, sum(ctx.sizes))
        for gradient, into in zip(gradients, torch.split(pieces, ctx.sizes, -1), strict=True):
            take_apart(gradient, ctx.how, into)
        own = _ops.wait_tensor(_ops.reduce_scatter_tensor(pieces.flatten(0, 1), "sum", group.size, group.name))
        return *torch.split(own, ctx.sizes, -1), None, None


class HeadsForSequence(torch.autograd.Function):
    """Some heads of whole sequences from all heads of everybody's slices (arXiv:2309.14509)."""

    @staticmethod
    def forward(ctx: Any, how: Sequence[Move], group: Group, *slices: Tensor) -> tuple[Tensor, ...]:
        ctx.how, ctx.group = how, group
        return to_heads(slices, how, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *to_slices(gradients, ctx.how, ctx.group)


class SequenceForHeads(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx: Any, how: Sequence[Move], group: Group, *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.how, ctx.group = how, group
        return to_slices(wholes, how, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *to_heads(gradients, ctx.how, ctx.group)


def to_heads(slices: Sequence[Tensor], how: Sequence[Move], group: Group) -> tuple[Tensor, ...]:
    """`[batch, slice, heads, …]` → `[batch, sequence, heads / ranks, …]`, in one exchange."""
    apart = [torch.unflatten(x, 2, (group.size, -1)).movedim(2, 0) for x in slices]
    rows, pieces = laid_out([x.shape for x in apart], slices[0])
    for x, into in zip(apart, pieces, strict=True):
        into.copy_(x)
    return tuple(put_together(x, how) for x in exchange(rows, pieces, group))


def to_slices(wholes: Sequence[Tensor], how: Sequence[Move], group: Group) -> tuple[Tensor, ...]:
    """The way back."""
    shapes = [(group.size, len(x), x.shape[1] // group.size, *x.shape[2:]) for x in wholes]
    rows, pieces = laid_out(shapes, wholes[0])
    for x, into in zip(wholes, pieces, strict=True):
        take_apart(x, how, into)
    return tuple(x.movedim(0, 2).flatten(2, 3) for x in exchange(rows, pieces, group))


def laid_out(shapes: Sequence[Sequence[int]], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """A row for each rank, and where tensors of shapes `[ranks, …]` lie in it."""
    sizes = [math.prod(shape[1:]) for shape in shapes]
    rows = like.new_empty(shapes[0][0], sum(sizes))
    parts = zip(torch.split(rows, sizes, 1), shapes, strict=True)
    return rows, [torch.unflatten(part, 1, tuple(shape[1:])) for part, shape in parts]


def exchange(rows: Tensor, pieces: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Each row to its rank, and from each rank the row for this one, in the same pieces."""
    splits = [1] * group.size
    got: Tensor = _ops.wait_tensor(_ops.all_to_all_single(rows, splits, splits, group.name))
    parts = torch.split(got, [piece[0].numel() for piece in pieces], 1)
    return [torch.unflatten(part, 1, tuple(piece.shape[1:])) for part, piece in zip(parts, pieces, strict=True)]
