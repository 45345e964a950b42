"""Layouts to look at: sizes of the axes, micro-batches, and choices of plugins."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from forge_train.mesh.axes import AXES

from .variants import Variant

SIZES = tuple(axis.name for axis in AXES.values() if "dense" in axis.domains)
"""Axes whose product is the world."""
LAYERS = tuple(axis.name for axis in AXES.values() if axis.every_layer)
"""Axes along which collectives carry tokens."""


def provider(axis: str) -> str:
    """The axis whose plugin divides a model along this one; empty if it divides data alone."""
    known = AXES[axis]
    return ("ep" if axis == "etp" else axis) if known.divides or known.every_layer else ""


@dataclass(frozen=True)
class Candidate:
    """A layout with its batches and plugins."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    etp: int
    micro_batch: int
    accumulation: int
    variant: Variant

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in (*SIZES, "ep", "etp")}

    @cached_property
    def spans(self) -> dict[str, int]:
        """Ranks from the first to the last of a group along an axis: further apart, the further outside it is."""
        dense = self.tp * self.cp
        return {
            "tp": self.tp,
            "etp": self.etp,
            "ep": self.ep * self.etp,
            "cp": dense,
            "dp_shard": dense * self.dp_shard,
            "dp_shard × cp": dense * self.dp_shard,
            "dp_replicate": dense * self.dp_shard * self.dp_replicate,
            "pp": dense * self.dp_shard * self.dp_replicate * self.pp,
        }

    @cached_property
    def shards(self) -> int:
        """Ranks that shard dense weights together."""
        return self.dp_shard * self.cp

    @cached_property
    def expert_shards(self) -> int:
        """Ranks that shard the weights of experts together: along `tp` too, if a plugin spreads experts at all."""
        if self.ep == self.etp == 1:
            return self.shards
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    @property
    def settings(self) -> tuple[str, ...]:
        """Assignments of the layout."""
        return *(
            f"parallel.{axis}={size}" for axis, size in self.sizes.items()
        ), f"train.micro_batch={self.micro_batch}"

    def __str__(self) -> str:
        axes = " × ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "one process"
        return f"{axes}, micro-batch {self.micro_batch}" + (f", {self.variant}" if str(self.variant) else "")


def divisors(number: int) -> list[int]:
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def layouts(
    world: int, allowed: Mapping[str, Sequence[int]], experts: Sequence[tuple[int, int]]
) -> Iterator[dict[str, int]]:
    """Sizes of all axes that tile the world.

    Args:
        world: the number of ranks.
        allowed: axis → sizes that the model can have.
        experts: pairs of `ep` and `etp` that it can have.
    """

    def sizes(axis: str, left: int) -> Iterator[int]:
        return (one for one in allowed[axis] if left % one == 0)

    for pp in sizes("pp", world):
        for tp in sizes("tp", world // pp):
            for cp in sizes("cp", world // pp // tp):
                left = world // pp // tp // cp
                for dp_replicate in sizes("dp_replicate", left):
                    if (shard := left // dp_replicate) not in allowed["dp_shard"]:
                        continue
                    for ep, etp in experts:
                        if etp in (1, tp) and not shard * cp * tp // etp % ep:
                            yield {
                                "pp": pp, "dp_replicate": dp_replicate, "dp_shard": shard, "cp": cp, "tp": tp, "ep": ep,
                                "etp": etp,
                            }  # fmt: skip


def micro_batches(share: int, pinned: int) -> list[int]:
    """Sizes of a micro-batch that divide a rank's share of the global batch: the powers of two, and the whole."""
    if pinned:
        return [pinned] if share % pinned == 0 else []
    return [one for one in divisors(share) if one & (one - 1) == 0]
