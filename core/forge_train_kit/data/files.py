"""Data files behind paths, patterns and addresses."""

from __future__ import annotations

import functools
import glob
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from forge_train import ConfigError
from forge_train.base.format import format_list

from ..stores.addresses import is_remote
from ..stores.remote import filesystem, patiently
from .file import PACKED, File
from .formats import kinds

__all__ = ["NEVER", "PACKED", "File", "find", "walk"]

NEVER = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
"""Folders in which nobody keeps data. Hidden ones are left out too."""

_OTHER = {
    **dict.fromkeys(("bz2", "xz", "zip", "tgz", "7z", "lz4"), "unpack it first, or pack it as .gz or .zst"),
    **dict.fromkeys(("feather", "orc", "avro", "sqlite", "db"), "convert it to .parquet or .jsonl"),
    **dict.fromkeys(
        ("npy", "npz", "bin", "h5", "hdf5", "tfrecord", "mds", "safetensors", "pt", "pth", "pkl"),
        "such files hold numbers, not records",
    ),
}
"""Data files that have no format here: they are refused, so that no run trains only on the files beside them."""
_ABOUT = re.compile(
    r"(readme|licen[cs]e|copying|notice|dataset_infos?)([._-].*)?|(state|dataset_dict)\.json", re.IGNORECASE
)
"""Names of files that are about a folder. They are data only if they are named."""


def find(entries: str | Sequence[str], *, key: str) -> list[File]:
    """The files behind some entries, each once, in an order that depends on their names only.

    Args:
        entries: files, folders, glob patterns; addresses that fsspec knows may be all of these too.
        key: the configuration key or argument they come from, for messages.

    Raises:
        ConfigError: an entry does not exist, can't be read, holds no data or data of several kinds.
    """
    found: dict[str, File] = {}
    for entry in [entries] if isinstance(entries, str) else entries:
        if not entry:
            raise ConfigError(f"{key}: one of the entries is empty")
        for file in _Entry(entry, key).files():
            if file.named or file.address not in found:
                found[file.address] = file
    return list(found.values())


