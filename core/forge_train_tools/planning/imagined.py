"""A world of processes that are not there: one of them is asked, and its answers stand for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from forge_train.ground.errors import ForgeError
from forge_train.ground.layout import Layout
from forge_train.ground.world import World
from forge_train.processes.distributed import DistributedContext
from forge_train.processes.meshes import build_meshes
from forge_train.processes.process_group import leave

_T = TypeVar("_T")


class ImaginedContext(DistributedContext):
    """Rank 0 of a layout. It holds as much as any: shards are cut so that the first are never smaller."""

    def barrier(self) -> None:
        pass

    def gather_tensors(self, tensor: Tensor, axis: str = "") -> list[Tensor]:
        return self.gather_objects(tensor, axis)

    def gather_objects(self, value: _T, axis: str = "") -> list[_T]:
        return [value] * (dist.get_world_size(self._group(axis)) if self.world > 1 else 1)

    def on_main(self, function: Callable[[], _T]) -> _T:
        return function()

    def agree(self, what: dict[str, Any]) -> None:
        pass


@contextmanager
def imagined(layout: Layout, place: World) -> Iterator[ImaginedContext]:
    """The context of a rank among others that do not exist, on the CPU, with its meshes and their process groups.

    The groups are torch's fake ones, whose collectives give back anything of the right shape. None is left behind.

    Raises:
        ForgeError: in a process that has joined others already.
    """
    context = ImaginedContext(layout, torch.device("cpu"), place)
    if place.size == 1:
        yield context
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ForgeError("A plan for several ranks needs a process of its own; this one has joined others already.")
    dist.init_process_group("fake", store=FakeStore(), rank=place.rank, world_size=place.size)
    try:
        context._meshes = build_meshes(layout, context.device)
        yield context
    finally:
        leave()
