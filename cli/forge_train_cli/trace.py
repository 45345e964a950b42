"""`forge trace`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from forge_train.base.errors import ConfigError
from forge_train.base.format import format_bytes
from forge_train.base.strict_json import dumps
from forge_train_tools.configuration.request import Request
from forge_train_tools.messages import waiting

from . import screen
from .options import json_option, nproc_option, run_options

if TYPE_CHECKING:
    from forge_train_tools.tracing.analysis import Analysis

CALM = "No rank waited long for another one."
OFTEN = 8
"""Sentences about waits that are shown."""


@click.command(short_help="Show one step of every rank as a timeline.")
@run_options()
@nproc_option()
@click.option("--step", type=click.IntRange(min=1), metavar="N", help="Step to trace; the third by default.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="The timeline as a page (.html).")
@click.option(
    "--chrome",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The timeline for Perfetto (.json), too or instead.",
)
@json_option
def trace(
    request: Request, nproc: int | None, step: int | None, out: Path | None, chrome: Path | None, as_json: bool
) -> None:
    """Train CONFIG up to step N on local processes, and show that step: what each rank computed, which collectives it
    took part in, with bytes, peers, plugin and line, and for whom it waited. Numbers are those of the run without a
    trace. No run folder is made.

    \b
    forge trace quickstart --nproc 2 -p fsdp2 --out trace.html
    forge trace quickstart --nproc 2 -p tp -s parallel.tp=2 --chrome trace.json
    forge trace quickstart --nproc 2 -p fsdp2 --json
    """
    _check(out, chrome)
    until = f"step {step}" if step else "the step that is shown"
    with waiting(f"training up to {until} on {nproc} processes" if nproc else f"training up to {until}"):
        from forge_train_tools.tracing import trace as run

        recorded = run(request, nproc or 1, step=step)
    from forge_train_tools.tracing.analysis import Analysis
    from forge_train_tools.tracing.chrome import events

    from .trace_page import page

    found = Analysis(recorded)
    if out:
        screen.write(out, page(found))
    if chrome:
        screen.write(chrome, dumps(events(found)))
    if as_json:
        click.echo(dumps(found.as_json(), indent=1))
        return
    _show(found)
    for file in filter(None, (out, chrome)):
        screen.line(f"  {file}", "dim")


def _check(out: Path | None, chrome: Path | None) -> None:
    """Check the files before anything is computed.

    Raises:
        ConfigError: for another ending, a folder that is not there, or a file that is somebody else's.
    """
    for option, file, ending in (("--out", out, ".html"), ("--chrome", chrome, ".json")):
        if file is None:
            continue
        if file.suffix != ending:
            raise ConfigError(f"{option} {file}: expected a file that ends with {ending}.")
        if not file.absolute().parent.is_dir():
            raise ConfigError(f"{option} {file}: the folder {file.absolute().parent} does not exist.")
    if out:
        screen.check_own(out, lambda begins: screen.GENERATOR.encode() in begins, "a page written by forge")
    if chrome:
        screen.check_own(chrome, lambda begins: begins.startswith(b'{"traceEvents"'), "a trace written by forge")


def _show(found: Analysis) -> None:
    trace = found.trace
    screen.line(f"Step {trace.step}: {trace.seconds * 1e3:.1f} ms", "bold")
    screen.table(("", "compute", "communication", "waiting"), shares(found), right=(1, 2, 3))
    if len(trace.ranks) > 1:
        screen.heading("Collectives of rank 0")
        screen.table(COLUMNS, collectives(found, 0), right=(2, 3, 4))
        screen.heading("Waiting")
        for text in [one.sentence for one in found.told[:OFTEN]] or [CALM]:
            screen.line(f"  {text}")
    for note in remarks(found):
        screen.line(f"  {note}.", "yellow")


COLUMNS = ("", "axis", "count", "bytes", "waited", "plugin")


def shares(found: Analysis) -> list[tuple[str, str, str, str]]:
    """A line for each rank."""
    lines = []
    for rank, share in zip(found.trace.ranks, found.shares, strict=True):
        parts = (share.compute, share.communication, share.waiting)
        whole = sum(parts) or 1.0
        compute, communication, waiting = (f"{part / whole:.0%}" for part in parts)
        lines.append((rank.name, compute, communication, waiting))
    return lines


def collectives(found: Analysis, rank: int) -> list[tuple[str, str, int, str, str, str]]:
    """A line for each kind and axis, of one rank."""
    return [
        (one.kind, one.axis, one.count, format_bytes(one.bytes), f"{one.seconds * 1e3:.1f} ms", one.plugin)
        for one in found.sums
        if one.rank == rank
    ]


def remarks(found: Analysis) -> list[str]:
    """Notes on how to read the times."""
    notes = dict.fromkeys(note for rank in found.trace.ranks for note in rank.notes)
    if found.trace.device != "cpu":
        notes["Times are the host's: a device works beside it, and the plugin profile shows its kernels"] = None
    return [*notes]
