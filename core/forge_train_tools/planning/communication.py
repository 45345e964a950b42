"""Collectives, counted: of what kind, along which axis, how many bytes. The same for a plan and for a real run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import ScriptObject, Tensor
from torch.distributed import distributed_c10d as c10d

from forge_train.mesh.distributed import DistributedContext

from . import meshes
from .topology import Topology
from .watch import Watch

FUNCTIONAL = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}
"""torch's functional collectives (namespace `_c10d_functional`) → kind."""
IN_PLACE = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
}
"""Those of `torch.distributed` (namespace `c10d`) → kind; what receives sends nothing."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One call."""

    kind: str
    group: str
    """Name of its process group."""
    ranks: int
    held: int
    """Bytes of what goes in, or of what comes out, whichever is more."""

    @property
    def sent(self) -> float:
        """Bytes that a rank sends, by the best algorithm for the kind (Thakur et al. 2005, §4): a ring sends every
        byte but a rank's own once to gather or to scatter, and twice to reduce for all."""
        if self.kind == "send":
            return self.held
        return (2.0 if self.kind == "all_reduce" else 1.0) * self.held * (self.ranks - 1) / self.ranks


class Collectives(Watch):
    """Tells of every collective that is called while the mode is on.

    torch's own CommDebugMode knows kinds, but neither bytes nor groups, and (2.13) fails on FSDP2's second forward.

    Args:
        tell: called with each.
    """

    def __init__(self, tell: Callable[[Collective], None]) -> None:
        super().__init__()
        self._tell = tell

    def look(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        kind, functional = kind_of(func)
        if not kind:
            return
        if functional:
            group = group_named(args[-1])
            self._tell(_collective(kind, group, (*args, out)))
        else:
            group = next(dist.ProcessGroup.unbox(argument) for argument in args if isinstance(argument, ScriptObject))
            self._tell(_collective(kind, group, args))


@cache
def kind_of(func: Any) -> tuple[str, bool]:
    """Of a collective, empty for other operations; and whether it is a functional one."""
    if func.namespace == "_c10d_functional":
        return FUNCTIONAL.get(func._opname, ""), True
    return IN_PLACE.get(func._opname, "") if func.namespace == "c10d" else "", False


def _collective(kind: str, group: dist.ProcessGroup, arguments: Iterable[Any]) -> Collective:
    return Collective(kind, group.group_name, group.size(), max(size_of(argument) for argument in arguments))


def size_of(argument: Any) -> int:
    """Bytes of the tensors in an argument."""
    if isinstance(argument, Tensor):
        return argument.numel() * argument.element_size()
    return sum(size_of(item) for item in argument) if isinstance(argument, (list, tuple)) else 0


class Names:
    """Process groups, as axes of the layout."""

    def __init__(self, context: DistributedContext) -> None:
        self._context = context
        self._known: dict[str, str] = {}
        if context.layout.ep > 1:
            table = context.layout.table
            dense = table.domain("dense")
            shared = {context.mesh("dense", axis).get_group().group_name for axis in (*dense, *table.flattened)}
            for axis in (axis for axis in table.domain("expert") if axis not in dense):
                name = context.mesh("expert", axis).get_group().group_name
                if name not in shared:
                    self._known[name] = axis

    def of(self, group: str) -> str:
        """The axes along which the ranks of a group differ: `tp`, `dp_shard`, `dp_replicate × dp_shard`."""
        if group not in self._known:
            ranks = self.ranks(group)
            layout = self._context.layout
            axes = meshes.along(layout.domain("dense"), ranks) or meshes.along(layout.domain("expert"), ranks)
            self._known[group] = " × ".join(axes) or f"{len(ranks)} ranks"
        return self._known[group]

    def of_mesh(self, axis: str) -> str:
        """The same for an axis of the dense domain, a flattened one too."""
        return self.of(self._context.mesh("dense", axis).get_group().group_name)

    def per_node(self, group: str) -> int:
        """Return how many of its ranks lie on a node; where nodes differ, the fewest."""
        topology = Topology.of(self._context.place)
        return min(Counter(topology.node(rank) for rank in self.ranks(group)).values())

    def ranks(self, group: str) -> list[int]:
        return list(dist.get_process_group_ranks(group_named(group)))


def group_named(name: Any) -> dist.ProcessGroup:
    """The process group of a name, as torch's functional collectives take it."""
    return c10d._resolve_process_group(name)
