"""`forge train`."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from forge_train.base.errors import INTERRUPTED, ConfigError, DivergedError, Failure, ForgeError
from forge_train.base.files import DiskError
from forge_train.base.strict_json import dumps
from forge_train.contract.events import Finished
from forge_train.registry.discovery import plugin_name
from forge_train.run.run import Run
from forge_train_kit.failures import failure_of
from forge_train_tools.configuration.request import Request
from forge_train_tools.launching.devices import how_many
from forge_train_tools.launching.ending import told
from forge_train_tools.launching.world import here
from forge_train_tools.messages import show_end, show_progress, waiting
from forge_train_tools.sources import fetch, with_configuration

from . import screen
from .closing import activation, next_commands, resume_command
from .exporting import check_exportable, export_trained
from .failures import complain, report
from .options import AUTO, hugging_face, named, processes_option, run_dir_option, run_options
from .repeat import Again

if TYPE_CHECKING:
    from forge_train.registry.setup import Setup
    from forge_train_tools.launching.training import Launched


@click.command(short_help="Train a model.")
@run_options(default="")
@run_dir_option
@click.option("--name", metavar="NAME", help="The run is DIR/NAME; repeating the command continues it.")
@click.option(
    "--resume",
    default="auto",
    show_default=True,
    metavar="auto|never|PATH",
    help="auto continues a named run. PATH or address: continue that run, or start a new one from that checkpoint.",
)
@processes_option
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="K",
    help="After a failure, start all processes again from the newest checkpoint, at most K times.",
)
@click.option(
    "--min-nproc",
    type=click.IntRange(min=1),
    metavar="M",
    help="With --max-restarts: if the same processes fail twice in a row, continue without them, with at least M.",
)
@click.option("--export", is_flag=True, help="Write the trained model to RUN/export in Hugging Face layout.")
@click.option("--quiet", "-q", is_flag=True, help="No dashboard, only warnings and errors.")
@click.option("--json", "as_json", is_flag=True, help="Like --quiet, but print one JSON object at the end.")
def train(
    request: Request,
    run_dir: str,
    name: str | None,
    resume: str,
    nproc: int | Literal["auto"],
    max_restarts: int,
    min_nproc: int | None,
    export: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Train as CONFIG says. CONFIG is a TOML file, the name of a preset (by default quickstart), a Hugging Face
    folder, whose model is trained further, or a pack of `forge runs pack`, whose run is repeated and compared.

    \b
    forge train                                  a small model of Python source, in about a minute
    forge train -p lion -s train.steps=200       with another optimizer, for 200 steps
    forge train my.toml --name first             a run in runs/first; repeat it to continue
    forge train --resume runs/first              the same, by its path
    forge train --from llama -s text.path=my     a Hugging Face folder's model, on your own text
    forge train --nproc 2                        on two processes of this machine
    forge train first.zip                        a packed run again
    """
    request = _with_name(request, name)
    setup: Setup | None = None
    again = Again(quiet=quiet, as_json=as_json)
    if not (quiet or as_json) and sys.stdout.isatty():
        click.echo(click.style("starting …", dim=True) + "\r", nl=False)  # the next output overwrites it
    with again:
        try:
            from forge_train_tools.configuration.setup import resolve

            _check_launch(nproc, max_restarts, min_nproc)
            resume = fetch(resume, Path(run_dir))
            request, nproc, resume = again.opened(request, nproc, resume)
            request = hugging_face(with_configuration(request, resume), run_dir)
            count = nproc if isinstance(nproc, int) else how_many(request)
            try:
                setup = resolve(request, world=count if count > 1 else here().size)
            except ConfigError as error:
                again.begin(None)
                error.args = (again.named(str(error)),)
                if nproc == AUTO and count > 1:
                    error.args = (f"{error}\n(--nproc auto starts {count} processes here; --nproc 1 starts one.)",)
                raise
            again.begin(setup)
            if export:
                check_exportable(setup)
            if quiet or as_json:
                setup.hooks.mute("console")
            else:
                show_progress()
            if count > 1 or max_restarts:
                from forge_train_tools.launching.training import train_several

                launched = train_several(
                    request,
                    setup,
                    run_dir=Path(run_dir),
                    resume=resume,
                    notable=_notable(request),
                    nproc=count,
                    max_restarts=max_restarts,
                    min_nproc=min_nproc,
                    quiet=quiet or as_json,
                )
                code = _told(launched, setup, count, again, quiet=quiet, as_json=as_json)
                if export:
                    export_trained(launched.run, quiet=quiet or as_json)
                return again.code(code)
            from forge_train.engine import train as train_run

            with told(lambda error, _: complain(str(error))):
                finished = train_run(setup, run_dir=Path(run_dir), resume=resume, notable=_notable(request))
        except Exception as error:
            return _failed(error, setup, again, as_json)
        if _first_process():
            _report(finished, next_commands(finished, setup), again, quiet=quiet, as_json=as_json)
        if export and _first_process():
            export_trained(finished.run, quiet=quiet or as_json)
        return again.code(finished.code)


