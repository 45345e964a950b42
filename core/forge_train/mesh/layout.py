"""Sizes of the mesh axes over a world of processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ..base.errors import ConfigError, Problem
from .axes import CONFIGURED, Axis, Domain, Table


class LayoutError(ConfigError):
    """Axes that do not tile the world."""

    def __init__(self, axis: str, message: str) -> None:
        self.problem = Problem(f"parallel.{axis}", message)
        # The arguments as they are: errors are pickled between processes.
        super().__init__(axis, message, key=self.problem.key)

    def __str__(self) -> str:
        return f"{self.problem.key}: {self.problem.message}"


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes over a world of processes."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    others: tuple[tuple[Axis, int], ...] = ()
    """Axes of other packages, and their sizes."""

    @classmethod
    def of(cls, parallel: object, world: int) -> Layout:
        """Fill in `dp_shard = -1` and check that the axes tile the world.

        Args:
            parallel: has the size of each configured axis under its name.
            world: the number of processes.

        Raises:
            LayoutError: stating the rule and the numbers.
        """
        added = tuple((axis, getattr(parallel, axis.name)) for axis in getattr(parallel, "__axes__", ()))
        layout = cls(**{axis: getattr(parallel, axis) for axis in CONFIGURED}, others=added)
        dense = layout.domain("dense")
        if layout.dp_shard == 0:
            raise LayoutError("dp_shard", "must be at least 1, or -1 for what is left over; it is 0.")
        if layout.dp_shard == -1:
            del dense["dp_shard"]
            others = math.prod(dense.values())
            if world > others and world % others:
                axes, product = _product(dense)
                raise LayoutError(
                    "dp_shard",
                    f"-1 takes what is left over, but {axes} = {product} does not divide the {world} processes.",
                )
            layout = replace(layout, dp_shard=max(world // others, 1))
        if layout.world != world:
            there = "is 1 process" if world == 1 else f"are {world} processes"
            axes, product = _product(layout.domain("dense"))
            cause = "dp_shard" if "dp_shard" in dense else max(dense, key=lambda axis: dense[axis])
            raise LayoutError(cause, f"{axes} = {product}, but there {there}.")
        if layout.etp not in (1, layout.tp):
            raise LayoutError("etp", f"must be 1 or tp ({layout.tp}); it is {layout.etp}.")
        tiled = layout.dp_shard * layout.cp * layout.tp // layout.etp
        if tiled % layout.ep:
            axes = "dp_shard × cp × tp" if layout.etp == 1 else "dp_shard × cp"
            raise LayoutError("ep", f"must divide {axes} ({tiled}); it is {layout.ep}.")
        return layout

    @cached_property
    def table(self) -> Table:
        """Every axis of this layout."""
        return Table(axis for axis, _ in self.others)

    def size(self, axis: str) -> int:
        """The number of ranks along an axis: 1 along that of a package which the configuration does not name."""
        added = {one.name: size for one, size in self.others}
        return added[axis] if axis in added else int(getattr(self, axis, 1))

    def dividing(self, what: Literal["layers", "experts"]) -> dict[str, int]:
        """Axis → size, of the axes above 1 along which ranks hold different layers, or different experts."""
        sizes = {axis.name: self.size(axis.name) for axis in self.table.values() if axis.divides == what}
        return {axis: size for axis, size in sizes.items() if size > 1}

    @property
    def stages(self) -> int:
        """Stages that the model is cut into."""
        return math.prod(self.dividing("layers").values())

    @property
    def world(self) -> int:
        """All ranks."""
        return math.prod(self.size(axis) for axis in self.table.domain("dense"))

    @property
    def efsdp(self) -> int:
        """Ranks that share one sharded copy of the same experts: dp_shard · cp · tp = efsdp · ep · etp."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    @property
    def dp(self) -> int:
        """Ranks that work on different data."""
        return math.prod(self.size(axis.name) for axis in self.table.values() if axis.splits_data)

    def micro_batches(self, global_batch: int, micro_batch: int) -> int:
        """Micro-batches of a step, on each rank."""
        return global_batch // (micro_batch * self.dp)

    @property
    def grad_average_size(self) -> int:
        """R: the ranks that gradients are averaged over."""
        return math.prod(self.size(axis) for axis in self.table.flattened["data"])

    @property
    def shard_average_size(self) -> int:
        """The ranks of R that Forge's SHARD transforms average over; packages average along axes of their own."""
        return math.prod(self.size(axis) for axis in self.table.flattened["dp_cp"])

    def domain(self, name: Domain) -> dict[str, int]:
        """Axis → size, outermost first."""
        return {axis: self.size(axis) for axis in self.table.domain(name)}

    def axes(self) -> dict[str, int]:
        """Configured axis → size."""
        return {axis.name: self.size(axis.name) for axis in self.table.values() if axis.configured}

    def settings(self) -> tuple[str, ...]:
        """`parallel.tp=2` and so on: assignments that configure this layout."""
        return tuple(f"parallel.{axis}={size}" for axis, size in self.axes().items())


def _product(sizes: Mapping[str, int]) -> tuple[str, str]:
    """`pp × tp` and `2 × 3 = 6`"""
    return " × ".join(sizes), f"{' × '.join(map(str, sizes.values()))} = {math.prod(sizes.values())}"


Device = Literal["auto", "cpu", "cuda", "mps"]
