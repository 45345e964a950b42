"""Scaling of a product's operands: the values that share a scale, and the form of the scale.

An operand is a matrix (or a stack of them) whose last axis is contracted. Values are divided by their scale before
rounding and multiplied by it afterwards; the shape of a scale broadcasts to the operand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .minifloat import E4M3, Minifloat, nearest, power_of_two

SMALLEST = 1e-12
"""The least maximum that is scaled up, as in torchao."""

_ops = torch.ops._c10d_functional


class Split(NamedTuple):
    """An operand of which the ranks of a group have parts."""

    group: str
    inner: bool
    """True if it is split along the contracted axis."""


class Format(Protocol):
    """Low-precision format of an operand."""

    @property
    def kind(self) -> Minifloat: ...
    @property
    def stochastic(self) -> bool: ...
    @property
    def narrow(self) -> bool:
        """True if bfloat16 holds the rounded values exactly."""
        ...

    @property
    def block(self) -> int:
        """Neighbours along an axis that share a scale, 0 where they are as many as there are."""
        ...

    def scale(self, x: Tensor, split: Split | None = None, sizes: Tensor | None = None) -> Tensor:
        """The scale of each value of `x` float32.

        Args:
            x: operand.
            split: where other ranks have parts of it.
            sizes: lengths of runs along the contracted axis, none of which shares a scale with another.
        """
        ...


def rounded(x: Tensor, scale: Tensor, form: Format) -> Tensor:
    """Return the values that a kernel multiplies, in float32."""
    return nearest(x / scale, form.kind, stochastic=form.stochastic) * scale


@dataclass(frozen=True)
class Scaled:
    """A power of two for the whole operand, or for each of its rows."""

    kind: Minifloat
    rows: bool = False
    stochastic: bool = False
    narrow = True
    block = 0

    def scale(self, x: Tensor, split: Split | None = None, sizes: Tensor | None = None) -> Tensor:
        if sizes is not None:
            largest = _by_run(x.abs(), *_runs(sizes, x.shape[-1]))
        else:
            largest = _largest(x.abs(), rows=self.rows)
        if split is not None and (split.inner or not self.rows):
            largest = largest_of_all(largest, split.group)
        return power_of_two(largest.clamp_min(SMALLEST) / self.kind.largest)


@dataclass(frozen=True)
class Blocks:
    """A scale for each block of neighbours along the contracted axis.

    Args:
        kind: of the values.
        size: values in a block.
        square: whether a block is as many rows high.
        scales: `float32`; `e8m0`, powers of two (OCP MX); or `e4m3` times a float32 for the whole operand (NVFP4).
        stochastic: whether to round stochastically.
    """

    kind: Minifloat
    size: int
    square: bool = False
    scales: Literal["float32", "e8m0", "e4m3"] = "float32"
    stochastic: bool = False

    @property
    def narrow(self) -> bool:
        return self.scales == "e8m0"

    @property
    def block(self) -> int:
        return self.size

    def scale(self, x: Tensor, split: Split | None = None, sizes: Tensor | None = None) -> Tensor:
        size = x.abs()
        if sizes is not None:
            largest = _by_run(size, *_runs(sizes, x.shape[-1], self.size))
        else:
            largest = _by_block(size, self.size, -1)
            if self.square:
                largest = _by_block(largest, self.size, -2)
        scale = largest.clamp_min(SMALLEST) / self.kind.largest
        if self.scales == "e8m0":
            return power_of_two(scale)
        if self.scales == "float32":
            return scale
        whole = _largest(largest)
        whole = (largest_of_all(whole, split.group) if split else whole).clamp_min(SMALLEST)
        whole = whole / (self.kind.largest * E4M3.largest)
        return nearest((scale / whole).clamp_min(2.0**-6), E4M3) * whole


def largest_of_all(x: Tensor, group: str) -> Tensor:
    """The maximum over the ranks of a group."""
    largest: Tensor = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "max", group))
    return largest


def _largest(x: Tensor, *, rows: bool = False) -> Tensor:
    """The maximum, or that of each row, of values that are not negative; 0 where there are none."""
    if not x.numel():
        return x.new_zeros(*x.shape[:-1], 1) if rows else x.new_zeros(())
    return x.amax(-1, keepdim=True) if rows else x.amax()


def _by_block(x: Tensor, size: int, axis: int) -> Tensor:
    """The maximum of each block along an axis, for each of its values."""
    length = x.shape[axis]
    missing = -length % size
    padded = F.pad(x, (0, missing) if axis == -1 else (0, 0, 0, missing))
    largest = torch.unflatten(padded, axis, (-1, size)).amax(axis)
    return largest.repeat_interleave(size, axis).narrow(axis, 0, length)


def _runs(sizes: Tensor, length: int, block: int = 0) -> tuple[Tensor, int]:
    """Return the block of each position along an axis, and the greatest possible number of blocks; blocks end with
    their run.

    Positions beyond the last run form a run of their own.
    """
    sizes = torch.cat([sizes, (length - sizes.sum()).view(1)])
    run = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes, output_size=length)
    if not block:
        return run, len(sizes)
    blocks = (sizes + block - 1) // block
    start, first = sizes.cumsum(0) - sizes, blocks.cumsum(0) - blocks
    place = torch.arange(length, device=sizes.device) - start[run]
    return first[run] + place // block, length // block + len(sizes)


def _by_run(x: Tensor, run: Tensor, count: int) -> Tensor:
    """The maximum of each run along the last axis, for each of its values; `x` is not negative."""
    index = run.expand_as(x)
    largest = x.new_zeros(*x.shape[:-1], count).scatter_reduce(-1, index, x, "amax")
    return largest.gather(-1, index)
