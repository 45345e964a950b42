"""Dequantises tensors with their scales. There is no inverse, because rounding loses information."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from forge_train.base.errors import ConfigError
from forge_train.store.shards import Box, sizes

from .maps import StateMap, Step
from .names import same_placeholders, template
from .views import View, along

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of E2M1's three lower bits; the fourth is the sign (OCP Microscaling Formats 1.0, §5.3.3)."""
MX_BLOCK = 32
"""Number of values that share a scale."""
_AT_ONCE = 1 << 12
"""Number of blocks that are unpacked together: the temporary memory is eight times theirs."""


class _OneWay(StateMap):
    def inverse(self) -> NoReturn:
        raise ConfigError(f"{type(self).__name__} has no inverse: rounding loses information. Export without it.")


@dataclass(frozen=True)
class Dequantise(_OneWay):
    """Expands block-scaled fp8: multiplies each block of a matrix by its scale, as in DeepSeek-V3 (arXiv:2412.19437,
    §3.3).

    Args:
        weight: names of the matrices, `[out, in]`; matrices without a scale stay unchanged.
        scale: names of the scales, `[⌈out / rows⌉, ⌈in / columns⌉]`, which the result does not contain.
        dtype: of the result; the product is computed in fp32.
        block: rows and columns that share a scale.
    """

    weight: str
    scale: str
    dtype: torch.dtype
    block: tuple[int, int] = (128, 128)

    def __post_init__(self) -> None:
        same_placeholders("Dequantise", (self.weight, self.scale))

    def apply(self, step: Step) -> None:
        for scale, bindings in template(self.scale).find(step.tensors).items():
            name = template(self.weight).fill(bindings)
            for weight, factors in _pair(step, name, scale):
                blocks = tuple(-(-size // by) for size, by in zip(weight.shape, self.block, strict=False))
                if len(weight.shape) == 2 and factors.shape == blocks:
                    step.give(name, Scaled(weight.shape, self.dtype, weight, factors, self.block))
                else:
                    step.wrong.append(f"{scale}: {list(factors.shape)} don't fit the blocks of {list(weight.shape)}")


@dataclass(frozen=True)
class DequantiseMXFP4(_OneWay):
    """Expands packed fp4 with a power of two for every 32 values, as in the published GPT-OSS (OCP Microscaling 1.0).

    Args:
        blocks: names of the packed values, uint8 `[…, blocks, 16]`: two values per byte, the lower half first.
        scales: names of the exponents, uint8 `[…, blocks]`, biased by 127.
        whole: names of the results, `[…, 32 · blocks]`.
        dtype: of the results; bf16 can represent all values.
    """

    blocks: str
    scales: str
    whole: str
    dtype: torch.dtype

    def __post_init__(self) -> None:
        same_placeholders("DequantiseMXFP4", (self.blocks, self.scales, self.whole))

    def apply(self, step: Step) -> None:
        for name, bindings in template(self.blocks).find(step.tensors).items():
            scale = template(self.scales).fill(bindings)
            for packed, exponents in _pair(step, name, scale):
                *outer, count, width = packed.shape if len(packed.shape) > 1 else (0, 0)
                if width == MX_BLOCK // 2 and exponents.shape == (*outer, count):
                    shape = (*outer, count * MX_BLOCK)
                    step.give(template(self.whole).fill(bindings), Unpacked(shape, self.dtype, packed, exponents))
                else:
                    step.wrong.append(f"{scale}: {list(exponents.shape)} don't fit the blocks of {list(packed.shape)}")


def _pair(step: Step, name: str, scale: str) -> list[tuple[View, View]]:
    found = step.take(name, scale)
    return [(found[0], found[1])] if found else []


@dataclass(frozen=True, eq=False)
class Scaled(View):
    """Blocks of a matrix, each multiplied by its scale."""

    weight: View
    scale: View
    block: tuple[int, int]

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        blocks = tuple((low // by, -(-high // by)) for (low, high), by in zip(box, self.block, strict=True))
        return [(self.weight, box), (self.scale, blocks)]

    def make(self, box: Box, parts: list[Tensor]) -> Tensor:
        import torch

        weight, scale = parts
        (low, high), (left, right) = box
        rows, columns = self.block
        out, factors = weight.to(torch.float32, copy=True), scale.to(torch.float32)
        skipped = left % columns
        for number, row in enumerate(factors, start=low // rows):
            first, last = max(number * rows, low) - low, min((number + 1) * rows, high) - low
            out[first:last] *= row.repeat_interleave(columns)[skipped : skipped + right - left]
        return out.to(self.dtype)


@dataclass(frozen=True, eq=False)
class Unpacked(View):
    """Packed fp4, each block multiplied by a power of two."""

    packed: View
    exponents: View

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        low, high = self._blocks(box)
        last = len(box) - 1
        blocks = along(box, last, low, high)
        return [(self.packed, (*blocks, (0, MX_BLOCK // 2))), (self.exponents, blocks)]

    def make(self, box: Box, parts: list[Tensor]) -> Tensor:
        import torch

        packed, exponents = parts
        halves, powers = packed.reshape(-1, MX_BLOCK // 2), exponents.reshape(-1, 1)
        table = torch.tensor([*MXFP4, *(-value for value in MXFP4)])
        out = torch.empty(len(halves), MX_BLOCK, dtype=self.dtype)
        for start in range(0, len(halves), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            index = torch.stack([halves[some] & 15, halves[some] >> 4], dim=-1).flatten(1).int()
            out[some] = torch.ldexp(table[index], powers[some].int() - 127)
        low, high = self._blocks(box)
        first, last = box[-1]
        values = out.view(*sizes(box)[:-1], (high - low) * MX_BLOCK)
        return values[..., first - low * MX_BLOCK : last - low * MX_BLOCK]

    def _blocks(self, box: Box) -> tuple[int, int]:
        """The range of all blocks that overlap a range."""
        low, high = box[-1]
        return low // MX_BLOCK, -(-high // MX_BLOCK)
