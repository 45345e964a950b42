"""`forge debug`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forge_train.base.strict_json import dumps
from forge_train_tools.messages import waiting

from . import screen
from .lazy import LazyGroup
from .options import json_option, set_option

if TYPE_CHECKING:
    from forge_train_tools.offline.replay import Replayed

COMMANDS = {
    "look": (".look:look", "Show what passes through a model while it reads a text."),
    "step": (".debug:step", "Replay one recorded step."),
}
SHOWN = 12


@click.group(cls=LazyGroup, table=COMMANDS, short_help="Look into a run.")
def debug() -> None:
    """Look into a run."""


@click.command(short_help="Replay one recorded step.")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("number", metavar="N", type=click.IntRange(min=1))
@set_option
@json_option
def step(run: Path, number: int, assignments: tuple[str, ...], as_json: bool) -> None:
    """Replay step N of RUN on one process, from the newest checkpoint before it: its batch, the loss of each token, and
    the gradient norm of each parameter. Nothing is written.

    \b
    forge debug step runs/first 412
    forge debug step runs/first 412 --json > step.json
    forge debug step runs/first 412 -s train.micro_batch=1      less memory
    """
    with waiting(f"repeating {run} up to step {number}"):
        from forge_train_tools.offline.replay import replay

        found = replay(run, number, settings=assignments)
    if as_json:
        click.echo(dumps(dataclasses.asdict(found)))
    else:
        _show(found)


def _show(found: Replayed) -> None:
    begun = f"{found.repeated} steps after {found.checkpoint}" if found.checkpoint else "from the initial weights"
    screen.line(
        f"Step {found.step} of {found.run}, {begun}, on sequences {found.data_range[0]} to {found.data_range[1]}"
    )
    rows = [
        ("loss", f"{found.loss:.7g}", _recorded(found.recorded_loss)),
        ("gradient norm", f"{found.grad_norm:.7g}", _recorded(found.recorded_grad_norm)),
    ]
    screen.table(("", "now", "recorded"), rows, right=(1, 2))
    screen.heading("Largest gradients")
    largest = sorted(found.gradients.items(), key=lambda one: (one[1] == one[1], -one[1]))[:SHOWN]  # NaN first
    screen.table(("parameter", "norm"), [(name, f"{norm:.4g}") for name, norm in largest], right=(1,))
    screen.heading("Tokens with the largest loss")
    tokens = [
        (place, position, row.labels[position], loss)
        for place, row in enumerate(found.sequences)
        for position, loss in enumerate(row.losses)
        if loss is not None
    ]
    tokens.sort(key=lambda one: (one[3] == one[3], -one[3]))
    worst = [(place, position, label, f"{loss:.4g}") for place, position, label, loss in tokens[:SHOWN]]
    if worst:
        screen.table(("sequence", "position", "token", "loss"), worst, right=(0, 1, 2, 3))
    else:
        screen.line("  The head gives no token logits.", "dim")


def _recorded(value: float | None) -> str:
    return "not logged" if value is None else f"{value:.7g}"
