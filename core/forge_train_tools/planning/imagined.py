"""A world of processes that are not there: one of them is asked, and its answers stand for all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from forge_train.base.errors import ForgeError
from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Layout
from forge_train.mesh.process_group import build_meshes, leave
from forge_train.mesh.world import World

_T = TypeVar("_T")


@dataclass
class ImaginedContext(DistributedContext):
    """The first rank of a layout, or of one of its stages. It holds as much as any other of its stage: shards are cut
    so that the first are never smaller."""

    given: list[Any] = field(default_factory=list)
    """Contributions of this rank to gathers over stages, in order."""
    others: Sequence[Sequence[Any]] = ()
    """Contributions of the first ranks of all stages, this one's included; empty while they are unknown."""
    asked: Callable[[str, str], None] = lambda what, axis: None
    """Is told of each call that a run would make with other ranks: its name and the axis."""

    def barrier(self) -> None:
        self.asked("barrier", "")

    def gather_tensors(self, tensor: Tensor, axis: str = "") -> list[Tensor]:
        return self.gather_objects(tensor, axis)

    def gather_objects(self, value: _T, axis: str = "") -> list[_T]:
        if self.world == 1:
            return [value]
        self.asked("gather_objects", axis)
        size, stages = dist.get_world_size(self._group(axis)), self.layout.pp
        if stages == 1 or axis not in ("", "pp"):
            return [value] * size
        at = len(self.given)
        self.given.append(value)
        known = [one[at] if at < len(one) else value for one in self.others] or [value] * stages
        return [one for one in known for _ in range(size // stages)]

    def gather_names(self, names: Collection[str]) -> set[str]:
        everybody = {id(one): one for one in self.gather_objects(names)}  # one object for all ranks of a stage
        return set().union(*everybody.values())

    def on_main(self, function: Callable[[], _T]) -> _T:
        self.asked("on_main", "")
        return function()

    def agree(self, what: dict[str, Any]) -> None:
        self.asked("agree", "")


@contextmanager
def imagined(layout: Layout, place: World, others: Sequence[Sequence[Any]] = ()) -> Iterator[ImaginedContext]:
    """The context of a rank among others that do not exist, on the CPU, with its meshes and their process groups.

    Args:
        layout: of the ranks.
        place: the rank.
        others: what the first rank of each stage of a pipeline gives to be gathered (`ImaginedContext.given`).

    The groups are torch's fake ones, whose collectives give back anything of the right shape. None is left behind.

    Raises:
        ForgeError: in a process that has joined others already.
    """
    complete = layout.pp == 1 or bool(others)
    context = ImaginedContext(layout, torch.device("cpu"), place, complete=complete, others=others)
    if place.size == 1:
        yield context
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ForgeError("A plan for several ranks needs a process of its own; this one has joined others already.")
    dist.init_process_group("fake", store=FakeStore(), rank=place.rank, world_size=place.size)
    try:
        with _own_groups_only(place.rank):
            context._meshes = build_meshes(layout, context.device)
        yield context
    finally:
        leave()


@contextmanager
def _own_groups_only(rank: int) -> Iterator[None]:
    """Leaves out the groups that this rank is not in, which nobody else is there to use: thousands of ranks have tens
    of thousands of them."""
    from torch.distributed import device_mesh

    original = device_mesh.new_group

    def new_group(ranks: Sequence[int] | None = None, **options: Any) -> Any:
        if ranks is not None and rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return original(ranks=ranks, **options)

    with patch.object(device_mesh, "new_group", new_group):
        yield
