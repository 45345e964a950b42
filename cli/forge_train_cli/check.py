"""`forge plugins check`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forge_train.base.errors import ConfigError
from forge_train.base.strict_json import dumps
from forge_train.registry.discovery import discover
from forge_train_kit.source import Source
from forge_train_tools.messages import waiting

from . import screen
from .new import PLACEHOLDER
from .options import json_option

if TYPE_CHECKING:
    from forge_train_tools.testing import Report

SIGNS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red"), "skip": ("–", "bright_black")}


@click.command(short_help="Try plugins against the contract.")
@click.argument("names", nargs=-1, metavar="[NAME...]")
@click.option(
    "--set", "-s", "assignments", multiple=True, metavar="KEY=VALUE", help="Set a value in a plugin's section."
)
@click.option(
    "--report", "file", type=click.Path(path_type=Path), metavar="FILE", help="Write a report as JSON, and a badge."
)
@json_option
def check(names: tuple[str, ...], assignments: tuple[str, ...], file: Path | None, as_json: bool) -> int:
    """Check that plugins keep the contract: import, hooks, slots on a tiny case, configuration, training, resume, and
    for transforms the same numbers on two processes as on one.

    NAME is a plugin's name, a dotted package.module:Class or a file; without NAME, every plugin is checked. Plugins
    that it requires are enabled too. The exit code is 1 if a check fails.

    The report of --report FILE.json says what was checked with which Forge, for the directory of plugins; the badge
    FILE.svg shows the plugin API.
    """
    from .checked import writable, write_report

    if assignments and len(names) != 1:
        raise ConfigError("--set is for one plugin's section: name exactly one plugin.")
    file = writable(file) if file else None
    reports = []
    for report in _reports(names, assignments):
        reports.append(report)
        if not as_json:
            _show(report, in_full=len(names) == 1)
    passed = all(report.passed for report in reports)
    if as_json:
        click.echo(dumps({"passed": passed, "plugins": [report.plain() for report in reports]}, indent=1))
    elif len(reports) != 1:
        failed = [report.ref.name for report in reports if not report.passed]
        click.echo(f"\n{len(failed)} of {len(reports)} fail: {', '.join(failed)}" if failed else "\nAll conform.")
    if file:
        badge = write_report(file, reports)
        click.echo(f"Wrote {file} and {badge}.", err=as_json)
    return 0 if passed else 1


def _reports(names: tuple[str, ...], assignments: tuple[str, ...]) -> Iterator[Report]:
    from forge_train_kit.plugins import find
    from forge_train_tools.testing import Check, Pool, Report, check

    for name in names:
        find(name)  # report a mistake in the last name before checking the first for minutes
    with tempfile.TemporaryDirectory(prefix="forge-check-") as folder, Pool(Path(folder)) as ranks:
        if names:
            for name in names:
                with waiting(f"checking {name}"):
                    report = check(name, sets=assignments, ranks=ranks)
                yield _written(report)
            return
        for name, found in {one.name: one for one in discover()}.items():
            try:
                with waiting(f"checking {name}"):
                    report = _written(check(name, ranks=ranks))
            except ConfigError as error:
                report = Report(found, [Check("has a name of its own", "fail", str(error))])
            yield report


def _written(report: Report) -> Report:
    """The report, with a failure if the plugin's docstring is still the scaffold's."""
    from forge_train_tools.testing import Check

    if (summary := Source(report.ref).summary).startswith(PLACEHOLDER):
        why = f"its docstring is still {summary!r}: say what the plugin does"
        report.checks.append(Check("its docstring is written", "fail", why))
    return report


def _show(report: Report, *, in_full: bool) -> None:
    """Show one plugin: every check, or only those that did not simply pass."""
    from rich.text import Text

    found = report.ref
    owner = f"{found.distribution} {found.version}".strip()
    sign = Text(*SIGNS["ok" if report.passed else "fail"])
    count = f"{len(report.of('ok'))} of {len(report.checks)} checks"
    screen.line(Text.assemble(sign, " ", (found.name, "bold"), "  ", (f"{owner}, {count}", "dim")))
    shown = [one for one in report.checks if one.status != "ok" or in_full]
    rows = [
        (Text.assemble(SIGNS[one.status], " ", one.name), Text(one.detail, "dim" if one.status == "ok" else ""))
        for one in shown
    ]
    screen.table(("", ""), rows, indent=4)
