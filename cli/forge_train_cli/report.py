"""`forge runs report`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from forge_train.base.errors import ConfigError
from forge_train.base.format import format_bytes
from forge_train_tools.reporting.metrics import LARGE, METRICS_FILE
from forge_train_tools.reporting.runs import ReportedRun, reported
from forge_train_tools.run_folder import open_run, runs_in

from . import screen
from .options import run_dir_option
from .report_page import page, refreshed
from .runs import warn

EVERY = 5.0
"""Seconds between two looks at runs that are followed."""


@click.command(short_help="Write a report of runs as one HTML page.")
@click.argument("names", nargs=-1, metavar="[RUN...]")
@click.option("--out", "--output", "-o", "output", default="report.html", show_default=True, metavar="FILE",
              callback=screen.page, help="File to write; only a page made by forge is overwritten.")  # fmt: skip
@click.option("--follow", is_flag=True, help="Keep the page up to date until all runs have ended, or Ctrl-C.")
@run_dir_option
def report(names: tuple[str, ...], output: str, follow: bool, run_dir: str) -> None:
    """Write one page that shows runs side by side, by default all in the folder of runs: curves to zoom into, with
    checkpoints, anomalies and restarts; differences in their configurations, plugins and machines; evaluations,
    samples, mixtures of data, and what the model was composed of. The page loads nothing from elsewhere.

    \b
    forge runs report -o report.html
    forge runs report runs/first runs/lion -o report.html
    forge runs report runs/first --follow
    """
    folders = [open_run(name, Path(run_dir)) for name in dict.fromkeys(names)] if names else runs_in(Path(run_dir))
    if not folders:
        raise ConfigError(f"No runs in {run_dir}. Start one with: forge train")
    if (size := sum(file.stat().st_size for one in folders if (file := one.path / METRICS_FILE).is_file())) > LARGE:
        click.echo(f"Reading {format_bytes(size)} of metrics.", err=True)
    runs, problems = reported(folders)
    if problems and not runs:
        raise problems[0]
    for problem in problems:
        warn(problem)
    out = Path(output)
    if follow:
        runs = keep(runs, out)
    screen.write(out, page(runs, out))
    click.echo(f"{output}: {len(runs)} run{'s' if len(runs) > 1 else ''}")


def keep(runs: Sequence[ReportedRun], out: Path, wait: Callable[[float], None] = time.sleep) -> list[ReportedRun]:
    """Keep a page up to date until all of its runs have ended, or Ctrl-C. An open page takes new data from a script
    beside it, which is removed at the end.

    Args:
        runs: shown on the page.
        out: the page.
        wait: for some seconds.

    Returns: the runs at the end.
    """
    runs, beside = list(runs), out.with_name(f"{out.stem}.data.js")
    screen.check_own(beside, lambda begins: begins.startswith(b"forgeReport("), "data written by forge")
    screen.write(out, page(runs, out, beside))
    click.echo(f"{out} is kept up to date; Ctrl-C ends that.", err=True)
    try:
        while not all(run.ended for run in runs):
            wait(EVERY)
            runs = [_again(run) for run in runs]
            part = beside.with_suffix(".partial")
            screen.write(part, refreshed(runs, out))
            part.replace(beside)
        wait(2 * EVERY)  # for the page to take the last data
    except KeyboardInterrupt:
        click.echo("", err=True)
    finally:
        beside.unlink(missing_ok=True)
    return runs


def _again(run: ReportedRun) -> ReportedRun:
    """The run as it is now; as it was, while a file of it is being written."""
    try:
        return run.again()
    except ConfigError:
        return run
