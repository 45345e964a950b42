"""Start of a run: its folder, what it continues from, and the claim that gives the folder to one job."""

from __future__ import annotations

import logging
import os
import shutil
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..base.errors import ConfigError, describe
from ..base.lock import Lock, take
from ..checkpoint.checkpoint import advice
from ..config import Config, differences
from ..config.rules import LONGEST_NAME
from ..contract.protocols import Copies, no_copies
from ..mesh.axes import CONFIGURED, Axis
from ..mesh.layout import Layout
from ..run import records
from ..run.run import writing
from .run import MODEL_FILES, is_checkpoint, is_run

log = logging.getLogger("forge_train")


@dataclass(frozen=True)
class Start:
    """Start of a run: its folder, and what it continues from."""

    dir: Path
    checkpoint: Path | None = None
    """A checkpoint of another run to start from; one of this run is found in its folder."""
    continues: bool = False
    """True if the folder already holds this run."""
    lock: Path | None = None
    """The file that gives the folder to this job, once it is claimed."""
    new: bool = False
    """True if the folder is made for this start."""
    notes: tuple[str, ...] = ()
    """Messages for the log about the state in which the folder was found."""

    def again(self, *, saved: bool) -> Start:
        """The same run, once its processes were lost; `saved` is whether it has a checkpoint of its own."""
        if self.checkpoint is not None and not saved:
            return self
        return Start(self.dir, continues=is_run(self.dir), lock=self.lock)


def run_id(config: Config, notable: tuple[str, ...]) -> str:
    """`<preset or file>-<plugins of note>-<8 hex of the configuration>-<time>`."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    what = os.fsencode("-".join([config.source, *notable[:4]]))[:LONGEST_NAME].decode(errors="ignore")
    return f"{what}-{config.digest()[:8]}-{stamp}"


def claim(
    config: Config, folder: Path, resume: str, notable: tuple[str, ...] = (), copies: Copies = no_copies
) -> tuple[Start, Lock]:
    """Decide where a run begins, as `begin` does, and lock the folder until the lock is released.

    Raises:
        ConfigError: if another process has the run, or the folder can't be written.
    """
    while True:
        with writing(folder):  # whose names may be too long
            start = begin(config, folder, resume, notable, copies)
        with writing(start.dir):
            if start.new:
                try:
                    start.dir.mkdir(parents=True)
                except FileExistsError:
                    if not start.dir.exists():
                        raise
                    continue  # another process made it just now
            lock = take(start.dir, log.warning)
        dead = f"{start.dir}: took the lock over from {lock.taken_from}, which is gone." if lock.taken_from else ""
        notes = (dead,) if dead else ()
        return replace(start, continues=is_run(start.dir), lock=lock.file, notes=notes), lock


def unclaim(start: Start, lock: Lock) -> None:
    """Let go of a run's folder; one that was made for nothing goes too, with what was fetched to it."""
    if start.new and start.dir.is_dir() and is_unfinished(start.dir):
        shutil.rmtree(start.dir / "checkpoints", ignore_errors=True)
    lock.release()
    if start.new and start.dir.is_dir() and not any(start.dir.iterdir()):
        start.dir.rmdir()


def begin(
    config: Config, folder: Path, resume: str, notable: tuple[str, ...] = (), copies: Copies = no_copies
) -> Start:
    """Decide which folder a run is, and whether it continues something.

    Args:
        config: its configuration; a name makes it one run for ever.
        folder: where run folders are made.
        resume: `auto`, `never`, or the path of a run or a checkpoint.
        notable: plugins to name in a new run's id.
        copies: gives the checkpoints that a run has elsewhere: a new run takes no name that some have.

    Raises:
        ConfigError: for a path that is neither.
    """
    if resume not in ("auto", "never"):
        path = Path(resume)
        if is_run(path):
            if config.run.name not in ("", path.name):
                raise ConfigError(
                    f"--resume {resume} goes on in that folder; it can't be named {config.run.name!r} too."
                )
            return Start(path, continues=True)
        if not is_checkpoint(path):
            if not path.exists() and is_run(run := path.parent.parent):
                raise ConfigError(f"--resume {resume}: there is no such checkpoint; {_kept(run)}.")
            raise ConfigError(
                f"--resume {resume}: expected auto, never, or the path of a run or a checkpoint.{advice(path)}"
            )
        return Start(
            _unused(folder / (config.run.name or run_id(config, notable)), config, copies), checkpoint=path, new=True
        )
    if not config.run.name:
        return Start(_unused(folder / run_id(config, notable), config, copies), new=True)
    named = folder / config.run.name
    if resume == "never":
        return Start(_unused(named, config, copies), new=True)
    if named.exists() and not is_run(named) and not is_unfinished(named):
        raise ConfigError(f"{named}: exists and is not a run; choose another --name or --run-dir.")
    return Start(named, continues=is_run(named), new=not named.exists())


def is_unfinished(path: Path) -> bool:
    """Return True if a folder has only the files that precede a run, left by a process that was killed early."""
    known = ("log", "checkpoints", "config.toml", MODEL_FILES)
    parts = (".partial", ".lock.")
    return path.is_dir() and all(one.name in known or any(p in one.name for p in parts) for one in path.iterdir())


def _kept(run: Path) -> str:
    """List a run's checkpoints in words."""
    names = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    return f"the run has {', '.join(names)}" if names else "the run has none"


def _unused(path: Path, config: Config, copies: Copies) -> Path:
    """A run's folder that is not there yet, with a name that no checkpoints elsewhere have."""
    number, candidate = 2, path
    while candidate.exists() or copies(config, candidate).taken():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate


def changed_layout(checkpoint: Path, saved: Mapping[str, Any], now: Layout) -> str:
    """`dp_shard 2 then, 1 now` for every axis whose size differs from that of the run's last attempt; empty if none
    does, or if the folder does not say it."""
    events = checkpoint.parent.parent / "events.jsonl"
    begun = [one for one in records.read(events, strict=False) if one.get("event") == "run_started"]
    axes = {key.removeprefix("parallel."): size for key, size in saved.items() if key.startswith("parallel.")}
    try:
        others = tuple(Axis(name) for name in axes if name not in CONFIGURED)
        then = Layout.of(SimpleNamespace(**axes, __axes__=others), begun[-1]["world"])
    except (ConfigError, AttributeError, IndexError, KeyError, TypeError):
        return ""
    sizes = (then.axes(), now.axes())
    names = {axis: 1 for layout in sizes for axis in layout}
    changed = differences(*({**names, **layout} for layout in sizes))
    return ", ".join(f"{axis} {before} then, {after} now" for axis, before, after in changed)


def changed_values(file: Path, text: str) -> list[str]:
    """`train.steps: 4 then, 8 now` for every value that differs between a run's config.toml and a new one.

    Raises:
        ConfigError: if the file can't be read.
    """
    try:
        before = tomllib.loads(file.read_text(encoding="utf-8-sig"))  # which editors of Windows write
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: can't read the run's configuration: {describe(error)}.") from error
    old, new = dict(_flat(before)), dict(_flat(tomllib.loads(text)))
    return [f"{key}: {then!r} then, {now!r} now" for key, then, now in differences(old, new)]


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
