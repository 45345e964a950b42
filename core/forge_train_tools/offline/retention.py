"""Which checkpoints of a run stay, and removing the others: what a run does after each save, done by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from forge_train.config.layers import Request, lay
from forge_train.contract.run import Run
from forge_train.ground.errors import ConfigError
from forge_train.ground.lock import take
from forge_train.storage import checkpoint, seal
from forge_train.storage.checkpoint import Saved


@dataclass(frozen=True)
class Retention:
    """What is kept beside the newest."""

    keep: int = 2
    keep_every: int = 0
    early: int = 0
    best: str = ""
    best_is: str = "lowest"
    keep_best: int = 1


def retention_of(run: Path, *, keep: int | None = None, keep_every: int | None = None) -> Retention:
    """What the configuration of a run says.

    Args:
        run: its folder.
        keep: instead of `checkpoint.keep`.
        keep_every: instead of `checkpoint.keep_every`.

    Raises:
        ConfigError: for a value of another type.
    """
    tree = lay(Request(config=str(run / "config.toml"))).tree.below(("checkpoint",))
    said: dict[str, Any] = {key[-1]: value.value for key, value in tree.items()}
    given = {key: one for key, one in {"keep": keep, "keep_every": keep_every}.items() if one is not None}
    wanted = {**asdict(Retention()), **said, **given}
    for name, default in asdict(Retention()).items():
        if type(wanted[name]) is not type(default):
            raise ConfigError(
                f"{run / 'config.toml'}: checkpoint.{name}: {wanted[name]!r} is no {type(default).__name__}."
            )
    return Retention(**{name: wanted[name] for name in asdict(Retention())})


def unwanted(run: Path, retention: Retention) -> list[Saved]:
    """Checkpoints that would go, the newest first. Every file of those that are kept for being the newest is read.

    Fewer than `keep` whole ones, and nothing goes. A damaged one does not count, and goes where it is older.

    Raises:
        ConfigError: if none is whole.
    """
    found = checkpoint.found(run / "checkpoints")
    whole = (saved for saved in found if not seal.verify(saved.path))
    kept = list(islice(whole, retention.keep))
    if found and not kept:
        raise ConfigError(f"{run}: no checkpoint is whole, so none is removed.")
    if len(kept) < retention.keep:
        return []
    spared = {2**power for power in range(retention.early.bit_length())} | _best(found, retention)
    every = retention.keep_every
    return [
        saved
        for saved in found
        if saved.step < kept[-1].step and not (every and saved.step % every == 0) and saved.step not in spared
    ]


def remove(run: Path, retention: Retention) -> Iterator[Saved]:
    """Remove what is not wanted; tells each once it is gone.

    Raises:
        ConfigError: if a process trains the run.
    """
    lock = take(run)
    try:
        for saved in unwanted(run, retention):
            checkpoint.remove(saved)
            Run(run, lock.file).event("checkpoint_pruned", saved.step, path=saved.path.name)
            yield saved
    finally:
        lock.release()


def _best(found: list[Saved], retention: Retention) -> set[int]:
    """The steps of the best checkpoints, by what these say of themselves."""
    scores: dict[int, float] = {}
    for saved in found if retention.best else ():
        said = {} if seal.check(saved.path) else checkpoint.read_state(saved.path).get("best") or {}
        if said.get("metric") == retention.best and isinstance(said.get("value"), (int, float)):
            scores[saved.step] = said["value"] if retention.best_is == "lowest" else -said["value"]
    return set(sorted(scores, key=lambda step: (scores[step], step))[: retention.keep_best])
