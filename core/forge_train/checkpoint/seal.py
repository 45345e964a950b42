"""A checkpoint's manifest: size and hash of every sealed file, written once and verified before each use."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ..base.files import write_json
from ..mesh.distributed import DistributedContext
from ..mesh.layout import Layout
from ..mesh.world import cores
from ..store.manifest import ALGORITHM, FORMAT, MANIFEST, Sealed, hash_of, hash_on_disk, inspect

ALONE = DistributedContext(Layout(), torch.device("cpu"))
"""This process by itself."""
_Signature = tuple[tuple[str, int, int, int], ...]


def check(path: Path, *, contents: bool = False) -> str:
    """Describe what is wrong with a checkpoint, in a phrase; empty if nothing is.

    Args:
        path: the checkpoint.
        contents: whether to read every file and compare hashes, not only sizes.
    """
    sealed = inspect(path)
    if isinstance(sealed, str):
        return sealed
    return _compare(path, sealed, ALONE) if contents else ""


def verify(path: Path, dist: DistributedContext = ALONE, *, from_disk: bool = False) -> str:
    """Like `check` with contents, by all processes together: each reads a share of the files, and all have the answer.

    A checkpoint that this run wrote or verified before is not read again unless one of its files changed since.

    Args:
        path: the checkpoint.
        dist: all processes.
        from_disk: have files that were just written read from the disk, and not from memory, where the system can.
    """
    sealed = dist.on_main(lambda: _unverified(path))
    if isinstance(sealed, str):
        return sealed
    problem = _compare(path, sealed, dist, from_disk=from_disk)
    if not problem and dist.main:
        _verified[path.absolute()] = _signature(path)
    return problem


def seal(
    path: Path,
    step: int,
    dist: DistributedContext,
    *,
    editable: Sequence[str] = (),
    known: Mapping[str, str] | None = None,
) -> int:
    """Flush every file to disk and write the manifest; the bytes of all files.

    Args:
        path: the checkpoint.
        step: the optimizer step it is of.
        dist: each process reads a share of the files.
        editable: files that are meant to be edited: they have to be there, and are not sealed.
        known: hashes of files that were flushed when they were written; on rank 0.

    Raises:
        OSError: on every process, if the disk refuses.
    """
    sizes, known = dist.on_main(
        lambda: ({str(file.relative_to(path)): file.stat().st_size for file in _files(path)}, dict(known or {}))
    )
    found = _hashes(path, {name: sizes[name] for name in sizes if name not in known}, dist, flush=True) | known
    if refusal := next((one for one in found.values() if isinstance(one, OSError)), None):
        raise refusal
    held = [name for name in sorted(sizes) if name not in editable]
    entries = {name: {"bytes": sizes[name], ALGORITHM: found[name]} for name in held}

    def write() -> None:
        listed = {"format": FORMAT, "hash": ALGORITHM, "step": step, "files": entries}
        write_json(path / MANIFEST, {**listed, "editable": list(editable)} if editable else listed)
        for folder in {file.parent for file in _files(path)}:
            sync(folder)

    dist.on_main(write)
    return sum(sizes.values())


def sync(folder: Path) -> None:
    """Have a folder's entries on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def moved(old: Path, new: Path) -> None:
    """Go on trusting a verified checkpoint under its new name."""
    if (signature := _verified.pop(old.absolute(), None)) is not None:
        _verified[new.absolute()] = signature


# -- which files ------------------------------------------------------------------------------------------------------


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def _compare(path: Path, sealed: Sealed, dist: DistributedContext, *, from_disk: bool = False) -> str:
    sizes = {name: entry.bytes for name, entry in sealed.files.items()}
    found = _hashes(path, sizes, dist, algorithm=sealed.algorithm, from_disk=from_disk)
    for name, entry in sealed.files.items():
        if isinstance(one := found[name], OSError):
            return f"{name} can't be read: {one.strerror or one}"
        if one != entry.hash:
            return f"{name} has other contents than were saved"
    return ""


# -- what was verified before -----------------------------------------------------------------------------------------

_verified: dict[Path, _Signature] = {}
"""Checkpoints that this process wrote or verified, as their files were then."""


def _unverified(path: Path) -> Sealed | str:
    """Return the files that must still be read, or what is already wrong; empty for a verified checkpoint."""
    sealed = inspect(path)
    if isinstance(sealed, str):
        return sealed
    return "" if _verified.get(path.absolute()) == _signature(path) else sealed


def _signature(path: Path) -> _Signature:
    found = ((str(file.relative_to(path)), file.stat()) for file in _files(path))
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found)


# -- reading ----------------------------------------------------------------------------------------------------------


def _hashes(
    path: Path,
    sizes: Mapping[str, int],
    dist: DistributedContext,
    *,
    algorithm: str = ALGORITHM,
    flush: bool = False,
    from_disk: bool = False,
) -> dict[str, str | OSError]:
    """Each file's hash, or why there is none. Files are spread over processes, and there over threads."""
    ordered = sorted(sizes, key=lambda name: (-sizes[name], name))
    mine = ordered[dist.rank :: dist.world]

    def read(name: str) -> str | OSError:
        try:
            if from_disk and (found := hash_on_disk(path / name, algorithm)) is not None:
                return found
            with (path / name).open("rb") as data:
                if flush:
                    os.fsync(data.fileno())
                if from_disk and hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                return hash_of(data, algorithm)
        except OSError as error:
            return error

    with ThreadPoolExecutor(max(min(cores() // dist.place.local_size, len(mine)), 1)) as pool:
        found = dict(zip(mine, pool.map(read, mine), strict=True))
    return {name: digest for one in dist.gather_objects(found) for name, digest in one.items()}
