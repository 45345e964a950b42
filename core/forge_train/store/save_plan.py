"""The shards that each rank writes: chosen by all ranks together, copied to the host, and written with their hashes.

Ranks agree while training waits, and the files may be written while it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..base.errors import PluginError
from ..mesh.distributed import DistributedContext, sendable
from ..mesh.tensors import local
from ..mesh.world import cores
from .index import Placed, entries_of, write_index
from .shards import Shard, held, tiling_problem
from .tensor_files import Shapes, file_of, write_shards

PER_THREAD = 64 * 2**20
"""Bytes from which a rank writes with another thread, into another file."""
HEADER = 300
"""Bytes that each shard takes beside its values, in its file and in the index, roughly."""
_LARGE = 2**60  # more bytes than a shard has: with millions of shards, pairs to sort by take 200 MB

Copies = dict[Shard, Tensor]
"""Buffers on the host by shard, which the next save may fill again."""


class Files(Protocol):
    """Files of full tensors, for programs that do not know Forge; see `checkpoint.format`."""

    @property
    def bytes(self) -> int:
        """Of all files."""
        ...

    def others(self, shards: Sequence[Shard]) -> list[Shard]:
        """The shards that are written to files of shards."""
        ...

    def placed(self) -> list[tuple[str, Placed]]:
        """Return the places, for the index, of tensors that are not in shards."""
        ...

    def create(self, folder: Path) -> Mapping[str, str]:
        """Make the files, before any process writes; gives the hashes of files that are complete."""
        ...

    def write(self, folder: Path, shards: Sequence[Shard], values: Callable[[Shard], Tensor]) -> None:
        """Write those of some shards that are parts of these tensors, and flush them."""
        ...


MakeFiles = Callable[[Shapes], Files]
"""Shapes and dtypes of a checkpoint's tensors → the files of full tensors to write."""


@dataclass(frozen=True)
class Plan:
    """Shards that this rank writes and, on rank 0, all that the index needs."""

    local: Sequence[Shard]
    """The shards that this rank holds."""
    mine: Sequence[Shard]
    """Those that it writes."""
    tensors: Shapes
    """Of all ranks; known on rank 0."""
    files: Files | None
    """Of full tensors, if any are to be written."""
    bytes: int
    """On disk, of all ranks, roughly; known on rank 0."""


class Shards:
    """The tensors of a checkpoint, as far as this rank writes them."""

    def __init__(self, plan: Plan, values: Callable[[Shard], Tensor]) -> None:
        self.plan = plan
        self._values = values

    def copy(self, into: Copies) -> None:
        """Copy the shards to the host: what is written later is what they are now.

        Args:
            into: the copies of an earlier call, whose memory is used again; those that no longer fit are replaced.
        """
        for shard in into.keys() - set(self.plan.mine):
            del into[shard]
        on_device = False
        for shard in self.plan.mine:
            values = self._values(shard)
            on_device |= values.is_cuda
            if shard not in into:
                into[shard] = torch.empty(shard.sizes, dtype=shard.dtype, pin_memory=values.is_cuda)
            into[shard].copy_(values, non_blocking=values.is_cuda)
        if on_device:
            torch.cuda.current_stream().synchronize()
        self._values = into.__getitem__

    def write(self, folder: Path, dist: DistributedContext) -> dict[str, str]:
        """Write the shards' files, those of full tensors, and the index into a folder that is there.

        Args:
            folder: the folder.
            dist: who writes.

        Returns:
            On rank 0, the hash of the shards' files, by name of the file.

        Raises:
            OSError: on every rank, if the disk refuses one of them.
        """
        files = self.plan.files
        hashes = dict(dist.on_main(lambda: files.create(folder))) if files is not None else {}

        def gathered(everybody: list[_Written]) -> Sequence[None]:
            if failed := next((one.error for one in everybody if one.error), None):
                raise failed
            placed = [one for written in everybody for one in written.placed]
            write_index(folder, entries_of(self.plan.tensors, [*placed, *(files.placed() if files else ())]))
            for one in everybody:
                hashes.update(one.hashes)
            return [None] * len(everybody)

        dist.through_main(self._write_mine(folder, dist), gathered)
        return hashes

    def _write_mine(self, folder: Path, dist: DistributedContext) -> _Written:
        """This rank's part. An error is kept: the other ranks must hear of it, or they would wait for ever."""
        threads, files = _threads(self.plan.mine, dist), self.plan.files
        parts = _shares(self.plan.mine, threads)

        def write_part(number: int) -> tuple[list[tuple[str, Placed]], dict[str, str]]:
            part, name = parts[number], file_of(dist.rank, number)
            if files is not None:
                files.write(folder, part, self._values)
                part = files.others(part)
            if not part:
                return [], {}
            places, found = write_shards(folder / name, part, self._values)
            return [(shard.name, place) for shard, place in zip(part, places, strict=True)], {name: found}

        try:
            with ThreadPoolExecutor(threads) as pool:
                written = [*pool.map(write_part, range(len(parts)))]
            placed = [one for some, _ in written for one in some]
            return _Written(placed, {name: found for _, hashes in written for name, found in hashes.items()})
        except Exception as error:
            if dist.world == 1:
                raise
            return _Written([], {}, sendable(error, dist.rank))


