"""`forge runs`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from forge_train.base.errors import ConfigError
from forge_train.base.format import format_bytes
from forge_train.base.strict_json import dumps
from forge_train_kit.format import format_number, sparkline
from forge_train_tools.run_folder import RunFolder, differences, open_run, runs_in

from . import of_tasks, screen
from .lazy import LazyGroup
from .options import json_option, run_dir_option

COMMANDS = {
    "list": (".runs:list_runs", "List the runs of a folder, newest first."),
    "show": (".runs:show", "Show one run: how it went, and how it was made."),
    "compare": (".runs:compare", "Compare several runs side by side."),
    "pack": (".pack:pack", "Write a run as one file that repeats it."),
    "report": (".report:report", "Write a report of runs as one HTML page."),
}
CURVE = 60
"""Columns of a loss curve."""


@click.group(cls=LazyGroup, table=COMMANDS, short_help="Look at past runs, and compare them.")
def runs() -> None:
    """Look at past runs, and compare them."""


@click.command("list", short_help="List the runs of a folder, newest first.")
@run_dir_option
@json_option
def list_runs(run_dir: str, as_json: bool) -> None:
    """List the runs of a folder, newest first."""
    found = [history for history in runs_in(Path(run_dir)) if _readable(history)]
    if as_json:
        click.echo(dumps([history.summary() for history in found], indent=1))
        return
    if not found:
        click.echo(f"No runs in {run_dir}. Start one with: forge train")
        return
    headers = ["run", "outcome", "step", "loss", "ended", "held out", "curve"]
    rows = [
        (
            history.name,
            history.outcome,
            f"{history.step:,}",
            _number(history.last.get("loss")),
            _ago(history.changed),
            _held_out(history),
            sparkline(history.losses, 12),
        )
        for history in found
    ]
    # Columns without room in the terminal are left out. Names stay whole, because they are there to be copied.
    room = screen.console().width - max(len(history.name) for history in found)
    shown = next((count for count, need in ((7, 75), (6, 61), (5, 44), (4, 30)) if room >= need), 3)
    screen.table(headers[:shown], [row[:shown] for row in rows], right=(2,), indent=0)


def _readable(history: RunFolder) -> bool:
    """Return True if a run can be listed; warn about a damaged run, which does not hide the others."""
    try:
        history.summary()
    except ConfigError as error:
        warn(error)
        return False
    return True


def whole(histories: Sequence[RunFolder], *, least: int) -> list[RunFolder]:
    """The runs of which every file can be read; warns about the others.

    Raises:
        ConfigError: naming a damaged file, if fewer than `least` runs are left.
    """
    left: list[RunFolder] = []
    problems: list[ConfigError] = []
    for history in histories:
        try:
            history.check()
            left.append(history)
        except ConfigError as error:
            problems.append(error)
    if problems and len(left) < least:
        raise problems[0]
    for problem in problems:
        warn(problem)
    return left


def _measured(line: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The measurements of a line of metrics.jsonl."""
    return [(key, value) for key, value in line.items() if key not in ("timing", "version")]


def warn(error: ConfigError) -> None:
    """Say that a damaged run is left out."""
    click.echo(f"{click.style('Warning:', fg='yellow')} {error} The run is left out.", err=True)


@click.command(short_help="Show one run: how it went, and how it was made.")
@click.argument("run", required=False)
@run_dir_option
@json_option
def show(run: str | None, run_dir: str, as_json: bool) -> None:
    """Show RUN: a path, or a name in the folder of runs; the newest one if none is given."""
    history = open_run(run, Path(run_dir))
    if as_json:
        click.echo(dumps(history.details(), indent=1))
        return
    screen.line(history.name, "bold")
    screen.line(f"{history.outcome} at step {history.step:,}{_and_why(history)} · {history.path}")
    if history.losses:
        screen.heading("Loss")
        screen.line(f"  {sparkline(history.losses, CURVE)}")
        screen.line(f"  {format_number(history.losses[0])} → {format_number(history.losses[-1])}", "dim")
    if history.evaluations:
        screen.heading("Held out")
        names = list(history.evaluations[-1])
        lines = _spread(history.evaluations, 8)
        screen.table(names, [[_number(line.get(name)) for name in names] for line in lines], right=range(len(names)))
    if history.last:
        screen.heading("Last step")
        screen.table(("", ""), [(key, _number(value)) for key, value in _measured(history.last)])
    of_tasks.show([history])
    screen.heading("Plugins")
    screen.table(("", "", ""), [(one["name"], one["distribution"], one["version"]) for one in history.plugins])
    screen.heading("Checkpoints")
    rows = [(path.name, format_bytes(size)) for path, size in history.checkpoints()]
    screen.table(("", ""), rows, right=(1,)) if rows else screen.line("  none")
    if history.artifacts:
        screen.heading("Artifacts")
        made = [
            (screen.visible(one["path"], ""), f"{one['bytes']:,} bytes", one["plugin"], _state(one))
            for one in history.artifacts
        ]
        screen.table(("", "", "", ""), made, right=(1,))
    screen.heading("Made with")
    screen.table(("", ""), _environment(history))


