"""The index of a DCP folder (`.metadata`): a pickle that may come from anybody, read without calling what it names.

torch's own reader unpickles it with every class of the process at hand, and its unpickler for `weights_only` (2.13)
can't read the protocol of an index.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from forge_train.base.errors import ConfigError, describe
from forge_train.base.files import regular_size
from forge_train.store.index import check_places, check_tensor
from forge_train.store.manifest import DCP_INDEX, SHARDS
from forge_train.store.shards import Box, size_of, sizes, tiling_problem

_LARGEST = 1 << 30
_DCP = "torch.distributed.checkpoint"
_KNOWN: Mapping[str, frozenset[str]] = {
    f"{_DCP}.metadata": frozenset(
        {
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "StorageMeta"),
            *("ChunkStorageMetadata", "MetadataIndex", "_MEM_FORMAT_ENCODING"),
        }
    ),
    f"{_DCP}.filesystem": frozenset({"_StorageInfo"}),
    "torch": frozenset({"Size"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "builtins": frozenset({"getattr"}),  # how Python 3.11 writes a member of an enumeration
    **dict.fromkeys(("pathlib", "pathlib._local"), frozenset({"PosixPath", "WindowsPath"})),
}
"""Classes and functions that an index names, besides dtypes: module → names."""


class Chunk(NamedTuple):
    """A part of a tensor, and its bytes in a file."""

    box: Box
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Stored:
    """A tensor of a folder."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    """Those that are not empty; they cover the tensor exactly once."""


@dataclass(frozen=True)
class Index:
    """All that is in a folder, by name."""

    tensors: Mapping[str, Stored]
    others: tuple[str, ...]
    """Values that are no tensors."""


def read_index(folder: Path) -> Index:
    """The index of a folder, compared with itself and with the sizes of the files.

    Raises:
        ConfigError: if it is anything but an index of tensors and plain values, contradicts itself, or names bytes that
            the files don't have.
    """
    file = folder / DCP_INDEX
    try:
        if (size := regular_size(file)) > _LARGEST:
            raise ValueError(f"it has {size:,} bytes, and at most {_LARGEST:,} are read")
        found = _Unpickler(io.BytesIO(file.read_bytes())).load()
        index = _index_of(found)
    except Exception as error:  # whatever a damaged pickle comes to
        text = (str(error) if type(error) is ValueError else describe(error)).partition("\n")[0][:300].rstrip(".")
        raise ConfigError(f"{file}: not an index of torch.distributed.checkpoint: {text}.") from error
    try:
        _check_files(folder, index)
    except ConfigError as error:
        raise ConfigError(f"{file}: refused: it {error}.") from error
    return index


# -- the pickle -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Name:
    """A class or a function that the pickle names. Nothing is imported for it."""

    name: str


class _Made:
    """An object that the pickle describes: its class, the arguments of its constructor, and its state."""

    def __init__(self, name: str, arguments: object) -> None:
        self.name = name
        self.arguments = arguments
        self.state: object = None


class _Unpickler(pickle._Unpickler):
    """Makes records in place of objects. A pickle can't call or change anything in this process.

    It is Python's own in Python, because that in C can't be kept from calling and changing what it has at hand.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {}
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        if name in _KNOWN.get(module, ()):
            return _Name(name)
        text = f"{module}.{name}"[:100]
        raise ValueError(f"it names {text}, which an index does not need and which could run code")

    def make(self) -> None:
        arguments, named = self.stack.pop(), self.stack.pop()
        if type(named) is not _Name:
            raise ValueError("it calls something else than a class")
        self.stack.append(_Made(named.name, arguments))

    def build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is not _Made:
            raise ValueError("it changes something else than an object of its own")
        made.state = state

    def set_items(self) -> None:
        """Keys are strings and records: hashing nested tuples may take for ever."""
        items = self.pop_mark()  # type: ignore[attr-defined]
        self._set(items)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _set(self, items: list[Any]) -> None:
        held = self.stack[-1]
        if type(held) is not dict or any(type(key) not in (str, _Made) for key in items[::2]):
            raise ValueError("it has something else than names for keys")
        held.update(zip(items[::2], items[1::2], strict=True))


_PLAIN = (
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "PUT", "GET"),
    *("GLOBAL", "STACK_GLOBAL", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "EMPTY_DICT", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
)
"""Other operations that write an index."""
for _name in _PLAIN:
    _code = getattr(pickle, _name)[0]
    _Unpickler.dispatch[_code] = pickle._Unpickler.dispatch[_code]
_Unpickler.dispatch |= {
    pickle.REDUCE[0]: _Unpickler.make,
    pickle.NEWOBJ[0]: _Unpickler.make,
    pickle.BUILD[0]: _Unpickler.build,
    pickle.SETITEM[0]: _Unpickler.set_item,
    pickle.SETITEMS[0]: _Unpickler.set_items,
}


