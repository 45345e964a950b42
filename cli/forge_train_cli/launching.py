"""`forge train --nproc N`: this process starts the others, waits, and speaks for them."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from forge_train.config.layers import Request
from forge_train.contract.run import Run
from forge_train.ground import disk, records
from forge_train.ground.errors import ConfigError
from forge_train.ground.layout import Layout
from forge_train.registry.setup import Setup, resolve
from forge_train.storage.run import is_kept, is_run
from forge_train.storage.start import Start, claim, unclaim
from forge_train_tools.launching.launch import Ended, WorkerCommand, WorkerResult, launch

from .closing import next_commands
from .failures import show_progress, show_warnings

log = logging.getLogger("forge_train")

PATHS = ("dir", "checkpoint", "lock")
"""Fields of a Start that are paths."""
SHOW_CURSOR = "\x1b[?25h"


@dataclasses.dataclass(frozen=True)
class Launched:
    """How a run of several processes ended."""

    run: Path
    ended: Ended


def train_several(
    request: Request,
    setup: Setup,
    *,
    run_dir: Path,
    resume: str,
    notable: Sequence[str],
    nproc: int,
    max_restarts: int,
    quiet: bool,
) -> Launched:
    """Train on N local processes, rank 0 alone on the screen.

    Raises:
        ConfigError: for what is wrong before any of them is started.
    """
    start, lock = claim(setup.config, run_dir, resume, tuple(notable))
    arguments = {"request": dataclasses.asdict(request), "start": _as_json(start), "quiet": quiet}
    logs, layout = start.dir / "log", Layout.of(setup.config.parallel, nproc)
    task = WorkerCommand(f"{__name__}:worker", arguments, folder=logs / "launch", logs=logs, layout=layout)
    metrics = start.dir / "metrics.jsonl"

    def last_step() -> int:
        return max((line["step"] for line in records.read(metrics, strict=False)), default=0)

    began = time.time()

    def on_restart(why: str, first: WorkerResult) -> None:
        nonlocal began
        _record(Run(start.dir, lock.file), first, last_step(), began)
        began = time.time()
        _restore_screen()
        click.echo(f"{click.style('Warning:', fg='yellow')} {why}", err=True)

    try:
        ended = launch(task, nproc, max_restarts=max_restarts, last_step=last_step, on_restart=on_restart)
        if not ended.signal and not ended.first.well:
            _record(Run(start.dir, lock.file), ended.first, last_step(), began)
        if ended.code == ConfigError.code and start.new and not is_kept(start.dir):
            shutil.rmtree(start.dir, ignore_errors=True)
    except OSError as error:
        if error.errno in disk.FULL:
            raise disk.refused(start.dir, error, "can't write the run folder:") from error
        raise ConfigError(f"{start.dir}: can't write the run folder: {error.strerror or error}.") from error
    finally:
        unclaim(start, lock)
    if ended.complaint():
        _restore_screen()
    return Launched(start.dir, ended)


def _record(run: Run, first: WorkerResult, step: int, since: float) -> None:
    """Write how the rank failed that failed first, unless the run was refused before it began."""
    if not is_run(run.dir) or (first.code == ConfigError.code and not is_kept(run.dir)):
        return
    try:
        run.fail_first(first.as_failure(), first.code, step, since=since)
    except OSError as error:  # a full disk: what went wrong first is what is told
        log.warning("%s: can't record how the run ended: %s", run.dir, error.strerror or error)


def worker(request: dict[str, Any], start: dict[str, Any], quiet: bool) -> Mapping[str, Any]:
    """What each of the processes does."""
    from forge_train.engine import train
    from forge_train.ground.world import World

    show_warnings()
    lists = {name: tuple(request[name]) for name in ("plugins", "without", "set")}
    setup = resolve(Request(**{**request, **lists}), world=World.here().size)
    if quiet:
        setup.hooks.mute("console")
    elif World.here().rank == 0:
        show_progress()
    finished = train(setup, start=_from_json(start))
    return {
        "code": finished.code,
        "outcome": finished.outcome,
        "step": finished.step,
        "loss": finished.loss,
        "reason": finished.reason,
        "generates": finished.generates,
        "closing": finished.closing,
        "next": next_commands(finished, setup) if World.here().rank == 0 else [],
    }


def _as_json(start: Start) -> dict[str, Any]:
    """For the workers, which do not remove the folder."""
    paths = {name: str(getattr(start, name) or "") for name in PATHS}
    return {**dataclasses.asdict(start), **paths, "new": False}


def _from_json(start: dict[str, Any]) -> Start:
    paths = {name: Path(start[name]) if start[name] else None for name in PATHS}
    return Start(**{**start, **paths, "notes": tuple(start["notes"])})


def _restore_screen() -> None:
    """A live view that was killed has left the cursor hidden."""
    if sys.stdout.isatty():
        sys.stdout.write(f"\n{SHOW_CURSOR}")
        sys.stdout.flush()
