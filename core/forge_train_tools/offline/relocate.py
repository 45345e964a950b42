"""Moves and copies checkpoints, even to another file system or an address. A moved checkpoint is verified, copied,
verified again, and only then removed."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from forge_train.base.errors import ConfigError, ForgeError
from forge_train.base.files import check_new
from forge_train.checkpoint import checkpoint, seal
from forge_train.checkpoint.found import name_latest
from forge_train.run.run import is_checkpoint, is_run
from forge_train.store import manifest
from forge_train_kit import foreign
from forge_train_kit.lock import Lock, take
from forge_train_kit.new_folder import claimed
from forge_train_kit.stores.addresses import is_remote
from forge_train_kit.stores.fetching import locate
from forge_train_kit.stores.remote_folder import RemoteFolder
from forge_train_kit.stores.store import Store


def move(path: Path, new: Path) -> None:
    """Move a checkpoint.

    Args:
        path: the checkpoint, which must be whole.
        new: its new path, which must not exist yet.

    Raises:
        ConfigError: if that is impossible; the checkpoint then stays where it is.
        ForgeError: if the disk reports an error; likewise.
    """
    path = path.resolve()  # not a link to it
    if foreign.resolve(path) != path:
        raise ConfigError(f"{path} is a run, and may have several checkpoints; name one of them.")
    if os.path.lexists(new):
        raise ConfigError(f"{new} exists; name a new folder.")
    if new.absolute().is_relative_to(path.absolute()):
        raise ConfigError(f"{new} is inside the checkpoint itself; name a folder elsewhere.")
    step = checkpoint.read_state(path).get("step")
    if (named := manifest.NAME.match(new.name)) and int(named[1]) != step:
        raise ConfigError(f"{new} names another step: this checkpoint is from step {step}.")
    run = path.absolute().parent.parent
    lock = _lock(run, path) if is_run(run) else None
    try:
        with claimed(new):
            _move(path, new)
        if lock is not None:
            name_latest(run / "checkpoints", checkpoint.newest(run / "checkpoints"))
    except OSError as error:
        raise ForgeError(f"{new}: can't be written: {error.strerror or error}. {path} is unchanged.") from error
    finally:
        if lock is not None:
            lock.release()


def copy(path: str, new: str) -> None:
    """Copy a checkpoint, or a run's newest whole one.

    Args:
        path: a path or an address.
        new: the path of the copy, which must not exist yet.

    Raises:
        ConfigError: if that is impossible.
        ForgeError: if the disk or the store reports an error.
    """
    place = locate(path)
    stored, there = place.one(), new.rstrip("/")
    if dict(RemoteFolder(there).entries()) or (not is_remote(new) and os.path.lexists(new)):
        raise ConfigError(f"{new} exists; name a new folder.")
    parent, _, name = there.rpartition("/")
    if (named := manifest.NAME.match(name)) and stored.step not in (-1, int(named[1])):
        raise ConfigError(f"{new} names another step: this checkpoint is from step {stored.step}.")
    if not is_remote(new):
        place.store.fetch(stored, Path(new), replace=False)
        return
    with tempfile.TemporaryDirectory(prefix="forge-") as folder:
        here = place.store.fetch(stored, Path(folder) / stored.name) if is_remote(path) else foreign.resolve(Path(path))
        Store(parent).put(here, name)


def _lock(run: Path, path: Path) -> Lock | None:
    """The run's lock; None if a process trains it and has a newer whole checkpoint to continue from."""
    try:
        return take(run)
    except ConfigError as busy:
        newest = checkpoint.newest(run / "checkpoints")
        if newest is None or newest.path.name == path.name or not is_checkpoint(path):
            raise ConfigError(f"{busy}\n{path} is its newest whole checkpoint, which it may need.") from busy
        return None


def _move(path: Path, new: Path) -> None:
    try:
        path.rename(new)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy(path, new)
        gone = path.with_name(f".{path.name}.removed")
        path.rename(gone)  # so that nobody sees a half-removed checkpoint
        shutil.rmtree(gone, ignore_errors=True)
    for folder in (path.absolute().parent, new.absolute().parent):
        seal.sync(folder)


def _copy(path: Path, new: Path) -> None:
    """A verified copy, which appears complete or not at all."""
    part = new.with_name(f".{new.name}.partial")
    shutil.rmtree(part, ignore_errors=True)
    try:
        shutil.copytree(path, part, symlinks=True)  # a link is moved, as by a rename, and not followed
        for one in sorted(part.rglob("*")):
            seal.sync(one)
        seal.sync(part)
        if problem := seal.check(part, contents=True):
            raise ForgeError(f"{new}: the copy can't be read back: {problem}. {path} is unchanged.")
        check_new(new)  # another program may have made it meanwhile
        part.rename(new)
    finally:
        shutil.rmtree(part, ignore_errors=True)