# -- what it says -----------------------------------------------------------------------------------------------------


def _index_of(found: object) -> Index:
    metadata = _fields(found, "Metadata")
    places = _places(metadata.get("storage_data"))
    tensors: dict[str, Stored] = {}
    others: list[str] = []
    for name, entry in _table(metadata["state_dict_metadata"]).items():
        if type(name) is not str:
            raise ValueError("a name is no text")
        if _is(entry, "BytesStorageMetadata"):
            others.append(name)
        else:
            tensors[name] = _stored(name, _fields(entry, "TensorStorageMetadata"), places)
    return Index(tensors, tuple(others))


def _places(found: object) -> dict[tuple[str, tuple[int, ...]], Mapping[str, Any]]:
    """Name and first element of each chunk → place of its bytes."""
    places: dict[tuple[str, tuple[int, ...]], Mapping[str, Any]] = {}
    for key, place in _table(found).items():
        index = _fields(key, "MetadataIndex")
        if type(name := index.get("fqn")) is not str:
            raise ValueError("a name is no text")
        if index.get("offset") is not None:  # that of a value that is no tensor
            places[name, _sizes(name, index["offset"])] = _fields(place, "_StorageInfo")
    return places


def _stored(
    name: str, entry: Mapping[str, Any], places: Mapping[tuple[str, tuple[int, ...]], Mapping[str, Any]]
) -> Stored:
    shown, properties = repr(name[:100]), entry["properties"]
    if not _is(properties, "TensorProperties") or type(properties.state) is not tuple or not properties.state:
        raise ValueError(f"{shown} has no properties")
    if not isinstance(dtype := properties.state[0], torch.dtype):
        raise ValueError(f"{shown} has no dtype")
    check_tensor(name, shape := _sizes(name, entry["size"]), dtype)
    if not isinstance(entry["chunks"], list):
        raise ValueError(f"{shown} has no list of chunks")
    chunks: list[Chunk] = []
    for fields in (_fields(one, "ChunkStorageMetadata") for one in entry["chunks"]):
        begin, lengths = _sizes(name, fields["offsets"]), _sizes(name, fields["sizes"])
        if not len(begin) == len(lengths) == len(shape):
            raise ValueError(f"a chunk of {shown} has another number of dimensions than its {len(shape)}")
        if 0 in lengths:
            continue
        if (place := places.get((name, begin))) is None:
            raise ValueError(f"the chunk of {shown} at {[*begin]} is in no file")
        chunks.append(_chunk(name, tuple((low, low + n) for low, n in zip(begin, lengths, strict=True)), place))
    if problem := tiling_problem(shape, [chunk.box for chunk in chunks]):
        raise ValueError(f"it declares {problem}: {shown}")
    return Stored(shape, dtype, tuple(chunks))


def _chunk(name: str, box: Box, place: Mapping[str, Any]) -> Chunk:
    file: Any = place.get("relative_path")
    start: Any = place.get("offset")
    length: Any = place.get("length")
    if type(file) is not str or not _is_count(start) or not _is_count(length):
        raise ValueError(f"a chunk of {name[:100]!r} is at no place of a file")
    if place.get("transform_descriptors"):
        raise ValueError(f"{name[:100]!r} was written with an extension, such as for compression, which is not read")
    return Chunk(box, file, start, length)


def _is(found: object, name: str) -> bool:
    return isinstance(found, _Made) and found.name == name


def _fields(found: object, name: str) -> Mapping[str, Any]:
    if not isinstance(found, _Made) or found.name != name:
        raise ValueError(f"it has a {found.name if isinstance(found, _Made) else type(found).__name__}, not a {name}")
    return _table(found.state)


def _table(found: object) -> Mapping[Any, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"it has a {type(found).__name__}, not a table")
    return found


def _sizes(name: str, found: object) -> tuple[int, ...]:
    if isinstance(found, _Made) and found.name == "Size" and isinstance(found.arguments, tuple) and found.arguments:
        found = found.arguments[0]
    if not isinstance(found, (tuple, list)) or not all(map(_is_count, found)):
        raise ValueError(f"a shape or place of {name[:100]!r} is no list of counts")
    return tuple(found)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


# -- the files --------------------------------------------------------------------------------------------------------


def _check_files(folder: Path, index: Index) -> None:
    taken: dict[str, list[tuple[int, int, str]]] = {}
    for name, stored in index.tensors.items():
        for box, file, start, length in stored.chunks:
            size = size_of(sizes(box), stored.dtype)
            if size > length or (file.endswith(SHARDS) and size != length):
                raise ConfigError(f"has {size:,} bytes of {name[:100]!r} lie in {length:,} bytes of {file[:100]!r}")
            taken.setdefault(file, []).append((start, start + length, name))
    check_places(folder, taken, "")
