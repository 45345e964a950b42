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
from forge_train.storage.run import Start, begin

from .failures import show_warnings

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
    start = begin(setup.config, run_dir, resume, tuple(notable))
    new = not start.dir.exists()
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
    except OSError as error:
        if error.errno in disk.FULL:
            raise disk.refused(start.dir, error, "can't write the run folder:") from error
        raise ConfigError(f"{start.dir}: can't write the run folder: {error.strerror or error}.") from error
    if ended.code == ConfigError.code and new and not any((start.dir / "checkpoints").glob("step-*")):
        shutil.rmtree(start.dir, ignore_errors=True)
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
    return {**dataclasses.asdict(start), "dir": str(start.dir), "checkpoint": str(start.checkpoint or "")}


def _from_json(start: dict[str, Any]) -> Start:
    checkpoint = Path(start["checkpoint"]) if start["checkpoint"] else None
    return Start(Path(start["dir"]), checkpoint, continues=start["continues"])


def _restore_screen() -> None:
    """A live view that was killed has left the cursor hidden."""
    if sys.stdout.isatty():
        sys.stdout.write(f"\n{SHOW_CURSOR}")
        sys.stdout.flush()
