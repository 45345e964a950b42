"""A run on several local processes: this one starts the others, and waits for them."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from forge_train.base.errors import ConfigError
from forge_train.base.files import FULL, refused
from forge_train.contract.events import Finished
from forge_train.mesh.layout import Layout
from forge_train.registry.setup import Setup
from forge_train.run import records
from forge_train.run.run import Run, is_kept, is_run
from forge_train.run.start import Start
from forge_train_kit.lock import Lock, check

from ..configuration.request import Request
from ..configuration.setup import copies_of, resolve
from ..messages import show_progress, show_warnings
from .claim import claim, unclaim
from .launch import Ended, Restart, WorkerCommand, WorkerResult, launch

log = logging.getLogger("forge_train")

SHOW_CURSOR = "\x1b[?25h"


@dataclasses.dataclass(frozen=True)
class Launched:
    """Outcome of a run of several processes."""

    run: Path
    ended: Ended

    @property
    def finished(self) -> Finished:
        """The run's end, as rank 0 reported it."""
        result = {**self.ended.result, "code": self.ended.code}
        return Finished(**{**result, "run": self.run, "closing": [(title, text) for title, text in result["closing"]]})


def train_several(
    request: Request,
    setup: Setup,
    *,
    run_dir: Path,
    resume: str,
    notable: Sequence[str],
    nproc: int,
    quiet: bool,
    max_restarts: int = 0,
    min_nproc: int | None = None,
) -> Launched:
    """Train on N local processes, with only rank 0 on the screen; after failures also on fewer, but at least
    `min_nproc`.

    Raises:
        ConfigError: for problems that are found before any of them is started.
    """
    smaller = smaller_layouts(request, nproc, min_nproc) if min_nproc else {}
    start, lock = claim(setup.config, run_dir, resume, tuple(notable), partial(copies_of, setup.hooks))
    arguments = {"request": dataclasses.asdict(request), "start": _as_json(start, lock), "quiet": quiet}
    logs, layout = start.dir / "log", Layout.of(setup.config.parallel, nproc)
    task = WorkerCommand(f"{__name__}:worker", arguments, logs / "launch", logs, layout=layout, smaller=smaller)
    metrics = start.dir / "metrics.jsonl"

    def last_step() -> int:
        return max((line["step"] for line in records.read(metrics, strict=False)), default=0)

    began, described = time.time(), _described(start.dir)

    def on_restart(restart: Restart) -> None:
        nonlocal began, described
        _record(Run(start.dir, start.check_lock), restart.first, last_step(), began, described, restart)
        began, described = time.time(), _described(start.dir)
        _restore_screen()
        log.warning(restart.why)

    try:
        ended = launch(task, nproc, max_restarts=max_restarts, last_step=last_step, on_restart=on_restart)
        if not ended.signal and not ended.first.well:
            _record(Run(start.dir, start.check_lock), ended.first, last_step(), began, described)
        if ended.code == ConfigError.code and start.new and not is_kept(start.dir):
            shutil.rmtree(start.dir, ignore_errors=True)
    except OSError as error:
        if error.errno in FULL:
            raise refused(start.dir, error, "can't write the run folder:") from error
        raise ConfigError(f"{start.dir}: can't write the run folder: {error.strerror or error}.") from error
    finally:
        unclaim(start, lock)
    if ended.complaint():
        _restore_screen()
    return Launched(start.dir, ended)


def smaller_layouts(request: Request, nproc: int, least: int) -> dict[int, Layout]:
    """Smaller numbers of processes with which the run can continue, and their layouts; warns if there are none.

    Raises:
        ConfigError: if `least` is not below `nproc`.
    """
    if least >= nproc:
        raise ConfigError(f"--min-nproc {least}: must be below the number of processes, which is {nproc}.")
    found, why = {}, ""
    for world in range(nproc - 1, least - 1, -1):
        try:
            found[world] = Layout.of(resolve(request, world=world, measured=False).config.parallel, world)
        except ConfigError as error:
            why = why or str(error)
    if not found:
        log.warning(
            "--min-nproc %s: every restart takes all %s processes, because the run can't use fewer: %s",
            least,
            nproc,
            why,
        )
    return found


def _described(run: Path) -> int:
    """The time at which the configuration was last written, by the clock of the file system; 0 where it was not."""
    file = run / "config.toml"
    return file.stat().st_mtime_ns if file.exists() else 0


def _record(
    run: Run, first: WorkerResult, step: int, since: float, described: int, restart: Restart | None = None
) -> None:
    """Record how the first failing rank failed, and whether all start again, unless the run was refused before it took
    a step: it is then described as before."""
    if not is_run(run.dir):
        return
    if first.code == ConfigError.code and (not is_kept(run.dir) or _described(run.dir) == described):
        return
    try:
        run.fail_again(first.as_failure(), first.code, step, since=since)
        if restart is not None:
            run.event("restarted", step, reason=restart.why, attempt=restart.attempt, world=restart.world)
    except OSError as error:  # a full disk: report the first problem, not this one
        log.warning("%s: can't record how the run ended: %s", run.dir, error.strerror or error)


def worker(request: dict[str, Any], start: dict[str, Any], quiet: bool) -> Mapping[str, Any]:
    """The work of each process."""
    from forge_train.engine import train
    from forge_train.mesh.world import World

    show_warnings()
    setup = resolve(Request.loaded(request), world=World.here().size)
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
    }


def _as_json(start: Start, lock: Lock) -> dict[str, Any]:
    """For the workers, which do not remove the folder."""
    return {
        "dir": str(start.dir),
        "checkpoint": str(start.checkpoint or ""),
        "continues": start.continues,
        "notes": start.notes,
        "lock": str(lock.file),
    }


def _from_json(start: dict[str, Any]) -> Start:
    return Start(
        Path(start["dir"]),
        checkpoint=Path(start["checkpoint"]) if start["checkpoint"] else None,
        continues=start["continues"],
        notes=tuple(start["notes"]),
        check_lock=partial(check, Path(start["lock"])),
    )


def _restore_screen() -> None:
    """Show the cursor again, which a killed live view has left hidden."""
    if sys.stdout.isatty():
        sys.stdout.write(f"\n{SHOW_CURSOR}")
        sys.stdout.flush()
