"""Checkpoints at an address that fsspec knows, or in another folder.

An object store has no rename. The manifest is written last and removed first, so that a checkpoint without one, or with
a part of one, is invisible.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from forge_train.base.errors import ConfigError, ForgeError
from forge_train.base.files import check_new, put
from forge_train.base.format import format_bytes
from forge_train.base.strict_json import parse_json
from forge_train.checkpoint.found import is_kept
from forge_train.checkpoint.seal import moved, sync, verify
from forge_train.store.manifest import LARGEST, MANIFEST, NAME, Sealed, inspect, listed, way_out, wrong_size

from ..new_folder import alone, claimed
from .remote_folder import RemoteFolder

log = logging.getLogger("forge_train")

THREADS = 8
"""Files that are sent or fetched at once."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint in a store: it has a manifest."""

    name: str
    step: int
    """-1 where the name does not tell."""
    files: Mapping[str, int]
    """Every file, with its bytes."""

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


class Store:
    """A folder of checkpoints, anywhere."""

    def __init__(self, address: str, key: str = "") -> None:
        """Nothing is read or written yet.

        Args:
            address: of the folder.
            key: of the configuration that names it.

        Raises:
            ConfigError: fsspec does not know the scheme, or its package is not installed.
        """
        self._folder = RemoteFolder(address)
        self.address, self.local, self.key = self._folder.address, self._folder.local, key
        self.lasts = self._folder.lasts

    @classmethod
    def of_run(cls, address: str, run: str, key: str = "") -> Store:
        """Return the store of a run's checkpoints under an address."""
        return cls(f"{address.rstrip('/')}/{run}/checkpoints", key)

    def at(self, name: str) -> str:
        """The address of a checkpoint."""
        return f"{self.address}/{name}"

    # -- what is there ------------------------------------------------------------------------------------------------

    def found(self) -> list[Stored]:
        """The checkpoints that have a manifest, newest first.

        Raises:
            ConfigError: if the store can't be read.
        """
        named = [(name, NAME.match(name)) for name, size in self._folder.entries() if size is None]
        steps = sorted(((int(match[1]), name) for name, match in named if match), reverse=True)
        stored = [Stored(name, step, dict(self._folder.files(name))) for step, name in steps]
        return [one for one in stored if MANIFEST in one.files]

    def one(self, name: str) -> Stored | None:
        """One checkpoint, whatever its name; None where there is none."""
        match, files = NAME.match(name), dict(self._folder.files(name))
        return Stored(name, int(match[1]) if match else -1, files) if MANIFEST in files else None

    def newest(self, *, after: int = -1, before: int = sys.maxsize) -> Iterator[Stored]:
        """Whole checkpoints of steps between these two, newest first; those that are not whole are named in a warning.

        Raises:
            ConfigError: for one of a newer format, or if the store can't be read.
        """
        for stored in self.found():
            if not after < stored.step < before:
                continue
            if not (problem := self.check(stored)):
                yield stored
            elif way_out(problem, stored.name):
                raise self._unusable(stored, problem)
            else:
                log.warning("%s is not whole (%s), and is left out.", self.at(stored.name), problem)

    def check(self, stored: Stored) -> str:
        """Describe what is wrong with a checkpoint, in a phrase, judging by manifest and sizes; empty if nothing is."""
        sealed = self._sealed(stored)
        return sealed if isinstance(sealed, str) else ""

    def text(self, stored: Stored, name: str) -> bytes:
        """A small file of a checkpoint.

        Raises:
            ConfigError: if it is not there, or larger than such a file is.
        """
        where = self.at(f"{stored.name}/{name}")
        if stored.files.get(name, 0) > LARGEST[name]:
            raise ConfigError(f"{where}: has {stored.files[name]:,} bytes, and at most {LARGEST[name]:,} are read.")
        return self._folder.read(f"{stored.name}/{name}")

    # -- changing it --------------------------------------------------------------------------------------------------

    def has(self, checkpoint: Path) -> bool:
        """Return True if the store holds the same checkpoint, complete.

        Raises:
            ConfigError: if the store can't be read.
        """
        stored = self.one(checkpoint.name)
        return (
            stored is not None
            and not self.check(stored)
            and self.text(stored, MANIFEST) == (checkpoint / MANIFEST).read_bytes()
        )

    def put(self, checkpoint: Path, name: str = "") -> None:
        """Copy a whole checkpoint here; another one of its name goes before.

        Args:
            checkpoint: in a folder of this machine.
            name: what it is to be called here, if it is another name.

        Raises:
            ForgeError: if the store refuses. What was sent stays invisible.
        """
        sealed = inspect(checkpoint)
        if isinstance(sealed, str):
            raise ForgeError(f"{checkpoint}: not a whole checkpoint: {sealed}.")
        target = name or checkpoint.name
        with alone(self.local / target) if self.local else nullcontext():
            self._put(checkpoint, target, sealed)
        if self._folder.read(f"{target}/{MANIFEST}") != (checkpoint / MANIFEST).read_bytes():
            raise ForgeError(f"{self.at(target)}: another process wrote it at the same time. Name another place.")

    def _put(self, checkpoint: Path, target: str, sealed: Sealed) -> None:
        if self._folder.entries(target):
            self.remove(target)
        names = [*sealed.files, *sealed.editable]
        _all(names, lambda name: self._folder.put(checkpoint / name, f"{target}/{name}"))
        self._compare(checkpoint, target, names)
        self._folder.put(checkpoint / MANIFEST, f"{target}/{MANIFEST}")
        self._compare(checkpoint, target, [*names, MANIFEST])

    def fetch(self, stored: Stored, target: Path, *, replace: bool = True, shared: bool = False) -> Path:
        """Copy a checkpoint from here into a folder that appears whole or not at all; every file is verified.

        Args:
            stored: the checkpoint.
            target: the folder, which another process that fetches to it has to itself.
            replace: whether a folder that is there already (a damaged checkpoint, say) may go.
            shared: whether several processes want it there: the first fetches it, and the others wait.

        Raises:
            ConfigError: if it is damaged, the store can't be read, the disk has no room, or the target is in use.
        """
        try:
            with alone(target, wait=shared) if replace else claimed(target):
                return target if shared and not verify(target) else self._fetch(stored, target, replace=replace)
        except OSError as error:
            raise ConfigError(f"{target}: can't be written: {error.strerror or error}.") from error

    def _fetch(self, stored: Stored, target: Path, *, replace: bool) -> Path:
        """Fetch to a target that this process has to itself."""
        part = target.with_name(f".{target.name}.partial")
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir(parents=True)
            self.copy_into(part, stored)
            if problem := verify(part):
                raise self._unusable(stored, problem)
            for file in [*part.rglob("*"), part]:
                sync(file)
            if not replace:
                check_new(target)  # another program may have made it meanwhile
            gone = put(part, target)
            moved(part, target)
            sync(target.parent)
            shutil.rmtree(gone, ignore_errors=True)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return target

    def copy_into(self, folder: Path, stored: Stored) -> None:
        """Copy what a manifest lists into an empty folder, without a look at its contents.

        Raises:
            ConfigError: if the manifest is damaged, the store can't be read, or the disk has no room.
        """
        if (free := shutil.disk_usage(folder).free) < stored.bytes:
            raise ConfigError(
                f"{self.at(stored.name)} takes {format_bytes(stored.bytes)}; {folder} has {format_bytes(free)} left."
            )
        sealed = self._sealed(stored)
        if isinstance(sealed, str):
            raise self._unusable(stored, sealed)
        names = [*sealed.files, *sealed.editable, MANIFEST]
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        _all(names, lambda name: self._folder.get(f"{stored.name}/{name}", folder / name))

    def remove(self, name: str) -> None:
        """Remove a checkpoint, the manifest first.

        Raises:
            ForgeError: if the store refuses; without a manifest, what is left stays invisible.
        """
        self._folder.remove(f"{name}/{MANIFEST}")
        self._folder.remove(name, recursive=True)

    def prune(self, keep: int, keep_every: int, spared: Set[int]) -> Iterator[Stored]:
        """Remove what `checkpoint.writing.prune` would in a run's folder, and what is left of failed calls."""
        for name, size in self._folder.entries():
            if size is None and NAME.match(name) and MANIFEST not in dict(self._folder.files(name)):
                self.remove(name)
        for stored in self.unwanted(keep, keep_every, spared):
            self.remove(stored.name)
            yield stored

    def unwanted(self, keep: int, keep_every: int, spared: Set[int]) -> list[Stored]:
        """The checkpoints that `prune` removes."""
        found = self.found()
        kept = list(islice((stored for stored in found if not self.check(stored)), keep))
        if len(kept) < keep:
            return []
        return [
            stored for stored in found if stored.step < kept[-1].step and not is_kept(stored.step, keep_every, spared)
        ]

    def _sealed(self, stored: Stored) -> Sealed | str:
        """Return the entries of a manifest, or what is wrong, judging by sizes."""
        if stored.files[MANIFEST] > LARGEST[MANIFEST]:
            return f"{MANIFEST} has {stored.files[MANIFEST]:,} bytes, and at most {LARGEST[MANIFEST]:,} are read"
        sealed = listed(lambda: parse_json(self.text(stored, MANIFEST).decode()), Path(stored.name))
        if isinstance(sealed, str):
            return sealed
        for name in [*sealed.files, *sealed.editable]:
            if name not in stored.files:
                return f"{name} is missing"
            if problem := wrong_size(name, stored.files[name], sealed):
                return problem
        return sealed

    def _compare(self, checkpoint: Path, target: str, names: list[str]) -> None:
        """Check that files have arrived in full."""
        there = dict(self._folder.files(target))
        for name in names:
            if there.get(name) != (size := (checkpoint / name).stat().st_size):
                raise ForgeError(f"{self.at(target)}/{name} has {there.get(name, 0):,} bytes, not {size:,}.")

    def _unusable(self, stored: Stored, problem: str) -> ConfigError:
        if other := way_out(problem, self.at(stored.name)):
            return ConfigError(f"{self.at(stored.name)}: {problem}. {other}")
        return ConfigError(f"{self.at(stored.name)}: not a whole checkpoint: {problem}.")


def _all(names: list[str], action: Callable[[str], None]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(action, names))
