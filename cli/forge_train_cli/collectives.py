"""`forge plan --check-collectives`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from forge_train.base.errors import ConfigError
from forge_train.base.strict_json import dumps
from forge_train_kit.format import format_plural
from forge_train_tools.messages import waiting

from . import screen

if TYPE_CHECKING:
    from forge_train_tools.configuration.request import Request
    from forge_train_tools.ordering import Checked

SHOWN = 12
"""Classes and faults that the screen shows."""


def run(request: Request, world: int, nodes: int | None, others: Mapping[str, object], *, as_json: bool) -> int:
    """Check, show the result, and return the exit code: 1 for a fault, and where something could not be checked.

    Raises:
        ConfigError: for options that have no effect here.
    """
    if given := [name for name, value in others.items() if value]:
        raise ConfigError(f"--{given[0]} is of no use with --check-collectives; leave it out.")
    with waiting(f"rehearsing the collectives of {format_plural(world, 'rank')}"):
        from forge_train_tools.configuration.setup import resolve
        from forge_train_tools.ordering import check_collectives

        setup = resolve(request, world=world, data=False)
        checked = check_collectives(setup, world=world, nodes=nodes or 0)
    if as_json:
        click.echo(dumps(dataclasses.asdict(checked), indent=1))
    else:
        _show(checked, str(setup.config.source))
    return 1 if checked.faults or checked.notes else 0


def _show(checked: Checked, source: str) -> None:
    screen.line(f"{source} on {format_plural(checked.world, 'rank')}", "bold")
    batches = "1 micro-batch" if checked.micro_batches == 1 else f"{checked.micro_batches} micro-batches"
    screen.line(f"{format_plural(checked.rehearsed, 'rank')} rehearsed, with {batches}")
    if not checked.groups:
        screen.line("No rank calls a collective.")
    screen.heading("Ranks that call the same")
    rows = [(one.name, f"{one.ranks:,}", f"{one.first:,}", f"{one.calls:,}") for one in checked.classes[:SHOWN]]
    screen.table(("", "ranks", "first", "calls"), rows, right=(1, 2, 3))
    if len(checked.classes) > SHOWN:
        screen.line(f"  … {len(checked.classes) - SHOWN} more; --json has all", "dim")
    for fault in checked.faults[:SHOWN]:
        screen.heading(f"Fault: {fault.kind}")
        alike = f" The same of {fault.alike - 1} more." if fault.alike > 1 else ""
        screen.line(f"  {fault.message}{alike}", "red")
        for side in fault.sides:
            if side.call:
                plugin = f" ({side.plugin})" if side.plugin else ""
                screen.line(f"  rank {side.first}, {side.part}: {side.place}{plugin}")
    if len(checked.faults) > SHOWN:
        screen.line(f"  … {len(checked.faults) - SHOWN} more; --json has all", "dim")
    for note in checked.notes:
        screen.line(f"Not checked: {note}", "yellow")
    if checked.notes and not checked.faults:
        screen.line("No fault in what was checked.", "yellow")
    elif not checked.faults:
        screen.line("")
        screen.line("All ranks make the same calls in every group, and no circle of ranks waits for itself.", "green")
