"""One source of truth for distribution: who this process is, and the meshes over all of them.

Nothing else asks `torch.distributed` who it is. CUDA (NCCL) and CPU (gloo) are equals, and everything here works the
same in one process without a process group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ..base.errors import ConfigError, ForgeError, PluginError
from .axes import Domain
from .layout import Device, Layout
from .process_group import build_meshes, choose_device, join, leave, start_cuda
from .world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("forge_train")

# It warns of every tensor over two mesh axes that is gathered whole, which only checks and checkpoints do.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

_T = TypeVar("_T")
_R = TypeVar("_R")

Meet = Callable[[World, torch.device, timedelta], None]
START_TIMEOUT = 120.0
"""Seconds that processes wait for each other, where the configuration (`run.start_timeout`) does not say."""


@dataclass
class DistributedContext:
    """Rank, world, device, layout, and the meshes of the four domains.

    `mesh.axes` lists the axes of each domain, and those that can be had flattened; `dp_replicate` and `fsdp` can be
    had together, too.
    """

    layout: Layout
    device: torch.device
    place: World = field(default_factory=World)
    _meshes: dict[str, DeviceMesh] = field(default_factory=dict)
    complete: bool = True
    """True if gathered values come from every rank; a plan visits the stages of a pipeline one by one."""
    group: Any = None
    """The group of all processes, where it is not the default one."""

    @classmethod
    @contextmanager
    def join(
        cls, layout: Layout, wanted: Device, *, timeout: float = START_TIMEOUT, meet: Meet | None = None
    ) -> Iterator[DistributedContext]:
        """Join the processes a launcher started, for as long as the block lasts.

        The layout was checked completely before: a group that only some ranks create hangs all of them.

        Args:
            layout: of the processes.
            wanted: the device of each.
            timeout: seconds that a collective may take until `settle`: a rank that never came is noticed soon.
            meet: makes the process group.

        Raises:
            ForgeError: if they can't be joined.
        """
        place = World.here()
        device = choose_device(wanted, place)
        if device.type == "cuda":
            start_cuda(device)
        joins = place.size > 1 and not dist.is_initialized()
        if joins:
            (meet or join)(place, device, timedelta(seconds=timeout))
        try:
            context = cls(layout, device, place)
            if place.size > 1:
                context._meshes = build_meshes(layout, device)
            yield context
        finally:
            if joins:
                leave()

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world(self) -> int:
        return self.place.size

    @property
    def local_rank(self) -> int:
        return self.place.local_rank

    @property
    def main(self) -> bool:
        """True if this process writes files and prints to the screen."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """The data-parallel rank: processes that share it see the same batches."""
        return self.mesh("batch", "dp").get_local_rank() if self.world > 1 else 0

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self.layout.dp

    def mesh(self, domain: Domain, *axes: str) -> DeviceMesh:
        """The mesh of a domain, or of some of its axes, in the domain's order.

        Raises:
            PluginError: for an axis the domain has not, or in one process, where there are no meshes.
        """
        if not self._meshes:
            raise PluginError(f"There is no mesh {domain!r} in one process; give None from `parallelize` at this size.")
        if (made := f"{domain}.{','.join(axes)}") in self._meshes:
            return self._meshes[made]
        mesh = self._meshes[domain]
        if unknown := [axis for axis in axes if axis not in (mesh.mesh_dim_names or ())]:
            raise PluginError(f"The domain {domain!r} has no axis {unknown[0]!r}; it has {mesh.mesh_dim_names}.")
        return mesh[axes] if axes else mesh

    # -- collectives ------------------------------------------------------------------------------

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier(self.group)

    def _group(self, axis: str) -> Any:
        """The processes along an axis of any domain; all of them where none is named."""
        if not axis:
            return self.group
        table = self.layout.table
        return self.mesh("dense" if axis in table.flattened else table[axis].domains[0], axis).get_group()

    def ranks_along(self, axis: str) -> list[int]:
        """The processes along a (flattened) axis, this one among them."""
        return dist.get_process_group_ranks(self._group(axis)) if self.world > 1 else [0]

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum", axis: str = "") -> Tensor:
        """Reduce in place over all processes, or over those along a (flattened) axis."""
        if self.world > 1:
            kind = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
            dist.all_reduce(tensor, kind, group=self._group(axis))
        return tensor

    def gather_tensors(self, tensor: Tensor, axis: str = "") -> list[Tensor]:
        """Everybody's tensor, in order of ranks, on every process: of all, or of those along a (flattened) axis. Shapes
        may differ, dtypes and numbers of axes may not."""
        if self.world == 1:
            return [tensor]
        shapes = [torch.Size(shape) for shape in self.gather_objects(tuple(tensor.shape), axis)]
        padded = tensor.new_zeros(max(shape.numel() for shape in shapes))
        padded[: tensor.numel()] = tensor.reshape(-1)
        gathered = [torch.empty_like(padded) for _ in shapes]
        dist.all_gather(gathered, padded, group=self._group(axis))
        return [flat[: shape.numel()].view(shape) for flat, shape in zip(gathered, shapes, strict=True)]

    def gather_objects(self, value: _T, axis: str = "") -> list[_T]:
        """Everybody's value, in order of ranks, on every process: of all, or of those along a (flattened) axis."""
        if self.world == 1:
            return [value]
        group = self._group(axis)
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, value, group=group)
        return gathered

    def gather_names(self, names: Collection[str]) -> set[str]:
        """The names that any process gives, on every process."""
        return set().union(*self.gather_objects(names))

    def gather_stages(self, value: _T) -> list[_T]:
        """A value of each pipeline stage (its first process's), in order of stages, on every process."""
        return self.gather_objects(value)[:: self.world // self.layout.stages] if self.layout.stages > 1 else [value]

    def on_main(self, function: Callable[[], _T]) -> _T:
        """Call a function on rank 0, and give its result to, or raise its error on, every process."""
        if self.world == 1:
            return function()
        box: list[Any] = [None, None]
        if self.main:
            try:
                box[0] = function()
            except Exception as error:  # the others must hear of it, or they would wait for ever
                box[1] = sendable(error, self.rank)
        dist.broadcast_object_list(box, src=0, group=self.group)
        if box[1] is not None:
            raise box[1]
        value: _T = box[0]
        return value

    def through_main(self, value: _T, function: Callable[[list[_T]], Sequence[_R]]) -> _R:
        """Gather everybody's value on rank 0, call a function with them there, and give each process its own of the
        results, in order of ranks. An error is raised on every process, as `on_main` does."""
        if self.world == 1:
            return function([value])[0]
        values: list[Any] = [None] * self.world
        dist.gather_object(value, values if self.main else None, dst=0, group=self.group)
        results: list[Any] = []
        self.on_main(lambda: results.extend(function(values)))
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, results if self.main else None, src=0, group=self.group)
        result: _R = mine[0]
        return result

    def poll(self, *, everybody: bool = False) -> Callable[[bool], bool]:
        """A function that asks every process one yes-or-no question at each call, and answers the call before:
        whether any of them said yes, or everybody."""
        if self.world == 1:
            return lambda yes: yes
        op = dist.ReduceOp.MIN if everybody else dist.ReduceOp.MAX
        pending: list[tuple[Tensor, Any]] = []

        def ask(yes: bool) -> bool:
            before = False
            if pending:
                flag, work = pending.pop()
                work.wait()
                before = bool(flag)
            if not before:
                flag = torch.tensor(int(yes))
                pending.append((flag, dist.all_reduce(flag, op, async_op=True)))
            return before

        return ask

    def settle(self, seconds: float) -> None:
        """Start-up is over: from here on a collective may take this long, as a slow step or a checkpoint does."""
        if self.world > 1:
            for group in list(c10d._world.pg_map):
                c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def agree(self, what: dict[str, Any]) -> None:
        """Check that every process has the same.

        Raises:
            ConfigError: naming the ranks that differ from rank 0, and in what.
        """
        everybody = self.gather_objects(what)
        lines = []
        for key in sorted({key for one in everybody for key in one}):
            mine = everybody[0].get(key)
            others = {rank: one.get(key) for rank, one in enumerate(everybody) if one.get(key) != mine}
            if others:
                ranks = ", ".join(map(str, others))
                lines.append(f"{key}: {mine!r} on rank 0, {next(iter(others.values()))!r} on rank {ranks}")
        if lines:
            raise ConfigError("The processes do not agree:\n  " + "\n  ".join(lines))


def sendable(error: Exception, rank: int) -> Exception:
    """Return what all processes raise for an error of one: a stranger's may not survive the way, and is logged here."""
    if isinstance(error, (ForgeError, OSError)):
        return error
    log.error("rank %s failed", rank, exc_info=error)
    return RuntimeError(f"rank {rank}: {error!r}")
