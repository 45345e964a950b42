"""The index of a checkpoint's tensors (`tensors.json`): which shards each has, and where they lie.

It may come from anybody. It is compared with itself and with the sizes of the files before it is used.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..base.errors import ConfigError, describe
from ..base.files import load_json, regular_size, write_whole
from ..base.strict_json import dumps
from .manifest import INDEX, LARGEST, SHARDS
from .shards import Box, size_of, sizes, tiling_problem

_DTYPES = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
_DIMENSIONS = 64


class Placed(NamedTuple):
    """A shard in a file."""

    box: Box
    file: str
    start: int
    """Byte of the file."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[Placed, ...]
    """Those that are not empty."""


class Index(dict[str, Entry]):
    """The tensors of a checkpoint, by name."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        super().__init__(entries)
        self.compared: dict[str, tuple[int, ...]] = {}
        """Files whose headers agree with this index, as they were when they were compared."""

    @cached_property
    def by_file(self) -> Mapping[str, Sequence[tuple[str, Placed]]]:
        """The shards of each file, by the names of their tensors, in the order of their bytes."""
        found: dict[str, list[tuple[str, Placed]]] = {}
        for name, entry in self.items():
            for shard in entry.shards:
                found.setdefault(shard.file, []).append((name, shard))
        return {file: sorted(some, key=lambda one: one[1].start) for file, some in found.items()}


def text_of(box: Box) -> str:
    """A range as the index and the files have it: `[0:4,2:8]`, and `[]` for a single number."""
    return f"[{','.join(f'{low}:{high}' for low, high in box)}]"


def write_index(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Write the index, with a line for each tensor."""
    lines = (
        f"{',' * bool(at)}\n{dumps(name)}: "
        + dumps(
            {
                "dtype": str(entry.dtype).removeprefix("torch."),
                "shape": entry.shape,
                "shards": {text_of(box): [file, start] for box, file, start in entry.shards},
            }
        )
        for at, (name, entry) in enumerate(entries.items())
    )
    write_whole(folder / INDEX, ("{", *lines, "\n}\n"))


def read_index(folder: Path) -> Index:
    """The index of a checkpoint's tensors.

    Raises:
        ConfigError: if it can't be read, contradicts itself, or names bytes that the files don't have.
    """
    try:
        found = (folder / INDEX).lstat()
    except OSError as error:
        raise ConfigError(f"{folder / INDEX}: can't be read: {error.strerror or error}.") from error
    return _read(folder / INDEX, found.st_mtime_ns, found.st_size, found.st_ino)


@lru_cache(maxsize=4)
def _read(file: Path, *changed: int) -> Index:
    collects = gc.isenabled()
    gc.disable()  # it would look at every one of these lists and tuples again and again
    try:
        entries = {name: _entry(name, one) for name, one in load_json(file, most=LARGEST[INDEX], unique=True).items()}
        index = Index(entries)
        _check_files(file.parent, index)
    except ConfigError as error:
        raise ConfigError(f"{file}: refused: it {error}.") from error
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        text = (str(error) if isinstance(error, ValueError) else describe(error)).partition("\n")[0]
        raise ConfigError(f"{file}: not an index of tensors: {text[:200].rstrip('.')}.") from error
    finally:
        if collects:
            gc.enable()
    return index


def _entry(name: str, given: Any) -> Entry:
    if given["dtype"] not in _DTYPES:
        raise ValueError(f"{str(given['dtype'])[:40]!r} is no dtype")
    shape = tuple(map(_count, given["shape"]))
    check_tensor(name, shape, dtype := _DTYPES[given["dtype"]])
    shards = tuple(_placed(name, len(shape), text, *place) for text, place in given["shards"].items())
    if problem := tiling_problem(shape, [shard.box for shard in shards]):
        raise ConfigError(f"declares {problem}: {name[:100]!r}")
    return Entry(shape, dtype, shards)


def _placed(name: str, dimensions: int, text: str, file: str, start: object) -> Placed:
    pairs = (pair.partition(":") for pair in text[1:-1].split(",")) if dimensions else ()
    box = tuple((int(low), int(high)) for low, _, high in pairs)
    if len(box) != dimensions or text_of(box) != text:
        raise ValueError(f"{text[:40]!r} is no range of {name[:100]!r}")
    return Placed(box, file, _count(start))


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value if type(value) is int else f'a {type(value).__name__}'} is no size")
    return value


def check_tensor(name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raises ValueError for a tensor that torch can't make, even where it would have no values."""
    if len(shape) > _DIMENSIONS:
        raise ValueError(f"{name[:100]!r} has {len(shape)} dimensions")
    if size_of([max(size, 1) for size in shape], dtype) >= 2**63:
        raise ValueError(f"{name[:100]!r} has the shape {str([*shape])[:80]}, which is too large for any tensor")
    if (kind := str(dtype).removeprefix("torch.")).startswith(("qint", "quint")):
        raise ValueError(f"{name[:100]!r} is quantized ({kind}), which is not read")


def _check_files(folder: Path, index: Index) -> None:
    taken: dict[str, list[tuple[int, int, str]]] = {}
    for name, entry in index.items():
        for box, file, start in entry.shards:
            taken.setdefault(file, []).append((start, start + size_of(sizes(box), entry.dtype), name))
    check_places(folder, taken, SHARDS)


def check_places(folder: Path, taken: Mapping[str, list[tuple[int, int, str]]], suffix: str) -> None:
    """Check that no two shards share a byte, and that the files have all of them: memory may then be allocated.

    Args:
        folder: of the files.
        taken: file → first byte, last byte (exclusive) and tensor of each shard in it.
        suffix: of all files.

    Raises:
        ConfigError: with what is wrong, as a phrase after "it".
    """
    for file, places in taken.items():
        shown = repr(file[:100])
        if Path(file).name != file or not file.endswith(suffix) or "\0" in file:
            raise ConfigError(f"names {shown}, which is no file of tensors in the checkpoint's folder")
        try:
            has = regular_size(folder / file)
        except OSError as error:
            raise ConfigError(f"names {shown}, which can't be read: {error.strerror or error}") from error
        free = 0
        for start, end, name in sorted(places):
            if start < free:
                raise ConfigError(f"has two shards at byte {start:,} of {shown}, one of them of {name[:100]!r}")
            if (free := end) > has:
                raise ConfigError(f"has a shard of {name[:100]!r} end at byte {end:,} of {shown}, which has {has:,}")


def entries_of(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], shards: Iterable[tuple[str, Placed]]
) -> dict[str, Entry]:
    """The index of tensors whose shards were written.

    Args:
        tensors: name → shape and dtype.
        shards: name and place of each shard.
    """
    found: dict[str, list[Placed]] = {name: [] for name in tensors}
    for name, placed in shards:
        found[name].append(placed)
    return {name: Entry(*tensors[name], tuple(sorted(placed))) for name, placed in found.items()}
