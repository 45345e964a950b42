"""A run's checkpoints elsewhere: sent while training continues, and brought back.

`checkpoint.folder` and `checkpoint.mirror` are filled alike. A checkpoint is always written in the run's folder first;
what a store refuses stays there, and is sent with the next one.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_train.base.errors import ConfigError, ForgeError, describe
from forge_train.base.strict_json import loads
from forge_train.checkpoint.found import Saved, found, is_kept, note_roll_back, noted_roll_back
from forge_train.checkpoint.seal import ALONE, check
from forge_train.config import Config
from forge_train.store.manifest import STATE

from ..background import Background
from .elsewhere import CheckpointCopies
from .store import Store, Stored

log = logging.getLogger("forge_train")


class AwayError(ForgeError):
    """A store that a run depends on can't be read."""

    type = "checkpoint"

    @classmethod
    def of(cls, store: Store, error: ConfigError) -> AwayError:
        told = (
            f"{store.key}: {str(error).rstrip('.')}. The run may have checkpoints there. Try again once it can be read"
        )
        return cls(f"{told}; a new run without --name does not depend on it.", key=store.key)


def stores(config: Config, run: Path) -> list[Store]:
    """Return the destinations of a run's checkpoints: its `checkpoint.folder`, then its `checkpoint.mirror`.

    Args:
        config: the run's.
        run: its folder.

    Raises:
        ConfigError: if a destination is used twice, is lost with the process, or can't be reached by any known
            protocol.
    """
    taken: dict[Path | str, str] = {(run / "checkpoints").resolve(): "the run's own folder"}
    made: list[Store] = []
    for key in ("folder", "mirror"):
        if not (address := getattr(config.checkpoint, key)):
            continue
        try:
            store = Store.of_run(address, run.name, f"checkpoint.{key}")
        except ConfigError as error:
            raise ConfigError(f"checkpoint.{key}: {error}") from error
        if not store.lasts:
            raise ConfigError(
                f"checkpoint.{key}: {address} is in the memory of this process, and would be lost with it; "
                "name a folder or a persistent store."
            )
        place = store.local.resolve() if store.local else store.address
        if place in taken:
            raise ConfigError(f"checkpoint.{key}: {address} is {taken[place]} already; name another place.")
        taken[place] = "checkpoint.folder"
        made.append(store)
    return made


def bring(places: Sequence[Store], folder: Path, *, after: int = -1, before: int = sys.maxsize) -> Path | None:
    """Fetch the newest whole checkpoint of a run, if one of its stores has a newer one than the run's folder.

    Args:
        places: the run's stores.
        folder: its `checkpoints/`.
        after: the step of the newest whole one there; -1 if there is none.
        before: the step that it must come before.

    Raises:
        AwayError: if there is none in the folder, and a store of the configuration can't be read.
        ConfigError: for one of a newer format, or if another store can't be read.
    """
    if noted := noted_roll_back(folder.parent):  # what the stores must lose still
        before = min(before, noted.elsewhere)
    best: list[tuple[Stored, Store]] = []
    for store in places:
        try:
            best += [(stored, store) for stored in store.newest(after=after, before=before)]
        except ConfigError as error:
            if after < 0:
                if not store.key or error.__cause__ is None:  # of a newer format
                    raise
                raise AwayError.of(store, error) from error
            log.warning("%s. The run continues from the newest checkpoint in its folder, of step %s.", error, after)
    for stored, store in sorted(best, key=lambda pair: pair[0].step, reverse=True):
        log.info("Fetching %s.", store.at(stored.name))
        try:
            return store.fetch(stored, folder / stored.name)
        except ConfigError as error:
            log.warning("%s", error)
    return None


@dataclass(frozen=True, slots=True)
class Copied:
    """A checkpoint in a store."""

    step: int
    name: str
    """Of its folder."""
    address: str
    bytes: int
    seconds: float = 0.0
    """Time that copying it took."""


@dataclass
class Sent:
    """Result of a round of copies to one store."""

    copied: list[Copied] = field(default_factory=list)
    """Checkpoints that arrived."""
    pruned: list[Copied] = field(default_factory=list)
    """Older ones that were removed there."""
    problem: str = ""
    """Why the round was given up; empty if it was not."""
    keeps: bool = False
    """True if the run's checkpoints are kept in this store rather than in the run's folder."""
    steps: set[int] = field(default_factory=set)
    """Checkpoints in the run's folder that the store has too."""


