"""`forge eval`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forge_train.base.strict_json import dumps

from . import screen
from .options import json_option, nproc_option, plugins_option, set_option

if TYPE_CHECKING:
    from forge_train_tools.offline.evaluate import Evaluated


@click.command("eval", short_help="Evaluate a trained model as its run does.")
@click.argument("path", type=click.Path(path_type=Path))
@plugins_option
@set_option
@nproc_option()
@json_option
def evaluate(
    path: Path, plugins: tuple[str, ...], assignments: tuple[str, ...], nproc: int | None, as_json: bool
) -> None:
    """Evaluate the model of PATH, a run (its newest whole checkpoint), a checkpoint or a Hugging Face folder: the loss
    on held-out text, and every evaluation that its plugins define. Nothing is written.

    \b
    forge eval runs/first
    forge eval runs/first/checkpoints/step-00000100 -s train.evaluate_batches=50
    forge eval Qwen3-0.6B -s text.path=my-texts
    forge eval runs/first --nproc 2 -p my_package.plugin:Accuracy
    """
    from forge_train_tools.offline.evaluate import evaluate as run
    from forge_train_tools.offline.opening import Wanted

    found = run(path, wanted=Wanted(plugins, assignments), nproc=nproc or 1)
    if as_json:
        click.echo(dumps(dataclasses.asdict(found)))
    else:
        _show(found)


def _show(found: Evaluated) -> None:
    processes = f" on {found.world} processes" if found.world > 1 else ""
    screen.line(f"{found.checkpoint}, step {found.step}{processes}", "bold")
    rows = [("held out", "loss", f"{found.loss:.5g}"), ("", "tokens", f"{found.tokens:,}")]
    before = ""
    for key, value in found.metrics.items():
        name, _, metric = key.partition(".")
        rows.append(("" if name == before else name, metric, f"{value:.5g}"))
        before = name
    screen.table(("evaluation", "metric", "value"), rows, right=(2,))
    if found.unlike_training:
        names = " and ".join(found.unlike_training)
        screen.line(f"  During training, {names} may evaluate other weights. These are the checkpoint's own.", "dim")
