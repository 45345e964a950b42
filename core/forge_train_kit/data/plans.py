"""Packing plans of large corpora in the user's cache: best fit takes a minute for ten million documents.

A plan is a file named by a hash of what it was made of. bytes 0…1023: a JSON object (`_header`), then spaces; then the
arrays of `Pieces`, each of the narrowest dtype that holds it, from a multiple of 8.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cache import cache_folder
from .documents import Documents
from .rows import Pieces, layout

VERSION = 1
"""Of the file, and of the way in which documents are packed."""
LEAST = 1 << 18
"""Documents from which on a plan is kept: fewer are packed in about a second."""
_START = 1024


def planned(documents: Documents, options: str, make: Callable[[], Pieces]) -> Pieces:
    """Return the result of `make`, possibly from an earlier start, or from another rank, which this one waits for.

    A file that is damaged or of other documents is replaced. Without a writable folder, nothing is kept.

    Args:
        documents: the documents to pack.
        options: everything else that determines the plan.
        make: packs them.
    """
    if documents.count < LEAST:
        return make()
    made_of = hashlib.blake2b(f"{VERSION} {documents.digest} {options} ".encode(), digest_size=16)
    for shard in documents.shards:
        made_of.update(np.ascontiguousarray(shard.ends).data)
    key = made_of.hexdigest()
    path = cache_folder("", "packing") / f"{key}.plan"
    with _alone(path):
        if (kept := _read(path, key)) is not None:
            return kept
        made = make()
        with contextlib.suppress(OSError):
            _write(path, key, made, layout(documents, made))
            return _read(path, key) or made
    return made


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds a lock beside the plan, so that one process makes it and the others read it."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_suffix(".lock").open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(path: Path, key: str) -> Pieces | None:
    """A plan, mapped; None where there is none, or not the right one."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(_START))
            if header["key"] != key or header["content"] != hashlib.file_digest(file, _digest).hexdigest():
                return None
        arrays: dict[str, NDArray[Any]] = {}
        at = _START
        for name, (dtype, count) in header["arrays"].items():
            arrays[name] = np.asarray(np.memmap(path, dtype, mode="r", offset=at, shape=(count,)))
            at += -(-arrays[name].nbytes // 8) * 8
        return Pieces(**arrays, digest=header["layout"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, key: str, pieces: Pieces, digest: str) -> None:
    """Write a plan, whole or not at all."""
    part = path.with_suffix(f".{os.getpid()}.part")
    arrays = {name: _narrow(getattr(pieces, name)) for name in ("document", "start", "length", "row_ends")}
    try:
        with part.open("w+b") as file:
            file.seek(_START)
            for one in arrays.values():
                file.write(one.data)
                file.write(b"\0" * (-one.nbytes % 8))
            file.seek(_START)
            header = {
                "key": key,
                "layout": digest,
                "arrays": {name: [one.dtype.str, len(one)] for name, one in arrays.items()},
                "content": hashlib.file_digest(file, _digest).hexdigest(),
            }
            file.seek(0)
            file.write(json.dumps(header).encode().ljust(_START))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _narrow(values: NDArray[Any]) -> NDArray[Any]:
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))


def _digest() -> Any:
    return hashlib.blake2b(digest_size=16)
