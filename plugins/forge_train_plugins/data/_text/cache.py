"""Folders that are built once and shared by all processes: whole or absent, and rebuilt when damaged."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_train import ConfigError

_META = "meta.json"


def folder(configured: str) -> Path:
    """The cache's folder: as configured, else `$XDG_CACHE_HOME/forge-train/text`, else `~/.cache/forge-train/text`."""
    if configured:
        return Path(configured).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "forge-train" / "text"


def obtain(target: Path, build: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
    """Have `target` hold what `build` puts into a folder, and give the description that `build` returned.

    Of several processes one builds and the others wait; without file locks each builds, and the first to rename wins.
    A folder with files missing, cut short or altered is built anew; processes that have it mapped keep the old one.

    Raises:
        ConfigError: the folder can't be written.
    """
    if (meta := whole(target)) is not None:
        return meta
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(f"{target.name}.lock")) as alone:
            if (meta := whole(target)) is not None:
                return meta
            return _build(target, build, alone)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"text.cache: {target.parent} can't be written ({reason}); choose another folder.") from error


def remember(path: Path, text: str) -> None:
    """Write a small file, whole or not at all; failing is harmless, as everything in it can be found out again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".tmp-", delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)


def recall(path: Path) -> str | None:
    """Read back what `remember` wrote, if anything."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _build(target: Path, build: Callable[[Path], Mapping[str, Any]], alone: bool) -> dict[str, Any]:
    if alone:
        for left_over in target.parent.glob(f"{target.name}.tmp-*"):  # of a process that was killed
            shutil.rmtree(left_over, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f"{target.name}.tmp-", dir=target.parent))
    try:
        meta = dict(build(made))
        files = {path.name: _stamp(path) for path in sorted(made.iterdir())}
        (made / _META).write_text(json.dumps({"meta": meta, "files": files}))
        for path in made.iterdir():
            _sync(path)
        if target.exists() and whole(target) is None:
            target.rename(made / "damaged")
        try:
            made.rename(target)
        except OSError:
            if whole(target) is None:  # else another process was faster, which only happens without locks
                raise
        shutil.rmtree(target / "damaged", ignore_errors=True)
        return meta
    finally:
        shutil.rmtree(made, ignore_errors=True)


def whole(target: Path) -> dict[str, Any] | None:
    """The folder's description if all its files are as they were written.

    Size and modification time vouch for a file, so that opening takes the same short time at every size; where the time
    differs (a copied cache, an altered file) the content is compared.
    """
    try:
        record = json.loads((target / _META).read_text())
        meta: dict[str, Any] = record["meta"]
        for name, (size, modified, digest) in record["files"].items():
            state = (target / name).stat()
            if state.st_size != size or (state.st_mtime_ns != modified and _digest(target / name) != digest):
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return meta


def _stamp(path: Path) -> tuple[int, int, str]:
    state = path.stat()
    return state.st_size, state.st_mtime_ns, _digest(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Wait until no other process holds the lock; gives False where the file system has no locks."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True
