"""Tensors of a checkpoint, read range by range: only the requested bytes, into the memory that they are for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..base.errors import ConfigError
from ..mesh.distributed import DistributedContext, sendable
from ..mesh.tensors import local
from .index import Entry, Index, Placed, read_index
from .shards import Box, common, held, sizes, within
from .tensor_files import Place, described, key_in, pieces, stored_as


class _Part(NamedTuple):
    """A range to read: it lies in one shard, and goes to one place."""

    name: str
    shard: Placed
    box: Box
    target: Tensor


def read(path: Path, tensors: Mapping[str, Tensor], dist: DistributedContext) -> None:
    """Fill tensors (this rank's shards of them) in place.

    Args:
        path: the checkpoint.
        tensors: by their names in it; each rank may have others.
        dist: the ranks that read, all of which call this.

    Raises:
        ConfigError: on every rank, if what is in a file of one is not what the index says.
    """
    problem: Exception | None = None
    try:
        index = read_index(path)
        _read(path, index, _parts_of(path, index, tensors))
    except Exception as error:
        if dist.world == 1:
            raise
        problem = sendable(error, dist.rank)
    if failed := next((one for one in dist.gather_objects(problem) if one is not None), None):
        raise failed


def read_range(path: Path, name: str, box: Box) -> Tensor:
    """A range of one tensor, on the CPU."""
    index = read_index(path)
    entry = index[name]
    target = torch.empty(sizes(box), dtype=entry.dtype)
    _read(path, index, _parts(name, entry, box, target))
    return target


def check_shards(path: Path) -> None:
    """Compare the description of every shard in a checkpoint's files with the index; no values are read.

    Raises:
        ConfigError: if one differs.
    """
    index = read_index(path)
    for file in sorted(index.by_file):
        _compare(path, index, file)


def _parts_of(path: Path, index: Index, tensors: Mapping[str, Tensor]) -> Iterable[_Part]:
    for name, tensor in tensors.items():
        if (shard := held(name, tensor)) is None:
            continue
        entry = index[name]
        if entry.shape != shard.shape:
            raise ConfigError(f"{path}: {name!r} has the shape {[*entry.shape]} there, and {[*shard.shape]} here.")
        yield from _parts(name, entry, shard.box, local(tensor).detach())


def _parts(name: str, entry: Entry, box: Box, target: Tensor) -> Iterable[_Part]:
    for shard in entry.shards:
        if (shared := common(shard.box, box)) is not None:
            yield _Part(name, shard, shared, target[within(box, shared)])


def _read(path: Path, index: Index, parts: Iterable[_Part]) -> None:
    by_file: dict[str, list[_Part]] = {}
    for part in parts:
        by_file.setdefault(part.shard.file, []).append(part)
    for file, some in by_file.items():
        _compare(path, index, file)
        handle = os.open(path / file, os.O_RDONLY)
        try:
            for part in sorted(some, key=lambda part: part.shard.start):
                _read_part(handle, part, index[part.name].dtype)
        finally:
            os.close(handle)


def _read_part(handle: int, part: _Part, dtype: torch.dtype) -> None:
    target, shard = part.target, part.shard
    direct = type(target) is Tensor and target.is_cpu and target.is_contiguous() and target.dtype == dtype
    values = target if direct else torch.empty(sizes(part.box), dtype=dtype)
    data = memoryview(values.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    place = Place(shard.file, shard.start, sizes(shard.box), dtype)
    begin = [low - begin for (low, _), (begin, _) in zip(part.box, shard.box, strict=True)]
    for offset, piece in pieces(place, begin, sizes(part.box), data):
        while piece:
            if not (got := os.preadv(handle, [piece], offset)):
                raise ConfigError(f"{shard.file}: ends too early.")
            piece, offset = piece[got:], offset + got
    if not direct:
        target.copy_(values)


def _compare(path: Path, index: Index, file: str) -> None:
    """Compare all shards of a file with its header, once for as long as neither the index nor the file changes."""
    stat = (path / file).stat()
    signature = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    if index.compared.get(file) == signature:
        return
    header = described(path / file)
    for name, shard in index.by_file[file]:
        key = key_in(file, name, shard.box)
        expected = (*stored_as(sizes(shard.box), index[name].dtype), shard.start)
        if (found := header.get(key)) != expected:
            words = (
                f"it is {_words(*found)}, and {_words(*expected)} by the index" if found else "it is not in this file"
            )
            raise ConfigError(f"{path / file}: {key[:200]!r} can't be read: {words}.")
    index.compared[file] = signature


def _words(dtype: str, shape: tuple[int, ...], start: int) -> str:
    return f"{' × '.join(map(str, shape)) or 'a single number'} of {dtype} at byte {start:,}"
