"""The shards that each rank writes: chosen by all ranks together, copied to the host, and written with their hashes.

These are the phases of torch.distributed.checkpoint's `save` (torch 2.13), called one by one: ranks agree while
training waits, and the files may be written while it goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ..ground.errors import ForgeError
from ..ground.world import cores
from ..processes.distributed import DistributedContext
from .consolidated import Files, Format
from .shard_files import Writer

log = logging.getLogger("forge_train")

PER_THREAD = 64 * 2**20
"""Bytes from which a rank writes with another thread, into another file."""
HEADER = 1600
"""Bytes of a file that each shard takes beside its values, roughly."""

Copies = dict[MetadataIndex, Tensor]
"""Shards on the host, by their places; given again, they are filled again."""
Fill = Callable[[Path, Files], Mapping[str, str]]
"""Writes full tensors into their files in a folder, where they have room; gives the hashes that it knows."""


@dataclass(frozen=True)
class Plan:
    """Which shards are written by this rank, and, on rank 0, the index of all."""

    local: SavePlan
    """What this rank holds."""
    mine: SavePlan
    """What it writes of that."""
    index: Metadata | None
    files: Files | None
    """Of full tensors, if any are to be written."""
    bytes: int
    """On disk, of all ranks, roughly; known on rank 0."""


class Shards:
    """The tensors of a checkpoint, as far as this rank writes them."""

    def __init__(self, plan: Plan, planner: _Planner, *, one_each: bool) -> None:
        self.plan = plan
        self._planner = planner
        self._one_each = one_each

    def copy(self, into: Copies) -> None:
        """Copy the shards to the host: what is written later is what they are now.

        Args:
            into: the copies of an earlier call, whose memory is used again; those that no longer fit are replaced.
        """
        shards = {item.index: self._planner.resolve_data(item) for item in self.plan.mine.items}
        for index in into.keys() - shards.keys():
            del into[index]
        on_device = False
        for index, shard in shards.items():
            assert isinstance(shard, Tensor)
            on_device |= shard.is_cuda
            host = into.get(index)
            if host is None or host.shape != shard.shape or host.dtype != shard.dtype:
                host = into[index] = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)
            host.copy_(shard, non_blocking=shard.is_cuda)
        if on_device:
            torch.cuda.current_stream().synchronize()
        self._planner.take_from(into)

    def write(self, folder: Path, dist: DistributedContext, fill: Fill | None = None) -> dict[str, str]:
        """Write the shards' files, those of full tensors, and the index into a folder that is there.

        Args:
            folder: the folder.
            dist: who writes.
            fill: writes the full tensors instead, if this is the only process.

        Returns:
            On rank 0, the hash of the shards' files, by name of the file.

        Raises:
            OSError: on every rank, if the disk refuses one of them.
        """
        writer = Writer(folder, single_file_per_rank=not self._one_each)
        writer.set_up_storage_writer(dist.main)
        files = self.plan.files
        if files is not None:
            dist.on_main(partial(files.create, folder))
        hashes: dict[str, str] = {}

        def gathered(everybody: list[_Written]) -> Sequence[None]:
            if failed := next((one.error for one in everybody if one.error), None):
                raise failed
            assert self.plan.index is not None
            index, results = replace(self.plan.index), [one.results for one in everybody]
            if files is not None and files.alone:
                index, results = files.pointed_to(index), [*results, files.results()]
            writer.finish(index, results)
            for one in everybody:
                hashes.update(one.hashes)
            return [None] * len(everybody)

        hashes.update(fill(folder, files) if fill and files else {})
        dist.through_main(self._write_mine(writer, folder, dist, filled=fill is not None), gathered)
        return hashes

    def _write_mine(self, writer: Writer, folder: Path, dist: DistributedContext, *, filled: bool) -> _Written:
        """This rank's part. An error is kept: the other ranks must hear of it, or they would wait for ever."""
        plan, files = self._planner.finish_plan(self.plan.mine), self.plan.files
        threads = 1 if self._one_each else _threads(plan, dist)
        full = _shares(files.full(plan.items), threads) if files and not filled else []
        parts = _parts(replace(plan, items=files.shards(plan.items)) if files else plan, threads)

        def write_full(items: list[WriteItem]) -> list[Any]:
            assert files is not None
            files.write(folder, items, self._planner.resolve_data)
            return []

        def write_shards(part: SavePlan) -> list[Any]:
            results: list[Any] = writer.write_data(part, self._planner).wait()
            return results

        try:
            with ThreadPoolExecutor(threads) as pool:
                written = [*pool.map(write_shards, parts), *pool.map(write_full, full)]
            return _Written([result for results in written for result in results], writer.fs.hashes)
        except Exception as error:
            if dist.world == 1:
                raise
            if not isinstance(error, (ForgeError, OSError)):
                log.exception("rank %s failed", dist.rank)
                error = RuntimeError(f"rank {dist.rank}: {error!r}")
            return _Written([], {}, error)


@dataclass(frozen=True)
class _Written:
    results: list[Any]
    hashes: dict[str, str]
    error: Exception | None = None


