"""A checkpoint's `manifest.json`: what is sealed, and what is wrong with it as far as sizes show."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Protocol, cast

from ..base.files import load_json, regular_size

MANIFEST = "manifest.json"
FORMAT = 3
"""Of a checkpoint, as `docs/checkpoint-format.md` describes it. Formats 1 and 2 can be imported."""
NAME = re.compile(r"step-(\d{8,})$")
"""Name of a checkpoint in a run's folder."""
STATE, INDEX = "state.json", "tensors.json"
DCP_INDEX = ".metadata"
"""The index of torch.distributed.checkpoint, which formats 1 and 2 had."""
NEEDED = (STATE, INDEX)
"""Files without which nothing is a checkpoint."""
EDITABLE = "config.toml"
"""File that may be edited: a resumed run compares its values with those in `state.json`, which is sealed."""
LARGEST = {MANIFEST: 64 << 20, STATE: 256 << 20, INDEX: 256 << 20, EDITABLE: 4 << 20}
"""Bytes that are read at most; an index of a million shards takes about 80 MB."""
_LARGEST_OTHER = 1 << 30
SHARDS = ".safetensors"
"""Suffixes of files that may have any size."""
_LONGEST_NAME = 1000
NEWER, OLDER = "written by a newer forge:", "written by an older forge:"
"""Message about another format."""
OTHER = {NEWER: "Update forge-train to read it.", OLDER: "Import it: forge checkpoint import {path} NEW"}
"""Advice about one."""


@dataclass(frozen=True)
class Entry:
    """A file as it was sealed."""

    bytes: int
    hash: str
    """Hexadecimal."""


@dataclass(frozen=True)
class Sealed:
    """Entries of a manifest."""

    files: Mapping[str, Entry]
    """Files that must be as they were saved."""
    editable: Mapping[str, Entry | None]
    """Files that must be there, with what they were, where that is known."""
    algorithm: str
    """Of the hashes."""


def inspect(path: Path) -> Sealed | str:
    """Return the sealed entries, or a phrase on what is wrong, judging by sizes."""
    sealed = listed(lambda: load_json(path / MANIFEST, most=LARGEST[MANIFEST]), path)
    return sealed if isinstance(sealed, str) else _wrong_file(path, sealed) or _added(path, sealed) or sealed


def listed(read: Callable[[], Any], path: Path) -> Sealed | str:
    """Return the entries of a manifest, or a phrase on what is wrong with it.

    Args:
        read: returns its JSON, or raises an `OSError` or a `ValueError`.
        path: the checkpoint that it belongs to.
    """
    try:
        table = read()
        if problem := other_format(table.get("format", 1 if DCP_INDEX in table["files"] else FORMAT)):
            return problem
        if not is_hash(algorithm := table.get("hash", FIRST)):
            return f"{MANIFEST} names the hash {str(algorithm)[:40]!r}; this forge knows {hash_names()}"
        files = {name: _entry(entry, algorithm) for name, entry in table["files"].items()}
        editable, step = list(table.get("editable", ())), table.get("step")
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        return f"{MANIFEST} can't be read: {error.strerror or error}"
    except ValueError as error:
        return f"{MANIFEST} can't be read: {_first_line(error)}"
    except (KeyError, TypeError, AttributeError):
        return f"{MANIFEST} can't be read: it is no list of files"
    if problem := _wrong_step(path, step) or _lacking(files) or _odd_name(path, [*files, *editable]):
        return problem
    return Sealed(
        {name: entry for name, entry in files.items() if name != EDITABLE},
        {name: files.get(name) for name in files.keys() & {EDITABLE} | set(editable)},
        algorithm,
    )


def other_format(found: object) -> str:
    """A phrase, if a format is not the one that is read."""
    if type(found) is not int or found == FORMAT:
        return ""
    return f"{NEWER if found > FORMAT else OLDER} format {str(found)[:20]}, this reads {FORMAT}"


def way_out(problem: str, path: object) -> str:
    """Advise on a checkpoint of another format, in a sentence; empty if that is not the problem."""
    return next((text.format(path=path) for start, text in OTHER.items() if problem.startswith(start)), "")


def _entry(entry: Mapping[str, Any], algorithm: str) -> Entry:
    size, found = entry["bytes"], entry[algorithm]
    if type(size) is not int or not isinstance(found, str):
        raise TypeError
    return Entry(size, found)


def _first_line(error: ValueError) -> str:
    return str(error).partition("\n")[0][:200]


