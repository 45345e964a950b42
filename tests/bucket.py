"""An object store of the tests' own: a flat folder of objects, without folders and without rename, that may fail."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch
from urllib.parse import quote, unquote

import fsspec
from fsspec import AbstractFileSystem

from forge_train_kit.stores import remote


class Bucket(AbstractFileSystem):
    """Keeps each object as one file, whose name is its quoted key. A `put` may be seen half done."""

    protocol = "bucket"
    cachable = False
    folder: ClassVar[Path]
    call: ClassVar[Callable[[str], None]] = staticmethod(lambda what: None)
    """Is called with what is done and with which key, before each call, in the middle of what writes, and after it."""

    def _file(self, path: str) -> Path:
        return self.folder / quote(self._strip_protocol(path), safe="")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        type(self).call(f"ls {path}")
        sizes = {unquote(file.name): file.stat().st_size for file in self.folder.iterdir()}
        found: dict[str, dict[str, Any]] = {}
        for key, size in sizes.items():
            if key == path:
                found[key] = {"name": key, "size": size, "type": "file"}
            elif key.startswith(f"{path}/"):
                name, below, _rest = key[len(path) + 1 :].partition("/")
                kind = "directory" if below else "file"
                found[name] = {"name": f"{path}/{name}", "size": 0 if below else size, "type": kind}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else [one["name"] for one in found.values()]

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        type(self).call(f"cat {path}")
        return self._file(path).read_bytes()[start:end]

    def get_file(self, rpath: str, lpath: Any, **_: Any) -> None:
        type(self).call(f"get {rpath}")
        shutil.copyfile(self._file(rpath), lpath)
        type(self).call(f"got {rpath}")

    def put_file(self, lpath: Any, rpath: str, **_: Any) -> None:
        type(self).call(f"put {rpath}")
        content = Path(lpath).read_bytes()
        self._file(rpath).write_bytes(content[: len(content) // 2])
        type(self).call(f"half {rpath}")
        self._file(rpath).write_bytes(content)
        type(self).call(f"done {rpath}")

    def rm_file(self, path: str) -> None:
        type(self).call(f"rm {path}")
        self._file(path).unlink()
        type(self).call(f"gone {path}")


@contextmanager
def bucket(folder: Path, call: Callable[[str], None] = lambda what: None) -> Iterator[Path]:
    """`bucket://` for as long as this lasts, with its objects in a folder, and no pauses between two tries."""
    folder.mkdir(exist_ok=True)
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    with (
        patch.object(Bucket, "folder", folder, create=True),
        patch.object(Bucket, "call", staticmethod(call)),
        patch.object(remote, "_PAUSE", 0.0),
        patch.object(os, "fsync", lambda handle: None),  # which the disk of the tests takes long for
    ):
        yield folder


def keys(folder: Path) -> list[str]:
    """What the objects in a store are called."""
    return sorted(unquote(file.name) for file in folder.iterdir())
