"""`forge train --nproc N`: this process starts the others, waits, and speaks for them."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from forge_train.config.layers import Request
from forge_train.errors import ConfigError
from forge_train.processes.launch import Ended, Task, launch
from forge_train.registry.setup import Setup, resolve
from forge_train.storage import disk, records
from forge_train.storage.start import Start, claim, unclaim

from .failures import show_warnings

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
    task = Task(f"{__name__}:worker", arguments, folder=start.dir / "log" / "launch", logs=start.dir / "log")
    metrics = start.dir / "metrics.jsonl"

    def last_step() -> int:
        return max((line["step"] for line in records.read(metrics)), default=0)

    def on_restart(why: str) -> None:
        _restore_screen()
        click.echo(f"{click.style('Warning:', fg='yellow')} {why}", err=True)

    try:
        ended = launch(task, nproc, max_restarts=max_restarts, last_step=last_step, on_restart=on_restart)
        if ended.code == ConfigError.code and start.new and not any((start.dir / "checkpoints").glob("step-*")):
            shutil.rmtree(start.dir, ignore_errors=True)
    except OSError as error:
        if error.errno in disk.FULL:
            raise disk.refused(start.dir, error, "write the run folder") from error
        raise ConfigError(f"{start.dir}: can't write the run folder: {error.strerror or error}.") from error
    finally:
        unclaim(start, lock)
    if ended.complaint():
        _restore_screen()
    return Launched(start.dir, ended)


def worker(request: dict[str, Any], start: dict[str, Any], quiet: bool) -> Mapping[str, Any]:
    """What each of the processes does."""
    from forge_train.loop.engine import train
    from forge_train.processes.world import World

    show_warnings()
    lists = {name: tuple(request[name]) for name in ("plugins", "without", "set")}
    setup = resolve(Request(**{**request, **lists}), world=World.here().size)
    if quiet:
        setup.hooks.mute("console")
    finished = train(setup, start=_from_json(start))
    return {
        "code": finished.code,
        "outcome": finished.outcome,
        "step": finished.step,
        "loss": finished.loss,
        "reason": finished.reason,
        "closing": finished.closing,
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
