"""The index of a checkpoint's tensors (`.metadata`), read without running anything that is in it.

torch.distributed.checkpoint writes a pickle. It is read as plain data, and the index is built anew from it, each value
checked: a file that is named lies in this folder, and what is declared is no larger than what is there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..ground.errors import ConfigError, describe
from ..ground.untrusted import regular_size
from . import pickles
from .manifest import INDEX, LARGEST
from .pickles import Call, Mark

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

_DCP = "torch.distributed.checkpoint"
_CALLED = {
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("builtins", "getattr"),  # some versions of Python write a member of an enumeration with it
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}
"""What a pickle of an index calls."""
_DIMENSIONS, _LARGEST_SIZE = 64, 2**63


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint's tensors.

    Raises:
        ConfigError: if it can't be read, or holds anything else than an index of tensors in this folder.
    """
    try:
        size = regular_size(folder / INDEX)
        found = (folder / INDEX).stat()
    except OSError as error:
        raise ConfigError(f"{folder / INDEX}: can't be read: {error.strerror or error}.") from error
    if size > LARGEST[INDEX]:
        raise ConfigError(f"{folder / INDEX}: refused: it has {size:,} bytes, and an index at most {LARGEST[INDEX]:,}.")
    return _read(folder / INDEX, found.st_mtime_ns, found.st_size, found.st_ino)


@lru_cache(maxsize=4)
def _read(file: Path, *changed: int) -> Metadata:
    try:
        return _index(pickles.read(file.read_bytes(), _known), file.parent)
    except ConfigError as error:
        raise ConfigError(f"{file}: refused, and nothing in it was run: it {error}.") from error
    except Exception as error:  # whatever a record of another shape comes to
        raise ConfigError(f"{file}: not an index of tensors: {describe(error)}.") from error


def _known(module: str, name: str) -> object:
    if (module, name) in _CALLED:
        return Mark(module, name)
    if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
        return found
    raise ConfigError(f"names {module}.{name}, which an index of tensors does not need and which could run code")


def _index(root: Call, folder: Path) -> Metadata:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    sizes = _Sizes()
    tensors = {_text(name): _tensor(entry.state, sizes) for name, entry in root.state["state_dict_metadata"].items()}
    places = {
        _place(index.state, sizes): _StorageInfo(
            _file_name(where.state["relative_path"]), _count(where.state["offset"]), _count(where.state["length"])
        )
        for index, where in root.state["storage_data"].items()
    }
    places = {index: place for index, place in places.items() if index.fqn in tensors}
    _check_places(tensors, places, folder)
    return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())  # type: ignore[arg-type]


def _tensor(state: dict[str, Any], sizes: _Sizes) -> TensorStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

    dtype = state["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{_short(dtype)} is no dtype")
    chunks = [
        ChunkStorageMetadata(sizes.of(chunk.state["offsets"]), sizes.of(chunk.state["sizes"]))
        for chunk in state["chunks"]
    ]
    return TensorStorageMetadata(TensorProperties(dtype), sizes.of(state["size"]), chunks)


def _place(state: dict[str, Any], sizes: _Sizes) -> MetadataIndex:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    offset, index = state["offset"], state["index"]
    return MetadataIndex(
        _text(state["fqn"]), None if offset is None else sizes.of(offset), None if index is None else _count(index)
    )


# -- what is declared against what is there ---------------------------------------------------------------------------


def _check_places(tensors: Mapping[str, TensorStorageMetadata], places: Mapping[MetadataIndex, Any], at: Path) -> None:
    """Whether each tensor is the sum of its shards, each shard has a place of its own that is large enough, and the
    files have all these places. Memory for a tensor can then be taken without fear."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    taken: dict[str, int] = {}
    for name, tensor in tensors.items():
        _check_shards(name, tensor)
        for chunk in tensor.chunks:
            if 0 in chunk.sizes:
                continue
            if (place := places.get(MetadataIndex(name, chunk.offsets))) is None:
                raise ConfigError(f"says nothing of where a shard of {name!r} lies")
            size = math.prod(chunk.sizes) * tensor.properties.dtype.itemsize
            if place.length < size:
                raise ConfigError(f"declares {size:,} bytes for a shard of {name!r} that has {place.length:,}")
            taken[place.relative_path] = taken.get(place.relative_path, 0) + place.length
    for file, used in taken.items():
        try:
            has = regular_size(at / file)
        except OSError as error:
            raise ConfigError(f"names {file}, which can't be read: {error.strerror or error}") from error
        if used > has:
            raise ConfigError(f"declares {used:,} bytes of tensors in {file}, which has {has:,}")


def _check_shards(name: str, tensor: TensorStorageMetadata) -> None:
    """Whether the shards add up to the tensor: each lies inside it, and no two with values begin at the same place."""
    size, filled = tensor.size, 0
    full = [chunk.offsets for chunk in tensor.chunks if 0 not in chunk.sizes]
    for chunk in tensor.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(size) or any(
            offset + length > whole for offset, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
        ):
            raise ConfigError(f"declares a shard of {name!r} that does not lie in the tensor")
        filled += math.prod(chunk.sizes)
    if filled != math.prod(size) or len(set(full)) < len(full):
        raise ConfigError(f"declares shards of {name!r} that do not add up to the tensor")


# -- single values ----------------------------------------------------------------------------------------------------


class _Sizes:
    """Each size once, however often it is referred to."""

    def __init__(self) -> None:
        self._made: dict[int, torch.Size] = {}

    def of(self, call: object) -> torch.Size:
        if id(call) not in self._made:
            values = call.arguments[0] if isinstance(call, Call) and call.arguments else call
            if not isinstance(values, tuple) or len(values) > _DIMENSIONS:
                raise TypeError(f"{_short(values)} is no shape")
            self._made[id(call)] = torch.Size([_count(value) for value in values])
        return self._made[id(call)]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{_short(value)} is no name")
    return value


def _file_name(value: object) -> str:
    name = _text(value)
    if Path(name).name != name or not name.isprintable():
        raise ConfigError(f"names the file {name[:100]!r}, which is not in the checkpoint's folder")
    return name


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST_SIZE:
        raise TypeError(f"{_short(value)} is no size")
    return value


def _short(value: object) -> str:
    """A value for a message; one that could be long by its type."""
    return repr(value)[:100] if isinstance(value, (int, float, str, torch.dtype)) else f"a {type(value).__name__}"
