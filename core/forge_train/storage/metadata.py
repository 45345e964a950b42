"""The index of a checkpoint's tensors (`.metadata`), read without running anything that is in it.

torch.distributed.checkpoint writes a pickle. Of the objects that it names, only those that an index of tensors needs
are known here; they are read as plain records and then built anew, each value checked.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..ground.errors import ConfigError, describe

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

FILE = ".metadata"
_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
}
_UNUSED = {
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("builtins", "getattr"),  # some versions of Python write a member of an enumeration with it
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}
"""What is called in a pickle of the index, and whose results nobody reads."""


class _Record:
    """Stands for an object of torch's: what it was saved as."""

    state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return type(name, (_Record,), {})  # a new one each time: a pickle can change the classes that it is given
        if (module, name) in _UNUSED:
            return lambda *values: None
        if (module, name) == ("torch", "Size"):
            return lambda sizes=(): tuple(sizes)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise ConfigError(f"names {module}.{name}, which an index of tensors does not need and which could run code")


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint's tensors.

    Raises:
        ConfigError: if it can't be read, or holds anything else than an index of tensors in this folder.
    """
    try:
        found = (folder / FILE).stat()
    except OSError as error:
        raise ConfigError(f"{folder / FILE}: can't be read: {error.strerror or error}.") from error
    return _read(folder / FILE, found.st_mtime_ns, found.st_size, found.st_ino)


@lru_cache(maxsize=4)
def _read(file: Path, *changed: int) -> Metadata:
    try:
        with file.open("rb") as data:
            return _index(_Unpickler(data).load())
    except ConfigError as error:
        raise ConfigError(f"{file}: refused, and nothing in it was run: it {error}.") from error
    except Exception as error:  # whatever pickle, or a record of another shape, comes to
        raise ConfigError(f"{file}: not an index of tensors: {describe(error)}") from error


def _index(record: _Record) -> Metadata:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    state = record.state
    tensors = {_text(name): _tensor(entry.state) for name, entry in state["state_dict_metadata"].items()}
    places = {
        _place(index.state): _StorageInfo(
            _file_name(where.state["relative_path"]), _count(where.state["offset"]), _count(where.state["length"])
        )
        for index, where in state["storage_data"].items()
    }
    return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())  # type: ignore[arg-type]


def _tensor(state: dict[str, Any]) -> TensorStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

    dtype = state["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r} is no dtype")
    chunks = [
        ChunkStorageMetadata(_size(chunk.state["offsets"]), _size(chunk.state["sizes"])) for chunk in state["chunks"]
    ]
    return TensorStorageMetadata(TensorProperties(dtype), _size(state["size"]), chunks)


def _place(state: dict[str, Any]) -> MetadataIndex:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    offset, index = state["offset"], state["index"]
    return MetadataIndex(
        _text(state["fqn"]), None if offset is None else _size(offset), None if index is None else _count(index)
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no name")
    return value


def _file_name(value: object) -> str:
    name = _text(value)
    if Path(name).name != name:
        raise ConfigError(f"names the file {name!r}, which is not in the checkpoint's folder")
    return name


def _size(value: Iterable[object]) -> torch.Size:
    return torch.Size([_count(one) for one in value])


def _count(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise TypeError(f"{value!r} is no size")
    return value
