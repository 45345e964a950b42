"""Ranks that share a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forge_train.mesh.world import World


@dataclass(frozen=True)
class Topology:
    """Nodes of ranks: those on one node share a fast network. Ranks are numbered node by node.

    One node by default. A subclass with another `node` describes what is uneven, or has more levels.
    """

    world: int = 1
    per_node: int = 0
    """Ranks of a node; 0 for all of them."""

    @classmethod
    def of(cls, world: World) -> Topology:
        return cls(world.size, world.local_size)

    def node(self, rank: int) -> int:
        """The node a rank lies on."""
        return rank // self.per_node if self.per_node else 0

    @property
    def nodes(self) -> int:
        return len({self.node(rank) for rank in range(self.world)})

    def crossing(self, axes: Mapping[str, int]) -> tuple[str, ...]:
        """The axes of a mesh along which some neighbours lie on different nodes.

        Args:
            axes: name → size, outermost first; together they tile the world.
        """
        found, inner = [], 1
        for axis, size in reversed(list(axes.items())):
            step = inner
            groups = (range(rank, rank + size * step, step) for rank in range(self.world) if not rank // step % size)
            if size > 1 and any(len({self.node(rank) for rank in group}) > 1 for group in groups):
                found.append(axis)
            inner *= size
        return tuple(reversed(found))
