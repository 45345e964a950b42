"""Shards of a checkpoint's tensors, each compared with what the index says of it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..ground.errors import ConfigError
from ..ground.untrusted import parse_json
from . import entries
from .consolidated import DTYPES, ENDING
from .in_place import Place, pieces, size_of
from .metadata import read_index
from .tree import MODEL

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@contextmanager
def reader(path: Path, name: str) -> Iterator[Callable[[MetadataIndex, _StorageInfo, tuple[slice, ...]], Tensor]]:
    """A function that reads a part of a shard, on the CPU.

    Args:
        path: the checkpoint.
        name: the file of it that holds the shards; only what is asked for is read.

    Raises:
        ConfigError: if one is damaged, or another one than the index says; by the function too.
    """
    if name.endswith(ENDING):
        with _opened(path, name) as (file, tensors):
            yield lambda index, place, part: _read_slice(file, _found(path, tensors, index, place), part)
        return
    with (path / name).open("rb") as file:
        yield lambda index, place, part: _read_part(path, file, index, place, part)


def _read_part(
    path: Path, file: BinaryIO, index: MetadataIndex, place: _StorageInfo, part: tuple[slice, ...]
) -> Tensor:
    """A part of a shard, on the CPU.

    Args:
        path: the checkpoint.
        file: of it, open for reading.
        index: which shard of which tensor.
        place: where in the file it lies.
        part: bounds in each dimension.

    Raises:
        ConfigError: if it is damaged, or another one than the index says.
    """
    try:
        if found := entries.locate(file, place.offset, place.length):
            start, shape, dtype = found
            _compare(path, index, shape, dtype)
            return _read_slice(file, Place(place.relative_path, start, shape, dtype), part)
        tensor = entries.read_tensor(file, place.offset, place.length)
        _compare(path, index, tuple(tensor.shape), tensor.dtype)
    except ValueError as error:
        raise _refused(path, index, place, error) from error
    return tensor[part]


def check_shards(path: Path) -> None:
    """Look at the description of every shard of a checkpoint; no values are read.

    Raises:
        ConfigError: if one is damaged, or another one than the index says.
    """
    files: dict[str, list[tuple[MetadataIndex, _StorageInfo]]] = {}
    for index, place in (read_index(path).storage_data or {}).items():
        files.setdefault(place.relative_path, []).append((index, place))
    for name, shards in files.items():
        ordered = sorted(shards, key=lambda shard: shard[1].offset)
        if name.endswith(ENDING):
            with _opened(path, name) as (_, tensors):
                for index, place in ordered:
                    _found(path, tensors, index, place)
            continue
        with (path / name).open("rb") as file:
            for index, place in ordered:
                try:
                    _compare(path, index, *entries.describe(file, place.offset, place.length))
                except ValueError as error:
                    raise _refused(path, index, place, error) from error


@contextmanager
def _opened(path: Path, name: str) -> Iterator[tuple[BinaryIO, dict[str, Place]]]:
    """A safetensors file, and the places of its tensors. It is not mapped into memory, where an error of the disk would
    be a signal that ends the process."""
    try:
        with safe_open(path / name, framework="pt"):
            pass  # the header is whole, and fits the file
    except SafetensorError as error:
        raise ConfigError(f"{path / name}: not a whole safetensors file: {error}.") from error
    with (path / name).open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = parse_json(file.read(length).decode())
        header.pop("__metadata__", None)
        yield (
            file,
            {
                tensor: Place(name, 8 + length + one["data_offsets"][0], tuple(one["shape"]), _DTYPES[one["dtype"]])
                for tensor, one in header.items()
                if one["dtype"] in _DTYPES
            },
        )


def _found(path: Path, tensors: Mapping[str, Place], index: MetadataIndex, place: _StorageInfo) -> Place:
    """The place of a tensor in a safetensors file."""
    try:
        if (found := tensors.get(index.fqn.removeprefix(MODEL))) is None:
            raise ValueError("it is not in this file, or its dtype is unknown")
        _compare(path, index, found.shape, found.dtype)
        if found.start != place.offset:
            raise ValueError(f"it begins at byte {found.start:,}, and at {place.offset:,} by the index")
    except ValueError as error:
        raise _refused(path, index, place, error) from error
    return found


def _read_slice(file: BinaryIO, place: Place, part: tuple[slice, ...]) -> Tensor:
    offsets, sizes = [one.start for one in part], [one.stop - one.start for one in part]
    values = torch.empty(size_of(sizes, place.dtype), dtype=torch.uint8)
    for offset, piece in pieces(place, offsets, sizes, memoryview(values.numpy())):  # type: ignore[arg-type]
        file.seek(offset)
        if file.readinto(piece) != len(piece):  # type: ignore[attr-defined]
            raise ConfigError(f"{place.file}: ends too early.")
    return values.view(place.dtype).reshape(sizes)


def _compare(path: Path, index: MetadataIndex, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = read_index(path).state_dict_metadata[index.fqn]
    sizes = {chunk.offsets: tuple(chunk.sizes) for chunk in tensor.chunks}  # type: ignore[union-attr]
    expected = sizes.get(index.offset), tensor.properties.dtype  # type: ignore[union-attr]
    if (shape, dtype) != expected:
        raise ValueError(f"it is {_words(shape, dtype)}, and {_words(*expected)} by the index")


def _words(shape: tuple[int, ...] | None, dtype: torch.dtype) -> str:
    sizes = " × ".join(map(str, shape)) or "a single number" if shape is not None else "nothing"
    return f"{sizes} of {str(dtype).removeprefix('torch.')}"


def _refused(path: Path, index: MetadataIndex, place: _StorageInfo, error: ValueError) -> ConfigError:
    return ConfigError(f"{path / place.relative_path}: {index.fqn!r} can't be read: {error}.")