@click.command(short_help="Compare several runs side by side.")
@click.argument("names", nargs=-1, required=True, metavar="RUN RUN...")
@run_dir_option
@json_option
def compare(names: tuple[str, ...], run_dir: str, as_json: bool) -> None:
    """Show where runs differ, in their configurations and in their results."""
    if len(names) < 2:
        raise ConfigError("Name at least two runs; `forge runs list` shows them.")
    histories = whole([open_run(name, Path(run_dir)) for name in names], least=2)
    differing = differences([history.config for history in histories])
    results = _results(histories)
    if as_json:
        keys = [str(history.path) for history in histories]
        sides = [dict(zip(keys, values, strict=True)) for values in [*differing.values(), *results.values()]]
        cut = len(differing)
        click.echo(
            dumps(
                {
                    "runs": keys,
                    "config": dict(zip(differing, sides[:cut], strict=True)),
                    "results": dict(zip(results, sides[cut:], strict=True)),
                    **of_tasks.plain(histories),
                },
                indent=1,
            )
        )
        return
    headers = ("", *(history.name for history in histories))
    screen.heading("What differs")
    if differing:
        screen.table(headers, [(key, *map(_value, values)) for key, values in differing.items()])
    else:
        screen.line("  nothing in the configuration")
    screen.heading("Results")
    rows = [(key, *map(_number, values)) for key, values in results.items()]
    curve = max((screen.console().width - 2 - max(map(len, results))) // len(histories) - 2, 8)
    rows.append(("curve", *(sparkline(history.losses, min(curve, 40)) for history in histories)))
    screen.table(headers, rows)
    of_tasks.show(histories)


def _results(histories: list[RunFolder]) -> dict[str, list[Any]]:
    """The end of every run: all metrics that any of them has, then evaluations."""
    tables = [
        {
            "outcome": history.outcome,
            **dict(_measured(history.last)),
            **{f"held out {key}": value for key, value in history.evaluation.items() if key != "step"},
        }
        for history in histories
    ]
    keys = list(dict.fromkeys(key for entry in tables for key in entry))
    return {key: [entry.get(key) for entry in tables] for key in keys}


def _environment(history: RunFolder) -> list[tuple[str, str]]:
    known = history.environment
    git = known.get("git") or {}
    return [
        (
            "forge",
            f"{known.get('forge')}  git {git['commit'][:10]}{' + changes' if git['dirty'] else ''}"
            if git
            else str(known.get("forge")),
        ),
        ("python", f"{known.get('python')}, torch {known.get('torch')}"),
        ("machine", ", ".join([*known.get("devices", ()), f"{known.get('cpus')} CPUs", str(known.get("platform"))])),
        ("command", " ".join(known.get("argv", ()))),
    ]


def _state(artifact: Mapping[str, Any]) -> object:
    """The hash of an artifact that exists, or else what is wrong with it."""
    from rich.text import Text

    whole = f"sha256 {artifact['sha256'][:12]}"
    wrong = {"missing": "is missing", "changed": "has another size now"}.get(artifact["state"])
    return Text(wrong, style="yellow") if wrong else whole


def _and_why(history: RunFolder) -> str:
    return f" ({history.reason})" if history.reason else ""


def _held_out(history: RunFolder) -> str:
    words = next((key for key in history.evaluation if key.endswith(".bits_per_byte")), "loss")
    value = history.evaluation.get(words)
    unit = " bits/byte" if words.endswith(".bits_per_byte") else ""
    return "" if value is None else f"{format_number(value)}{unit}"


def _spread(lines: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """At most this many lines, evenly spaced, including the last."""
    if len(lines) <= count:
        return lines
    return [lines[round(index * (len(lines) - 1) / (count - 1))] for index in range(count)]


def _number(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return format_number(value) if isinstance(value, float) else str(value)


def _value(value: Any) -> str:
    return "–" if value is None else json.dumps(value, ensure_ascii=False)


def _ago(moment: float) -> str:
    minutes = int((time.time() - moment) / 60)
    if minutes >= 24 * 60:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))
    return "just now" if minutes < 1 else f"{minutes} min ago" if minutes < 60 else f"{minutes // 60} h ago"
