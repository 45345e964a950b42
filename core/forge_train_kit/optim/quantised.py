"""State in 8 and 4 bits: an element is a code from a table, times a scale that a block of its row shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from forge_train.mesh.tensors import full_tensor, local

from .stochastic import bits, fused, numbers, offsets, places, shards, spread

BLOCK = 128
"""Number of neighbours in a row that share a scale; a shorter row has one scale."""
LEAST, SHORTEST = 4096, 32
"""Least number of elements of a tensor, and of its rows, to quantise it (4,096 as in bitsandbytes and torchao)."""


def fits(shape: Sequence[int]) -> bool:
    """Return True if the state of a parameter of this shape is quantised; vectors and small tensors stay in fp32."""
    return len(shape) > 1 and math.prod(shape) >= LEAST and shape[-1] >= SHORTEST


@cache
def table(bits: int, *, signed: bool) -> tuple[float, ...]:
    """Values of the codes, as in `torchao.optim`: dynamic maps (arXiv:2110.02861), whose values are denser near zero;
    second moments in 4 bits use sixteenths without zero (arXiv:2309.01507)."""
    with _disable_current_modes():
        if bits == 4 and not signed:
            return tuple(torch.linspace(0, 1, 17, device="cpu")[1:].tolist())
        values, decades = [0.0, 1.0], bits - 1
        for decade in range(decades):
            edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, device="cpu")
            means = 10 ** (decade + 1 - decades) * ((edges[:-1] + edges[1:]) / 2)
            values += [*means.tolist(), *((-means).tolist() if signed else ())]
    return tuple(sorted(values))


@dataclass(frozen=True)
class Rows:
    """Blocks of a tensor's rows: those whose scales this rank has, and where its shard starts in the first one."""

    block: int
    blocks: int
    start: int
    cut: tuple[int, ...]
    """Axes of the mesh along which shards cut blocks; scales are the same along them."""

    @classmethod
    def of(cls, tensor: Any) -> Rows:
        row, here = tensor.shape[-1], local(tensor).shape[-1]
        block, last = min(BLOCK, row), tensor.dim() - 1
        axes = [axis for axis, one in enumerate(getattr(tensor, "placements", ())) if getattr(one, "dim", None) == last]
        if not axes or row % (block * math.prod(tensor.device_mesh.size(axis) for axis in axes)) == 0:
            return cls(block, -(-here // block), 0, ())
        return cls(block, -(-row // block), offsets(tensor)[-1], tuple(axes))

    def cut_up(self, part: Tensor) -> Tensor:
        """`[…, blocks, block]`, padded with zeros on both sides."""
        after = self.blocks * self.block - self.start - part.shape[-1]
        padded = torch.nn.functional.pad(part, (self.start, after))
        return padded.reshape(*part.shape[:-1], self.blocks, self.block)

    def wide(self, scales: Tensor, start: int, size: int) -> Tensor:
        """Scales of elements, starting with one of them."""
        return scales.repeat_interleave(self.block, -1).narrow(-1, start, size)


class Codes:
    """Quantises to a number of bits. Scales are maxima over whole blocks, on any layout; rounding is stochastic."""

    def __init__(self, bits: int, *, signed: bool) -> None:
        self.bits, self._values = bits, table(bits, signed=signed)
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def quantised(self, values: Any, *key: object) -> tuple[Tensor, Tensor]:
        """fp32 → codes (two per byte if they have 4 bits), and scales `[…, blocks]`. If a value is not finite, its
        whole block becomes non-finite.

        Args:
            values: a tensor, or a DTensor; all ranks of its mesh call this.
            key: determines the random bits, together with an element's place.
        """
        part, rows, known = local(values), Rows.of(values), self._table(values.device)
        blocks = rows.cut_up(part)
        scales = blocks.amax(-1)
        if self._values[0] < 0:
            scales = torch.maximum(scales, blocks.amin(-1) / self._values[0])
        scales = torch.where(scales.isfinite(), scales, torch.inf)
        for axis in rows.cut:
            group = values.device_mesh.get_group(axis)
            torch.distributed.all_reduce(scales, torch.distributed.ReduceOp.MAX, group=group)
        wide = rows.wide(torch.where(scales > 0, scales, 1.0), rows.start, part.shape[-1])
        codes = fused(_drawn, part)(part, wide, *known, places(values), *numbers(key))
        row = values.shape[-1]
        return (
            shards(self._packed(codes), values, -(-row * self.bits // 8)),
            shards(scales, values, -(-row // rows.block), rows.cut),
        )

    def widened(self, codes: Any, scales: Any, parameter: Any) -> Tensor:
        """The fp32 values of a parameter's codes and scales, either from `quantised` or as loaded."""
        part, (here, start), rows = local(codes), scales_beside(parameter, scales), Rows.of(parameter)
        wide = rows.wide(here, start, local(parameter).shape[-1])
        return shards(self.values(self.unpacked(part, wide.shape[-1]), wide), parameter)

    def values(self, codes: Tensor, scales: Tensor) -> Tensor:
        return self._table(codes.device)[0][codes.int()] * scales

    def unpacked(self, codes: Tensor, size: int) -> Tensor:
        """One code per byte, in rows of this size."""
        if self.bits == 8 or codes.shape[-1] == size:
            return codes
        return torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).narrow(-1, 0, size)

    def _packed(self, codes: Tensor) -> Tensor:
        if self.bits == 8:
            return codes
        pairs = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2))
        return pairs[..., ::2] | pairs[..., 1::2] << 4

    def _table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The table on this device, and its inner values; both are copied there once, because copies make the host
        wait."""
        if device not in self._tables:
            whole, inner = (torch.tensor(values, device=device) for values in (self._values, self._values[1:-1]))
            self._tables[device] = whole, inner
        return self._tables[device]


def _drawn(
    part: Tensor, scales: Tensor, known: Tensor, inner: Tensor, places: Tensor, factor: int, offset: int
) -> Tensor:
    """One of the two codes beside each value, uint8. Fused on CUDA, a quotient may differ in its last bit.

    `inner` is a tensor of its own: compiled, `bucketize` reads a view from the start of what it views (torch 2.11,
    pytorch#182343).
    """
    shares = part / scales
    below = torch.bucketize(shares, inner, right=True, out_int32=True)
    low, high = known[below], known[below + 1]
    drawn = (bits(places, factor, offset) >> 8 & 0xFFFFFF).to(torch.float32) * 2.0**-24
    codes = below + (drawn < (shares - low) / (high - low)).to(torch.int32)
    # A positive second moment must stay positive, because it is a divisor.
    least = ((part > 0) & (known[0] == 0)).to(torch.int32)
    return torch.maximum(codes, least).to(torch.uint8)


def scales_beside(parameter: Any, scales: Any) -> tuple[Tensor, int]:
    """The scales of this rank's shard, and where it starts in the first of their blocks. Loaded scales are
    complete on every rank."""
    rows = Rows.of(parameter)
    if not hasattr(parameter, "device_mesh"):
        return scales, 0
    if list(getattr(scales, "placements", ())) == spread(parameter, rows.cut):
        return local(scales), rows.start
    part, first = full_tensor(scales), offsets(parameter)
    for dim in range(parameter.dim() - 1):
        part = part.narrow(dim, first[dim], local(parameter).shape[dim])
    return part, first[-1]