# -- what is wrong ----------------------------------------------------------------------------------------------------


def _wrong_step(path: Path, step: object) -> str:
    named = NAME.match(path.name)
    if not named or step in (int(named[1]), None):  # None: sealed before steps were
        return ""
    return f"it is of step {str(step)[:20]}, whatever its name says"


def _lacking(listed: Mapping[str, Entry]) -> str:
    lacking = [name for name in NEEDED if name not in listed]
    return f"{MANIFEST} does not list {lacking[0]}" if lacking else ""


def _odd_name(path: Path, names: list[Any]) -> str:
    for name in names:
        if not isinstance(name, str):
            return f"{MANIFEST} can't be read: it is no list of files"
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return f"{MANIFEST} names {name[:200]!r}, which is not in this folder"
        if not name.isprintable() or len(name) > _LONGEST_NAME:
            return f"{MANIFEST} names {name[:200]!r}, as no file of a checkpoint is called"
        if any((path / parent).is_symlink() for parent in Path(name).parents if parent != Path()):
            return f"{name} is in a folder that is a link, and links are not followed: put the folder itself there"
    return ""


def _wrong_file(path: Path, sealed: Sealed) -> str:
    sizes: dict[str, int] = {}
    for name in [*sealed.files, *sealed.editable]:
        try:
            sizes[name] = regular_size(path / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} can't be read: {error.strerror or error}"
    for name, size in sizes.items():
        if problem := wrong_size(name, size, sealed):
            return problem
    return ""


def wrong_size(name: str, size: int, sealed: Sealed) -> str:
    """A phrase, if a file that is listed has another size, or may not be so large."""
    if name in sealed.files and size != sealed.files[name].bytes:
        return f"{name} has {size} bytes, not {sealed.files[name].bytes}"
    if size > (most := LARGEST.get(name, size if name.endswith(SHARDS) else _LARGEST_OTHER)):
        return f"{name} has {size:,} bytes, and at most {most:,} are read"
    return ""


def _added(path: Path, sealed: Sealed) -> str:
    """Describe a file added to a sealed folder, such as a tokenizer's, which would be read; empty if there is none."""
    folders = {Path(name).parent for name in sealed.files} - {Path()}
    beside = (file for folder in sorted(folders) for file in sorted((path / folder).iterdir()))
    names = (str(file.relative_to(path)) for file in beside if file.is_file() and not file.name.startswith("."))
    return next((f"{name} was added to it" for name in names if name not in sealed.files), "")


# -- hashes: they show damage, not tampering (docs/guarantees.md) ------------------------------------------------------

ALGORITHM = "xxh3_128"
"""Of checkpoints that are written now."""
FIRST = "sha256"
"""Of manifests that don't name theirs."""


_DIRECT = 4 << 20
"""Bytes of one read past the cache."""


class Hasher(Protocol):
    """A hash that is still being computed."""

    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


def hasher(algorithm: str = ALGORITHM) -> Hasher:
    """A hash of nothing yet. Both kinds let other threads run while they read a large piece."""
    return _KNOWN[algorithm]()


def hash_of(file: BufferedIOBase, algorithm: str = ALGORITHM) -> str:
    """The hash of a file that was opened for reading, from its beginning to its end."""
    return hashlib.file_digest(file, cast("Callable[[], hashlib._Hash]", _KNOWN[algorithm])).hexdigest()


def hash_on_disk(path: Path, algorithm: str = ALGORITHM) -> str | None:
    """The hash of a file that was flushed, read past the system's cache; None where the system can't do that."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None  # such as a file system in memory
    found, left = hasher(algorithm), os.fstat(handle).st_size
    try:
        with mmap.mmap(-1, _DIRECT) as pages, memoryview(pages) as buffer:  # as aligned as such a read asks for
            while left and (got := os.readv(handle, [buffer])):
                found.update(buffer[:got])
                left -= got
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
    finally:
        os.close(handle)
    return found.hexdigest()


def is_hash(algorithm: object) -> bool:
    """Return True if this algorithm can be used to compare files."""
    return isinstance(algorithm, str) and algorithm in _KNOWN


def hash_names() -> str:
    """All algorithms, for messages."""
    return ", ".join(_KNOWN)


def _xxh3_128() -> Hasher:
    import xxhash  # a listing does without

    return xxhash.xxh3_128()


_KNOWN: Mapping[str, Callable[[], Hasher]] = {FIRST: hashlib.sha256, ALGORITHM: _xxh3_128}
