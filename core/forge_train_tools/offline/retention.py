"""Retention of a run's checkpoints: a run removes the others after each save; here it is manual."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from forge_train.base.errors import ConfigError
from forge_train.base.files import remove_remains
from forge_train.checkpoint import checkpoint, seal
from forge_train.checkpoint.checkpoint import Saved
from forge_train.checkpoint.found import is_kept, name_latest
from forge_train.run.run import Run
from forge_train.store.manifest import EDITABLE
from forge_train_kit.lock import check, take
from forge_train_kit.stores.copies import best_of
from forge_train_kit.stores.fetching import locate

from ..configuration.request import Request, lay


@dataclass(frozen=True)
class Retention:
    """Rule for the checkpoints to keep."""

    keep: int = 2
    keep_every: int = 0
    early: int = 0
    best: str = ""
    best_is: str = "lowest"
    keep_best: int = 1

    @property
    def early_steps(self) -> set[int]:
        """The powers of two up to `early`."""
        return {2**power for power in range(self.early.bit_length())}


def retention_of(run: Path, *, keep: int | None = None, keep_every: int | None = None) -> Retention:
    """The retention in a run's configuration.

    Args:
        run: its folder.
        keep: overrides `checkpoint.keep`.
        keep_every: overrides `checkpoint.keep_every`.

    Raises:
        ConfigError: for a value of another type.
    """
    tree = lay(Request(config=str(run / "config.toml"))).below(("checkpoint",))
    said: dict[str, Any] = {key[-1]: value.value for key, value in tree.items()}
    given = {key: one for key, one in {"keep": keep, "keep_every": keep_every}.items() if one is not None}
    wanted = {**asdict(Retention()), **said, **given}
    for name, default in asdict(Retention()).items():
        if type(wanted[name]) is not type(default):
            raise ConfigError(
                f"{run / 'config.toml'}: checkpoint.{name}: expected {type(default).__name__}, found {wanted[name]!r}."
            )
    return Retention(**{name: wanted[name] for name in asdict(Retention())})


def unwanted(run: Path, retention: Retention) -> list[Saved]:
    """Checkpoints to remove, newest first. Reads every file of the newest ones, which are kept.

    With fewer than `keep` whole ones, nothing is removed. Damaged ones do not count; they are removed if they are
    older.

    Raises:
        ConfigError: if no checkpoint is whole.
    """
    found = checkpoint.found(run / "checkpoints")
    whole = (saved for saved in found if not seal.verify(saved.path))
    kept = list(islice(whole, retention.keep))
    if found and not kept:
        raise ConfigError(f"{run}: no checkpoint is whole, so none is removed.")
    if len(kept) < retention.keep:
        return []
    sound = (saved for saved in found if not seal.check(saved.path))
    best = ((saved.step, checkpoint.read_state(saved.path).get("best")) for saved in sound)
    spared = retention.early_steps | best_steps(best, retention)
    return [
        saved for saved in found if saved.step < kept[-1].step and not is_kept(saved.step, retention.keep_every, spared)
    ]


def remove(run: Path, retention: Retention) -> Iterator[Saved]:
    """Remove unwanted checkpoints; yields each once it is gone.

    Raises:
        ConfigError: if a process is training the run.
    """
    lock = take(run)
    try:
        remove_remains(run / "checkpoints")  # and put back what was being replaced
        gone = unwanted(run, retention)
        name_latest(run / "checkpoints", checkpoint.newest(run / "checkpoints"))  # never one that is removed
        for saved in gone:
            checkpoint.remove(saved)
            Run(run, partial(check, lock.file)).event("checkpoint_pruned", saved.step, path=saved.path.name)
            yield saved
    finally:
        lock.release()


def prune_there(
    address: str, *, keep: int | None = None, keep_every: int | None = None, dry_run: bool = False
) -> list[tuple[str, int, int]]:
    """The same for a run at an address, by the configuration in its newest whole checkpoint.

    Returns:
        Address, step and bytes of each checkpoint that is removed, or would be.

    Raises:
        ConfigError: if it is not a run, or none of its checkpoints is whole.
    """
    place = locate(address)
    if place.checkpoint:
        raise ConfigError(f"{address} is not a run.")
    store = place.store
    with tempfile.TemporaryDirectory(prefix="forge-") as folder:
        (Path(folder) / EDITABLE).write_bytes(store.text(place.one(), EDITABLE))
        retention = retention_of(Path(folder), keep=keep, keep_every=keep_every)
    spared = retention.early_steps | best_steps(best_of([store]) if retention.best else (), retention)
    change = store.unwanted if dry_run else store.prune
    return [(store.at(one.name), one.step, one.bytes) for one in change(retention.keep, retention.keep_every, spared)]


def best_steps(said: Iterable[tuple[int, Any]], retention: Retention) -> set[int]:
    """The steps of the best checkpoints.

    Args:
        said: the value of `checkpoint.best` in each checkpoint, by step.
        retention: what is kept.
    """
    scores: dict[int, float] = {}
    for step, best in said if retention.best else ():
        value = best.get("value") if isinstance(best, dict) and best.get("metric") == retention.best else None
        if isinstance(value, (int, float)):
            scores[step] = value if retention.best_is == "lowest" else -value
    return set(sorted(scores, key=lambda step: (scores[step], step))[: retention.keep_best])