def walk(root: Path, key: str, never: frozenset[str] = NEVER) -> Iterator[Path]:
    """The files below a folder in the order of their names, a folder's own files first; hidden ones left out.

    Raises:
        ConfigError: a folder can't be read.
    """

    def fail(error: OSError) -> None:
        raise ConfigError(f"{key}: {error.filename} can't be read: {error.strerror}")

    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = sorted(name for name in folders if name not in never and not name.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and (path := Path(folder, name)).is_file():
                yield path


class _Entry:
    """One entry, and what it stands for."""

    def __init__(self, entry: str, key: str) -> None:
        self._entry, self._key = entry, key
        self._label = f"{key}: {entry!r}"

    def files(self) -> list[File]:
        return self._remote() if is_remote(self._entry) else self._local()

    def _local(self) -> list[File]:
        path = Path(self._entry.removeprefix("file://")).expanduser().absolute()
        if path.is_dir():
            return self._folder(str(path), [str(file) for file in walk(path, self._key)])
        if path.exists():
            return [self._named(str(path))]
        if not any(sign in self._entry for sign in "*?["):
            raise ConfigError(f"{self._label}: no such file or folder (looked for {path})")
        return self._pattern(one for one in sorted(glob.glob(str(path), recursive=True)) if not Path(one).is_dir())

    def _remote(self) -> list[File]:
        system, path = filesystem(self._entry, self._label)
        signs = "*[" if self._entry.startswith("http") else "*?["
        if any(sign in path for sign in signs):
            matches: dict[str, Any] = patiently(self._label, lambda: system.glob(path, detail=True))
            names = [name for name, info in matches.items() if info["type"] != "directory"]
            return self._pattern(_ordered(system.unstrip_protocol(name) for name in names))
        page = self._entry.startswith("http") and self._entry.endswith("/")  # a server's list of a folder
        if not page and patiently(self._label, lambda: system.info(path))["type"] != "directory":
            return [self._named(self._entry)]
        root = str(system.unstrip_protocol(path)).rstrip("/")
        names = [system.unstrip_protocol(name) for name in patiently(self._label, lambda: system.find(path))]
        inside = [name for name in names if not _hidden(name.removeprefix(root))]
        return self._folder(root, _ordered(inside))

    def _pattern(self, matches: Iterable[str]) -> list[File]:
        files, about = _apart(matches)
        if not files + about:
            raise ConfigError(f"{self._label}: the pattern matches no file")
        if files:
            _tell_left_out(self._label, *about)
        return [self._named(file) for file in files or about]

    def _named(self, address: str) -> File:
        file = File(address, named=True, key=self._key)
        if file.local and not Path(address).is_file():
            raise ConfigError(f"{self._key}: {address} is not a regular file: data is read more than once")
        if file.local and not os.access(address, os.R_OK):
            raise ConfigError(f"{self._key}: {address} can't be read: permission denied")
        if advice := _OTHER.get(file.suffix):
            raise ConfigError(f"{self._key}: {address}: .{file.suffix} files are not read: {advice}.")
        return file

    def _folder(self, root: str, addresses: Sequence[str]) -> list[File]:
        """The data of a folder, if it is all of one kind."""
        splits = sorted({PurePosixPath(one).parent.name for one in addresses if one.endswith("/state.json")})
        if splits and f"{root}/dataset_dict.json" in addresses:
            names = ", ".join(map(repr, splits))
            raise ConfigError(f"{self._label} holds the splits {names}: name one, as in {self._inside(splits[0])!r}.")
        known = kinds()
        rest, about = _apart(addresses)
        every = [File(one, key=self._key) for one in rest]
        files = [file for file in every if file.suffix in known or file.suffix in _OTHER or file.packed]
        of = {known.get(file.suffix, _kind(file)) for file in files}
        if len(of) > 1:
            counts = Counter((file.suffix in known, _kind(file)) for file in files)
            most = max(counts, key=lambda one: (one[0], counts[one]))[1]
            raise ConfigError(
                f"{self._label} holds data of several kinds: {_counted(files)}. Name the files that you mean, as in "
                f"{self._key} = {self._inside('**', f'*{most}')!r}."
            )
        if files and files[0].suffix not in known:
            advice = _OTHER.get(files[0].suffix, "no format is known for it; name a file to read it as plain text")
            raise ConfigError(f"{self._label} holds {_counted(files)}, which is not read: {advice}.")
        if not files:
            has = f"; it has {_counted(File(one) for one in addresses)}" if addresses else ""
            named = f". {File(about[0]).name} is about the folder: name it if you mean it" if about else ""
            raise ConfigError(
                f"{self._label}: no file of a known kind in that folder (.{', .'.join(known)}){has}{named}"
            )
        _tell_left_out(self._label, *about)
        return files

    def _inside(self, *names: str) -> str:
        return "/".join([self._entry.rstrip("/"), *names])


def _hidden(below: str) -> bool:
    return any(part.startswith(".") or part in NEVER for part in below.split("/"))


def _ordered(addresses: Iterable[str]) -> list[str]:
    """As `walk` orders paths."""

    def order(address: str) -> list[tuple[bool, str]]:
        *folders, name = address.split("/")
        return [*((True, one) for one in folders), (False, name)]

    return sorted(addresses, key=order)


def _apart(addresses: Iterable[str]) -> tuple[list[str], list[str]]:
    """Files, and those that are about their folder."""
    sides: tuple[list[str], list[str]] = ([], [])
    for address in addresses:
        sides[bool(_ABOUT.fullmatch(File(address).name))].append(address)
    return sides


@functools.cache
def _tell_left_out(label: str, *addresses: str) -> None:
    if addresses:
        names = ", ".join(sorted({File(one).name for one in addresses}))
        logging.getLogger("forge_train").info("%s: left out %s. Name a file to read it.", label, names)


def _kind(file: File) -> str:
    """Return a file's kind for a list of kinds: `.jsonl.gz`, or its name if it has no suffix."""
    return "".join(f".{one}" for one in (file.suffix, file.packed) if one) or file.name


def _counted(files: Iterable[File]) -> str:
    """Count the files of each kind: `3 .parquet, 1 .md`."""
    counts = Counter(_kind(file) for file in files).most_common()
    return format_list((f"{number:,} {kind}" for kind, number in counts), 6)
