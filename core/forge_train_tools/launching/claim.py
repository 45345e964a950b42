"""The folder of a run: what it continues, and the lock that gives it to one job."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from forge_train.base.errors import ConfigError
from forge_train.config import Config
from forge_train.run.run import is_checkpoint, is_run, writing
from forge_train.run.start import Start
from forge_train_kit.lock import Lock, check, take
from forge_train_kit.new_folder import is_unfinished
from forge_train_kit.stores.elsewhere import CopiesOf, no_copies

from ..configuration.rules import LONGEST_NAME

if TYPE_CHECKING:
    from forge_train.mesh.distributed import DistributedContext

log = logging.getLogger("forge_train")

VISIBLE_WITHIN = 5.0
"""Seconds that a network file system may take to show one node what another has written."""


@contextmanager
def claimed(
    copies: CopiesOf,
    dist: DistributedContext,
    config: Config,
    folder: Path,
    resume: str,
    notable: tuple[str, ...] = (),
) -> Iterator[Start]:
    """Claim the folder of a run for as long as the block lasts; all processes call this.

    Args:
        copies: see `begin`, as for `config`, `folder`, `resume` and `notable`.
        dist: the processes.

    Raises:
        ConfigError: as `claim` does, and for nodes that do not share the folder.
    """
    held: list[tuple[Start, Lock]] = []

    def on_main() -> Start:
        held.append(claim(config, folder, resume, notable, copies))
        return held[0][0]

    try:
        start = dist.on_main(on_main)
        if dist.main and dist.place.max_restarts and start.new and not (config.run.name and resume == "auto"):
            log.warning("A restart by torchrun begins a new run: only one with a --name goes on.")
        check_shared(start, dist, held[0][1].file if held else None)
        yield start
    finally:
        for one in held:
            unclaim(*one)


def check_shared(start: Start, dist: DistributedContext, lock: Path | None) -> None:
    """Check that every process sees rank 0's files: all nodes of a run must share a file system.

    Args:
        start: where the run begins.
        dist: the processes, which all call this.
        lock: the file that locks the folder; rank 0 knows it.

    Raises:
        ConfigError: if one does not; names the ranks.
    """
    if dist.world == 1:
        return
    marks, text = dist.on_main(lambda: _mark(start.dir, lock))
    if not marks:
        return
    deadline = time.monotonic() + VISIBLE_WITHIN
    while (unseen := [file.parent for file in marks if _read(file) != text]) and time.monotonic() < deadline:
        time.sleep(0.1)
    if start.checkpoint is not None and not start.checkpoint.is_dir():
        unseen.append(start.checkpoint)
    missing = next(iter(unseen), None)
    everybody = dist.gather_objects((missing, socket.gethostname()))
    for mark in marks[1:] if dist.main else ():
        mark.unlink(missing_ok=True)
    if blind := [rank for rank, (path, _) in enumerate(everybody) if path]:
        path, host = everybody[blind[0]]
        raise ConfigError(
            f"{path}: rank {blind[0]} on {host} does not see what rank 0 on {everybody[0][1]} has there "
            f"({len(blind)} of {dist.world} ranks do not). All nodes must share the file system of the run folder; "
            "a relative path begins where each process was started."
        )


def _mark(folder: Path, lock: Path | None) -> tuple[list[Path], str]:
    """Files that every process must see, and their text: the lock, and its copy where checkpoints lie, which may be on
    another disk. None without a lock."""
    if lock is None:
        return [], ""
    text, checkpoints = lock.read_text(encoding="utf-8"), folder / "checkpoints"
    copies = [checkpoints / ".seen.partial"] if checkpoints.is_dir() else []
    for copy in copies:
        copy.write_text(text, encoding="utf-8")
    return [lock, *copies], text


def _read(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(encoding="utf-8")
    return ""


def run_id(config: Config, notable: tuple[str, ...]) -> str:
    """`<preset or file>-<plugins of note>-<8 hex of the configuration>-<time>`."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    what = os.fsencode("-".join([config.source, *notable[:4]]))[:LONGEST_NAME].decode(errors="ignore")
    return f"{what}-{digest(config)[:8]}-{stamp}"


def digest(config: Config) -> str:
    """The sha256 over everything in a configuration that can change a number."""
    names = [name for name in config.enabled() if name not in config.neutral]
    return hashlib.sha256(json.dumps([names, config.values(volatile=False)], sort_keys=True).encode()).hexdigest()


def claim(
    config: Config, folder: Path, resume: str, notable: tuple[str, ...] = (), copies: CopiesOf = no_copies
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
        guarded = replace(start, continues=is_run(start.dir), notes=notes, check_lock=partial(check, lock.file))
        return guarded, lock


def unclaim(start: Start, lock: Lock) -> None:
    """Let go of a run's folder; one that was made for nothing goes too, with what was fetched to it."""
    if start.new and start.dir.is_dir() and is_unfinished(start.dir):
        shutil.rmtree(start.dir / "checkpoints", ignore_errors=True)
    lock.release()
    if start.new and start.dir.is_dir() and not any(start.dir.iterdir()):
        start.dir.rmdir()


def begin(
    config: Config, folder: Path, resume: str, notable: tuple[str, ...] = (), copies: CopiesOf = no_copies
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
            from forge_train_kit.foreign import advice  # which imports torch

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


def _kept(run: Path) -> str:
    """List a run's checkpoints in words."""
    names = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    return f"the run has {', '.join(names)}" if names else "the run has none"


def _unused(path: Path, config: Config, copies: CopiesOf) -> Path:
    """A run's folder that is not there yet, with a name that no checkpoints elsewhere have."""
    number, candidate = 2, path
    while candidate.exists() or copies(config, candidate).taken():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate
