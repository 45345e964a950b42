"""`forge data show`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from forge_train.base.strict_json import dumps

from . import screen
from .options import json_option, run_options
from .samples import described, legend, print_tokens

if TYPE_CHECKING:
    from forge_train_tools.configuration.request import Request
    from forge_train_tools.offline.rows import Row

ROWS = 3
"""Rows that `--sample` shows."""


@click.command(short_help="Show what a run does with its data, stage by stage.")
@run_options()
@click.option("--world", default=1, show_default=True, type=click.IntRange(min=1), metavar="N", help="Number of ranks.")
@click.option("--sample", is_flag=True, help="Also show the first rows, token by token, and what of them is learned.")
@json_option
def show(request: Request, world: int, sample: bool, as_json: bool) -> None:
    """Resolve CONFIG as `forge train` would, and show what happens to its data: sources, tokens, rows, batches.

    \b
    forge data show
    forge data show -p sft -s sft.path=chats.jsonl --sample
    """
    from forge_train_tools.configuration.setup import resolve
    from forge_train_tools.offline.stages import stages

    found = stages(resolve(request, world=world, data=False), world)
    given = _first_rows(request) if sample else []
    if as_json:
        told = [asdict(one) for one in found]
        click.echo(dumps({"stages": told, "rows": [asdict(one) for one in given]} if sample else told, indent=1))
        return
    from rich.text import Text

    table = [(Text(one.stage, "bold"), one.text, Text(one.plugin, "dim")) for one in found]
    screen.table(("stage", "", "plugin"), table, indent=0)
    if given:
        screen.heading("Rows")
        screen.line(f"  {legend(masked=True)}", "dim")
    for number, row in enumerate(given):
        share = f"{row.learned:,} of {row.labels:,} labels are learned ({row.learned / row.labels:.1%})"
        screen.line(f"\nrow {number} · {share}", "bold")
        print_tokens(row.tokens)
        for item in row.items:
            screen.line(described(item), "dim")
        if row.padding:
            screen.line(f"and {row.padding:,} more of the last token", "dim")


def _first_rows(request: Request) -> list[Row]:
    from forge_train_tools.configuration.setup import resolve
    from forge_train_tools.offline.rows import rows

    return rows(resolve(request), ROWS)