@dataclass(frozen=True)
class _Written:
    placed: list[tuple[str, Placed]]
    hashes: dict[str, str]
    error: Exception | None = None


def choose(
    tensors: Mapping[str, Tensor],
    dist: DistributedContext,
    *,
    contents: Callable[[str], Tensor] | None = None,
    before: Plan | None = None,
    files: MakeFiles | None = None,
) -> Shards:
    """Decide, by all ranks together, who writes which shard.

    Args:
        tensors: by name.
        dist: who writes.
        contents: gives a tensor by its name, when it is its turn; `tensors` then only describe them.
        before: the plan of an earlier checkpoint: where no rank holds anything else now, it is taken again.
        files: makes the files of full tensors, if there are to be some; those of `before` are the same.

    Raises:
        PluginError: on every rank, naming a tensor that the ranks' shards don't make up.
    """
    here = [shard for name, tensor in tensors.items() if (shard := held(name, tensor)) is not None]
    plan = before
    if before is None or not _everywhere(before.local == here, dist):
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        size: list[int] = [0]

        def together(everybody: list[list[Shard]]) -> Sequence[tuple[list[Shard], Files | None]]:
            shapes.update({shard.name: (shard.shape, shard.dtype) for shards in everybody for shard in shards})
            written = balanced(everybody)
            _check_tiled(shapes, written)
            made = files(shapes) if files else None
            size[0] = _size_on_disk(written, made)
            return [(shards, made) for shards in written]

        mine, full = dist.through_main(here, together)
        plan = Plan(here, mine, shapes, full, size[0])
    assert plan is not None
    return Shards(plan, lambda shard: contents(shard.name) if contents else local(tensors[shard.name]).detach())


def _everywhere(yes: bool, dist: DistributedContext) -> bool:
    return not bool(dist.all_reduce(torch.tensor(int(not yes)), "max"))


def balanced(everybody: Sequence[Sequence[Shard]]) -> list[list[Shard]]:
    """Leave each shard to one of the ranks that hold it, so that all write about as much: first those that one rank
    alone holds, then the larger ones. Empty ones are left out."""
    holders: dict[Shard, list[int]] = {}
    for rank, shards in enumerate(everybody):
        for shard in shards:
            if shard.bytes:
                holders.setdefault(shard, []).append(rank)
    load = [0] * len(everybody)
    for shard in sorted(holders, key=lambda shard: (len(holders[shard]) > 1) * _LARGE - shard.bytes):
        holders[shard] = [rank := min(holders[shard], key=lambda rank: load[rank])]
        load[rank] += shard.bytes + HEADER
    return [[shard for shard in shards if holders.get(shard) == [rank]] for rank, shards in enumerate(everybody)]


def _check_tiled(tensors: Shapes, written: Sequence[Sequence[Shard]]) -> None:
    """Check that shards make up each tensor: a placement that torch describes by one range may have gaps."""
    boxes: dict[str, list[Shard]] = {name: [] for name in tensors}
    for shard in (shard for shards in written for shard in shards):
        boxes[shard.name].append(shard)
    for name, (shape, dtype) in tensors.items():
        if any((shard.shape, shard.dtype) != (shape, dtype) for shard in boxes[name]):
            raise PluginError(f"The state {name!r} can't be saved: its shape or dtype differs from rank to rank.")
        if problem := tiling_problem(shape, [shard.box for shard in boxes[name]]):
            raise PluginError(f"The state {name!r} can't be saved: the ranks hold {problem}.")


def _size_on_disk(written: Sequence[Sequence[Shard]], files: Files | None) -> int:
    shards = [shard for some in written for shard in (files.others(some) if files else some)]
    return sum(shard.bytes + HEADER for shard in shards) + (files.bytes if files else 0)


def _threads(shards: Sequence[Shard], dist: DistributedContext) -> int:
    """Threads that a rank writes with: its share of the cores, and no more than there is work for."""
    return max(min(cores() // dist.place.local_size, sum(shard.bytes for shard in shards) // PER_THREAD), 1)


def _shares(shards: Sequence[Shard], count: int) -> list[list[Shard]]:
    """Shards in lists of about the same size, none of which is empty."""
    shares: list[list[Shard]] = [[] for _ in range(count)]
    load = [0] * count
    for shard in sorted(shards, key=lambda shard: -shard.bytes) if count > 1 else shards:
        least = min(range(count), key=lambda share: load[share])
        load[least] += shard.bytes
        shares[least].append(shard)
    return [share for share in shares if share]
