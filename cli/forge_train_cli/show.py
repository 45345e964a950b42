"""`forge data show`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from forge_train.base.strict_json import dumps

from . import screen
from .options import json_option, run_options

if TYPE_CHECKING:
    from forge_train_tools.configuration.request import Request


@click.command(short_help="Show what a run does with its data, stage by stage.")
@run_options()
@click.option("--world", default=1, show_default=True, type=click.IntRange(min=1), metavar="N", help="Number of ranks.")
@json_option
def show(request: Request, world: int, as_json: bool) -> None:
    """Resolve CONFIG as `forge train` would, and show what happens to its data: sources, tokens, rows, batches."""
    from forge_train_tools.configuration.setup import resolve
    from forge_train_tools.offline.stages import stages

    found = stages(resolve(request, world=world, data=False), world)
    if as_json:
        click.echo(dumps([asdict(one) for one in found], indent=1))
        return
    from rich.text import Text

    rows = [(Text(one.stage, "bold"), one.text, Text(one.plugin, "dim")) for one in found]
    screen.table(("stage", "", "plugin"), rows, indent=0)