def _check_launch(nproc: int | Literal["auto"], max_restarts: int, min_nproc: int | None) -> None:
    """Check that this process may start others, if it is asked to."""
    from forge_train_tools.launching.launch import check_alone

    if isinstance(nproc, int) or max_restarts:
        check_alone(f"--nproc {nproc}" if isinstance(nproc, int) else f"--max-restarts {max_restarts}")
    if min_nproc is not None and not max_restarts:
        raise ConfigError(f"--min-nproc {min_nproc} applies to restarts; add --max-restarts.")


def _with_name(request: Request, name: str | None) -> Request:
    if name is None:
        return request
    return dataclasses.replace(request, set=(*request.set, named(name)))


def _notable(request: Request) -> tuple[str, ...]:
    return tuple(sorted(plugin_name(spec) for spec in request.plugins))


def _rank() -> str:
    return os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"


def _first_process() -> bool:
    return _rank() == "0"


def _told(launched: Launched, setup: Setup, nproc: int, again: Again, *, quiet: bool, as_json: bool) -> int:
    """Report how a run of several processes ended; returns the exit code."""
    ended, run = launched.ended, launched.run
    if ended.signal:
        complain(f"Ended by {signal.Signals(ended.signal).name} before it could save.")
    elif complaint := ended.complaint():
        complain(complaint)
    if ended.code not in (0, INTERRUPTED):
        if ended.code == DivergedError.code:
            again.end(run)
        if as_json:
            last = Run(run).outcome()
            outcome = "diverged" if ended.code == DivergedError.code else "failed"
            failure = ended.first.as_failure()
            _print_result(run if run.is_dir() else None, last.get("step", 0), last.get("loss"), outcome, again, failure)
        else:
            _hint(run, ended.code, nproc)
        return ended.code
    finished = launched.finished
    with nullcontext() if quiet else waiting("finishing"):  # this process has not imported torch yet
        commands = next_commands(finished, setup, nproc)
    _report(finished, commands, again, nproc, quiet=quiet, as_json=as_json)
    return ended.code


def _report(
    finished: Finished,
    commands: Sequence[tuple[str, str]],
    again: Again,
    nproc: int = 1,
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    """Report how a run ended, and whether it repeats its pack."""
    if not (quiet or as_json):
        _close(finished, commands, nproc)
    if finished.outcome == "done":
        again.end(finished.run)
    if as_json:
        _print_result(finished.run, finished.step, finished.loss, finished.outcome, again)


def _hint(run: Path, code: int, nproc: int = 1) -> None:
    """The command to type after a failure that another attempt may survive."""
    if code not in (ConfigError.code, DivergedError.code) and any((run / "checkpoints").glob("step-*")):
        click.echo(f"Continue from the newest checkpoint with: {resume_command(run, nproc)}", err=True)


def _failed(error: Exception, setup: Setup | None, again: Again, as_json: bool) -> int:
    """Report how a run failed; returns the exit code."""
    run = setup.hooks.run if setup else None
    there = run is not None and run.dir.is_dir()
    code = report(error, run.dir / "log" / f"rank-{_rank()}.log" if run and there else None)
    if run is not None and there and isinstance(error, DivergedError) and _first_process():
        again.end(run.dir)
    if as_json:
        last = run.outcome() if run and there else {}
        outcome = "diverged" if isinstance(error, DivergedError) else "failed"
        failure = failure_of(error, int(_rank()))
        _print_result(
            run.dir if run and there else None, last.get("step", 0), last.get("loss"), outcome, again, failure
        )
    elif run and there and (isinstance(error, DiskError) or not isinstance(error, ForgeError)):
        _hint(run.dir, code)
    return code


def _print_result(
    run: Path | None, step: int, loss: float | None, outcome: str, again: Again, failure: Failure | None = None
) -> None:
    if _first_process():
        result = {"run": str(run) if run else None, "step": step, "loss": loss, "outcome": outcome}
        click.echo(dumps({**result, "error": failure.as_json() if failure else None, **again.as_json()}))


def _close(finished: Finished, commands: Sequence[tuple[str, str]], nproc: int = 1) -> None:
    """Show the plugins' final messages, and what to type next."""
    show_end(finished)
    if finished.outcome == "interrupted":
        click.echo(f"\nStopped ({finished.reason}) at step {finished.step}, which is saved. Go on with:")
        _first_activate()
        click.echo(f"  {resume_command(finished.run, nproc)}")
        return
    click.echo(click.style("\nNext", bold=True))
    _first_activate()
    for label, command in commands:
        _propose(label, command)


def _first_activate() -> None:
    """Say how the shell finds `forge`, if it does not."""
    if command := activation():
        _propose("first, once", command)


def _propose(label: str, command: str) -> None:
    """Show a command and its purpose; below each other if the terminal is too narrow for both."""
    beside = sum(map(len, (label.ljust(14), command))) + 4 <= screen.width()
    between = "  " if beside else "\n    "
    click.echo(f"  {click.style(label.ljust(14) if beside else label, dim=True)}{between}{command}")