def choose(
    tensors: Mapping[str, Tensor],
    dist: DistributedContext,
    *,
    contents: Callable[[str], Tensor] | None = None,
    before: Plan | None = None,
    form: Format = "sharded",
) -> Shards:
    """Decide, by all ranks together, who writes which shard.

    Args:
        tensors: by name.
        dist: who writes.
        contents: gives a tensor by its name, when it is its turn; `tensors` then only describe them.
        before: the plan of an earlier checkpoint: where no rank holds anything else now, it is taken again.
        form: of the model's weights; that of `before` is the same.
    """
    planner = _Planner(contents)
    planner.set_up_planner(dict(tensors), None, dist.main)
    local = planner.create_local_plan()
    plan = before
    if before is None or not _everywhere(before.local == local, dist):
        indices: list[Metadata] = []

        def together(everybody: list[SavePlan]) -> Sequence[tuple[SavePlan, Files | None]]:
            plans, metadata = planner.create_global_plan(balanced(everybody))
            indices.append(metadata)
            files = None if form == "sharded" else Files.of(_shapes(metadata), alone=form == "safetensors")
            # torch's writer (2.13) calls its files after this.
            return [(plan, files) for plan in Writer(Path()).prepare_global_plan(plans)]

        mine, files = dist.through_main(local, together)
        index = indices[0] if indices else None
        plan = Plan(local, mine, index, files, _size_on_disk(index, files) if index else 0)
    assert plan is not None
    # torch's writer keeps every tensor of a file until the file is written: contents get one file each.
    return Shards(plan, planner, one_each=contents is not None)


def _everywhere(yes: bool, dist: DistributedContext) -> bool:
    return not bool(dist.all_reduce(torch.tensor(int(not yes)), "max"))


def balanced(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Leave each shard to one of the ranks that hold it, so that all write about as much: first those that one rank
    alone holds, then the larger ones."""
    holders: dict[MetadataIndex, list[int]] = {}
    sizes: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
            sizes[item.index] = _size(item)
    load, writes = [0] * len(plans), {}
    for index in sorted(holders, key=lambda index: (len(holders[index]) > 1, -sizes[index])):
        rank = min(holders[index], key=lambda rank: load[rank])
        load[rank] += sizes[index] + HEADER
        writes[index] = rank
    return [
        replace(plan, items=[item for item in plan.items if writes[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]


def _size(item: WriteItem) -> int:
    """Bytes of the part of a tensor that an item stands for."""
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _shapes(index: Metadata) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    entries = index.state_dict_metadata.items()
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in entries
        if isinstance(entry, TensorStorageMetadata)
    }


def _size_on_disk(index: Metadata, files: Files | None) -> int:
    elsewhere = files.places.keys() if files and files.alone else ()
    entries = index.state_dict_metadata.items()
    tensors = [e for name, e in entries if isinstance(e, TensorStorageMetadata) and name not in elsewhere]

    def size(tensor: TensorStorageMetadata, chunk: ChunkStorageMetadata) -> int:
        return chunk.sizes.numel() * tensor.properties.dtype.itemsize + HEADER

    return sum(size(tensor, chunk) for tensor in tensors for chunk in tensor.chunks) + (files.bytes if files else 0)


def _threads(plan: SavePlan, dist: DistributedContext) -> int:
    """Threads that a rank writes with: its share of the cores, and no more than there is work for."""
    return max(min(cores() // dist.place.local_size, sum(map(_size, plan.items)) // PER_THREAD), 1)


def _parts(plan: SavePlan, count: int) -> list[SavePlan]:
    """A rank's plan, cut into some of about the same size, one for each thread and file. The writer's own threads
    (torch 2.13) lose the errors of all but one of them."""
    if count == 1:
        return [plan]
    parts, prefix = _shares(plan.items, count), plan.storage_data.prefix
    names = [prefix, *(f"{prefix}{number}_" for number in range(1, len(parts)))]
    return [replace(plan, items=p, storage_data=_StoragePrefix(n)) for p, n in zip(parts, names, strict=True)]


def _shares(items: Sequence[WriteItem], count: int) -> list[list[WriteItem]]:
    """Items in lists of about the same size, none of which is empty."""
    shares: list[list[WriteItem]] = [[] for _ in range(count)]
    load = [0] * count
    for item in sorted(items, key=_size, reverse=True) if count > 1 else items:
        least = min(range(count), key=lambda share: load[share])
        load[least] += _size(item)
        shares[least].append(item)
    return [share for share in shares if share]


# -- torch's parts ----------------------------------------------------------------------------------------------------


class _Planner(DefaultSavePlanner):
    """Takes a shard from the state, from the copies that were made of it, or from who gives it by its name."""

    def __init__(self, contents: Callable[[str], Tensor] | None) -> None:
        super().__init__()
        self._contents = contents
        self._copies: Copies | None = None

    def take_from(self, copies: Copies) -> None:
        self._copies, self.state_dict = copies, {}

    def lookup_object(self, index: MetadataIndex) -> Any:
        if self._copies is not None:
            return self._copies[index]
        return self._contents(index.fqn) if self._contents else super().lookup_object(index)
