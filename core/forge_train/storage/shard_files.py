"""The files that shards are written to, by torch.distributed.checkpoint's writer (torch 2.13)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta

from . import digest


class Writer(FileSystemWriter):
    """The refusal is found on its own rank: an exception that goes to another loses what caused it."""

    def __init__(self, folder: Path, *, single_file_per_rank: bool = True) -> None:
        # Nothing is copied ahead: torch's loader (2.13) waits for a stream of the thread's current device, which is
        # device 0 in a new thread. A shard on another device would be written, and hashed, before it has arrived.
        super().__init__(folder, single_file_per_rank=single_file_per_rank, per_thread_copy_ahead=0)
        self.fs: _Files = _Files()

    def write_data(self, *arguments: Any, **options: Any) -> Any:
        with _refusal_first():
            return super().write_data(*arguments, **options)

    def finish(self, *arguments: Any, **options: Any) -> None:
        with _refusal_first():
            super().finish(*arguments, **options)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # no path: a checkpoint may be moved


class _Files(FileSystem):
    """Files whose contents are hashed on their way to the disk."""

    def __init__(self) -> None:
        self.hashes: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            hashed = _Hashed(stream)
            yield hashed
        if (name := Path(path).name).endswith(".distcp"):
            self.hashes[name] = hashed.digest()


class _Hashed:
    """A file that is written from its beginning to its end."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._hash = stream, digest.hasher()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        written: int = self._stream.write(data)
        return written

    def digest(self) -> str:
        return self._hash.hexdigest()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _refusal_first() -> Iterator[None]:
    """Raise the disk's refusal behind an error: torch's zip writer raises another one while it handles that."""
    try:
        yield
    except Exception as error:
        refusal = _refusal(error)
        if refusal is None:
            raise
        raise OSError(refusal.errno, refusal.strerror) from error


def _refusal(error: BaseException) -> OSError | None:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, OSError):
            return one
        waiting += [one.__cause__, one.__context__]
    return None
