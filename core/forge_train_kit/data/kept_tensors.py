"""Tensors on disk that can be computed again: by a key, up to a number of bytes, for all processes of a machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_SIZE = ".kept-tensors"
"""A file with the bytes that a folder's collections take; it is the lock of those who write."""
_SUFFIX = ".tensors"
"""Of the folder of a collection: nothing else is looked at or removed, whatever folder somebody has chosen."""
_STALE = 3600.0
"""Seconds after which nobody is writing a file any more."""


class KeptTensors:
    """A collection of tensors, one of several in a folder.

    Each is a safetensors file that has its name only once it is whole, so that processes may read and write at once,
    and be killed. One whose content does not fit its checksum is none. A folder that can't be written keeps nothing.

    Args:
        folder: of all collections.
        name: what a key's value depends on beside the key, such as a hash of weights.
        most: bytes that all collections may take. Beyond, the least recently opened others are removed, and then
            nothing more is kept.
    """

    def __init__(self, folder: Path, name: str, most: int) -> None:
        self._folder, self._own, self._most = folder, folder / f"{name}{_SUFFIX}", most
        self.full = False
        """True once something was not kept for lack of room."""
        with contextlib.suppress(OSError):
            self._own.mkdir(parents=True, exist_ok=True)
            os.utime(self._own)

    def get(self, key: str) -> Tensor | None:
        """The tensor of a key, on the CPU; None if there is none."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._path(key), framework="pt") as file:
                found: Tensor = file.get_tensor("")
                return found if (file.metadata() or {}).get("crc32") == _checksum(found) else None
        except (OSError, SafetensorError):
            return None

    def put(self, key: str, tensor: Tensor) -> None:
        """Keep a tensor that lies on the CPU, if there is room."""
        from safetensors.torch import save

        if self.full:
            return
        tensor = tensor.detach().contiguous()
        content = save({"": tensor}, metadata={"crc32": _checksum(tensor)})
        path = self._path(key)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        with contextlib.suppress(OSError), self._counted() as counted:
            path.parent.mkdir(parents=True, exist_ok=True)
            before = path.stat().st_size if path.exists() else 0
            if not self._reserve(len(content) - before, counted):
                return
            try:
                part.write_bytes(content)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._own / key[:2] / f"{key}.safetensors"

    def _reserve(self, size: int, counted: _Counted) -> bool:
        """Count bytes that are about to be written; False if there is no room for them."""
        taken = counted.read()
        if taken + size > self._most:
            taken = self._swept(size)
        self.full = taken + size > self._most
        counted.write(taken if self.full else taken + size)
        return not self.full

    def _swept(self, size: int) -> int:
        """Remove other collections until there is room; the bytes that are left."""
        sizes = {one: _size(one) for one in self._folder.glob(f"*{_SUFFIX}")}
        others = sorted((one for one in sizes if one != self._own), key=lambda one: one.stat().st_mtime)
        for one in others:
            if sum(sizes.values()) + size <= self._most:
                break
            shutil.rmtree(one, ignore_errors=True)
            sizes.pop(one)
        return sum(sizes.values())

    @contextlib.contextmanager
    def _counted(self) -> Iterator[_Counted]:
        """The bytes that are taken. One process at a time has them, as long as it writes."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / _SIZE).open("a+", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield _Counted(file.fileno())


class _Counted:
    """The number in an open file."""

    def __init__(self, file: int) -> None:
        self._file = file

    def read(self) -> int:
        with contextlib.suppress(ValueError):
            return int(os.pread(self._file, 32, 0) or b"0")
        return 0

    def write(self, size: int) -> None:
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, b"%d" % size, 0)


def _size(folder: Path) -> int:
    """Bytes of the files in a folder. What a killed process was writing is removed."""
    found = 0
    for inside, _, names in os.walk(folder):
        for path in (Path(inside) / name for name in names):
            with contextlib.suppress(OSError):  # it has just got its own name
                about = path.stat()
                if path.suffix == ".part" and time.time() - about.st_mtime > _STALE:
                    path.unlink()
                else:
                    found += about.st_size
    return found


def _checksum(tensor: Tensor) -> str:
    import torch

    return str(zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data))