class Sender(CheckpointCopies):
    """Keeps the stores of a run like its folder, in a thread of the main process: one round at a time."""

    def __init__(
        self,
        folder: Path,
        places: Sequence[Store],
        keep: int,
        keep_every: int,
        *,
        named: bool = False,
        tell: Callable[[Sent], None] = lambda sent: None,
    ) -> None:
        """Nothing is read or written yet.

        Args:
            folder: the run's `checkpoints/`.
            places: its stores.
            keep: `checkpoint.keep`.
            keep_every: `checkpoint.keep_every`.
            named: whether the user chose the run's name.
            tell: is given the result of each round in the main thread, once for each store.
        """
        self._folder, self._places, self._keep, self._keep_every = folder, places, keep, keep_every
        self._named, self._tell = named, tell
        self._task: Background[list[Sent]] | None = None
        self._due = False
        self._spared: Set[int] = frozenset()
        self._undone_from: int | None = None
        self._sending: int | None = None
        self._there: dict[str, set[int]] = {}

    @property
    def sending(self) -> set[int]:
        """The step of the checkpoint that is being read now, which has to stay in the run's folder."""
        step = self._sending
        return set() if step is None else {step}

    @property
    def everywhere(self) -> set[int]:
        """Steps whose checkpoints all stores have."""
        known = [self._there.get(store.address, set()) for store in self._places]
        return set.intersection(*known) if known else set()

    def taken(self) -> bool:
        """Return True if a store has checkpoints under the run's name. A generated name is always unique.

        Raises:
            AwayError: if a store can't be read and the user chose the name.
        """
        for store in self._places:
            try:
                if store.found():
                    return True
            except ConfigError as error:
                if self._named:
                    raise AwayError.of(store, error) from error
                log.warning("%s: %s. The run begins without it.", store.key, str(error).rstrip("."))
        return False

    def bring(self, *, after: int = -1, before: int = sys.maxsize) -> Path | None:
        return bring(self._places, self._folder, after=after, before=before)

    def best(self) -> Iterator[tuple[int, Any]]:
        return best_of(self._places)

    def send(self, spared: Set[int] = frozenset()) -> None:
        """Begin to copy what the stores lack, or do so after the round that is under way.

        Args:
            spared: steps that stay in the stores whatever their age.
        """
        self._due, self._spared = True, spared
        if self._places and self._task is None:
            self._due = False
            undone, self._undone_from = self._undone_from, None
            self._task = Background(lambda: [self._round(store, spared, undone) for store in self._places], ALONE)

    def undo(self, step: int) -> bool:
        """Remove the checkpoints of a step and of later ones: a roll-back left them behind."""
        self._undone_from = step if self._undone_from is None else min(step, self._undone_from)
        self._there.clear()
        self.send(self._spared)
        return bool(self._places)

    def look(self) -> set[int]:
        """Tell of the last round, once, and start the next one if it is due."""
        return self._told(self._take()) if self._task is not None and self._task.ended() else set()

    def wait(self) -> set[int]:
        """Tell of all rounds until everything was tried."""
        results: list[Sent] = []
        if self._task is not None and not self._task.ended():
            log.info(
                "Waiting until the checkpoints are copied to %s.", " and ".join(one.address for one in self._places)
            )
        while self._task is not None:
            results += self._take()
        return self._told(results)

    def _take(self) -> list[Sent]:
        assert self._task is not None
        task, self._task = self._task, None
        results = task.result()
        if self._undone_from is None:
            self._there = {store.address: sent.steps for store, sent in zip(self._places, results, strict=True)}
            if noted_roll_back(self._folder.parent):  # every store has lost what it removes
                note_roll_back(self._folder.parent, None)
        if self._due:
            self.send(self._spared)
        return results

    def _told(self, results: Sequence[Sent]) -> set[int]:
        for sent in results:
            self._tell(sent)
        return {gone.step for sent in results if sent.keeps for gone in sent.pruned}

    def _round(self, store: Store, spared: Set[int], undone: int | None) -> Sent:
        sent = Sent(keeps=store.key == "checkpoint.folder")
        try:
            for stored in store.found() if undone is not None else ():
                if undone is not None and stored.step >= undone:
                    store.remove(stored.name)
            for number, saved in enumerate(found(self._folder)):
                if number < self._keep or is_kept(saved.step, self._keep_every, spared):
                    self._send(store, saved, sent)
            sent.pruned = [
                Copied(gone.step, gone.name, store.at(gone.name), gone.bytes)
                for gone in store.prune(self._keep, self._keep_every, spared)
            ]
        except Exception as error:  # nothing that happens to a copy ends a run
            if undone is not None:
                self._undone_from = undone
            sent.problem, sent.steps = str(error) if isinstance(error, ForgeError) else describe(error), set()
        finally:
            self._sending = None
        return sent

    def _send(self, store: Store, saved: Saved, sent: Sent) -> None:
        began, self._sending, lacking = time.perf_counter(), saved.step, False
        try:
            if check(saved.path):
                return
            if lacking := not store.has(saved.path):
                store.put(saved.path)
                name, seconds = saved.path.name, time.perf_counter() - began
                sent.copied.append(Copied(saved.step, name, store.at(name), saved.bytes, seconds))
            sent.steps.add(saved.step)
        except (ForgeError, OSError):
            if saved.path.exists():
                raise
            if lacking:  # the run has removed it meanwhile: so goes the part that was sent
                store.remove(saved.path.name)


def best_of(places: Sequence[Store]) -> Iterator[tuple[int, Any]]:
    """Yield the step and the `checkpoint.best` entry of each checkpoint in the stores."""
    for store in places:
        for stored in store.newest():
            yield stored.step, loads(store.text(stored, STATE).decode()).get("best")
