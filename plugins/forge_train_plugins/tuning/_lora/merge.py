"""Updates merged into the weights, read range by range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from forge_train import ConfigError
from forge_train_kit.model.block_format import BlockFormat
from forge_train_kit.state_map import Box, StateMap, Step, View

from .sizes import Sizes, format_of
from .targets import FULL, MAGNITUDE

KINDS = {".lora_A": (".weight", False), "_lora_A": ("", False), ".lora_embedding_A": (".weight", True)}
"""End of a factor's name → end of the weight's name, and whether its update is transposed."""


@dataclass(frozen=True, eq=False)
class Sum(View):
    """`W + Σ scale · B A`, computed in fp32 and rounded once to the weight's dtype; a stack has one such sum of each
    expert. The update of an embedding is transposed."""

    weight: View
    updates: tuple[tuple[View, View, float], ...]
    transposed: bool

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        *experts, rows, columns = box
        into, out = (rows, columns) if self.transposed else (columns, rows)
        found = [(self.weight, box)]
        for a, b, _ in self.updates:
            rank = (0, b.shape[-1])
            found += [(a, (*experts, rank, into)), (b, (*experts, out, rank))]
        return found

    def make(self, box: Box, parts: list[Tensor]) -> Tensor:
        total, *factors = (part.float() for part in parts)
        for (_, _, scale), a, b in zip(self.updates, factors[::2], factors[1::2], strict=True):
            update = b @ a
            total = total.add(update.mT if self.transposed else update, alpha=scale)
        return total.to(self.dtype)


@dataclass(frozen=True, eq=False)
class Stretched(View):
    """The same, with rows of given lengths, or as long as those of `W`, plus a gain. It needs whole rows."""

    weight: View
    a: View
    b: View
    gain: View
    scale: float
    given: bool

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        rows, columns, rank = box[0], (0, self.shape[1]), (0, self.b.shape[1])
        return [(self.weight, (rows, columns)), (self.a, (rank, columns)), (self.b, (rows, rank)), (self.gain, (rows,))]

    def make(self, box: Box, parts: list[Tensor]) -> Tensor:
        weight, a, b, gain = (part.float() for part in parts)
        moved = weight.addmm(b, a, alpha=self.scale)
        moved = moved * ((gain if self.given else magnitude([weight, gain])) / magnitude([moved, 0 * gain])).unsqueeze(
            1
        )
        return moved[:, slice(*box[1])].to(self.dtype)


def magnitude(parts: list[Tensor]) -> Tensor:
    """Lengths of a weight's rows, plus a gain."""
    from .layers import lengths

    weight, gain = (part.float() for part in parts)
    return lengths(weight.square().sum(1)) + gain


@dataclass(frozen=True, eq=False)
class Rounded(View):
    """A weight as its codes have it, in fp32."""

    weight: View
    format: BlockFormat

    @classmethod
    def of(cls, weight: View, config: Any) -> View:
        """The weight as a run holds it that trains its update."""
        found = format_of(config)
        return weight if found is None else cls(weight.shape, torch.float32, weight, found)

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        return [(self.weight, (*box[:-1], self._blocks(box)))]

    def make(self, box: Box, parts: list[Tensor]) -> Tensor:
        (weight,), (low, high), (start, _) = parts, box[-1], self._blocks(box)
        found = self.format.decode(self.format.encode(weight), self.dtype)
        return found[..., low - start : high - start]

    def _blocks(self, box: Box) -> tuple[int, int]:
        """Columns whose values decide those of a box."""
        (low, high), block = box[-1], self.shape[-1] if self.format.double else self.format.block
        return low - low % block, min(-(-high // block) * block, self.shape[-1])


@dataclass(frozen=True)
class Merge(StateMap):
    """Takes each weight with its two factors, and gives the sum under the weight's name; a copy, for what it stands in
    for."""

    config: Any
    sizes: Sizes

    def apply(self, step: Step) -> None:
        for a in [one for one in step.tensors if one.endswith(("lora_A", "lora_embedding_A"))]:
            end = next(end for end in KINDS if a.endswith(end))
            name, (suffix, transposed) = a.removesuffix(end), KINDS[end]
            scale, gains = self.sizes.of(name)[1], [f"{name}.{MAGNITUDE}"] if self.config.dora else []
            scales = {"": scale, **{f"_{one.kind}": one.scale for one in self.sizes.fixed.get(name, ())}}
            factors = [f"{a[:-1]}{factor}{kind}" for kind in scales for factor in "AB"]
            if found := step.take(f"{name}{suffix}", *factors, *gains):
                stored, *parts = found
                weight = stored if transposed else Rounded.of(stored, self.config)
                updates = tuple(zip(parts[::2], parts[1::2], scales.values(), strict=False))
                merged: View = Sum(stored.shape, stored.dtype, weight, updates, transposed)
                if gains:
                    first, second, gain = parts
                    given = bool(self.config.adapter)
                    merged = Stretched(stored.shape, stored.dtype, weight, first, second, gain, scale, given)
                step.give(f"{name}{suffix}", merged)
        for name in [one for one in step.tensors if f".{FULL}" in f".{one}"]:
            if found := step.take(own := name.replace(FULL, ""), name):
                step.give(own, found[1])

    def inverse(self) -> NoReturn:
        raise ConfigError("lora: merged weights can't be taken apart again.")
