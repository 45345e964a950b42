"""A folder behind an address that fsspec knows, or on this machine: single calls, each tried again where it fails."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from forge_train.base.errors import ConfigError
from forge_train.checkpoint.seal import sync

from .remote import filesystem, patiently

_DEEPEST = 8
"""Folders inside each other that are looked into."""


class RemoteFolder:
    """Files by their names relative to a folder. Errors name the address."""

    def __init__(self, address: str) -> None:
        """Nothing is read or written yet.

        Raises:
            ConfigError: fsspec does not know the scheme, or its package is not installed.
        """
        from fsspec.implementations.local import LocalFileSystem
        from fsspec.implementations.memory import MemoryFileSystem

        self.address = address.rstrip("/")
        self._system, self._root = filesystem(self.address, self.address)
        self.local = Path(self._root) if isinstance(self._system, LocalFileSystem) else None
        """The folder itself, if it is on this machine."""
        beneath = self._system
        while hasattr(beneath, "fs"):  # of a chained address, such as simplecache::memory://x
            beneath = beneath.fs
        self.lasts = not isinstance(beneath, MemoryFileSystem)
        """True if files stored here outlive this process."""

    def at(self, name: str) -> str:
        """The address of a file or folder."""
        return f"{self.address}/{name}" if name else self.address

    def entries(self, folder: str = "") -> list[tuple[str, int | None]]:
        """Names in a folder, with the bytes of files and None for folders; empty where there is no such folder."""
        path = self._path(folder)

        def look() -> list[dict[str, Any]]:
            self._system.invalidate_cache()
            try:
                found: list[dict[str, Any]] = self._system.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            return found

        entries = patiently(self.at(folder), look)
        return [
            (
                entry["name"].rstrip("/").rpartition("/")[2],
                None if entry["type"] == "directory" else int(entry["size"] or 0),
            )
            for entry in entries
            if entry["name"].strip("/") != path.strip("/")  # some stores have an object for the folder itself
        ]

    def files(self, folder: str, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Every file in a folder and those below, by its name relative to it, with its bytes."""
        for name, size in self.entries(f"{folder}/{prefix}".rstrip("/")):
            if size is not None:
                yield f"{prefix}{name}", size
            elif prefix.count("/") < _DEEPEST:
                yield from self.files(folder, f"{prefix}{name}/")

    def read(self, name: str) -> bytes:
        """A small file."""
        found: bytes = patiently(self.at(name), lambda: self._system.cat_file(self._path(name)))
        return found

    def get(self, name: str, target: Path) -> None:
        """Copy a file from here."""
        patiently(self.at(name), lambda: self._system.get_file(self._path(name), str(target)))

    def put(self, source: Path, name: str) -> None:
        """Copy a file to here. On this machine it is flushed before it gets its name."""
        path = self._path(name)
        send = partial(_copy, source, Path(path)) if self.local else partial(self._system.put_file, str(source), path)
        patiently(self.at(name), send, "can't be written")

    def remove(self, name: str, *, recursive: bool = False) -> None:
        """Remove a file, or a folder with all that is in it; it may be gone already."""
        try:
            rm = partial(self._system.rm, self._path(name), recursive=recursive)
            patiently(self.at(name), rm, "can't be removed")
        except ConfigError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.partial")
    shutil.copyfile(source, part)
    sync(part)
    part.replace(target)
    sync(target.parent)
