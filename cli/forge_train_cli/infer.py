"""`forge infer`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forge_train.base.strict_json import dumps
from forge_train_kit.format import format_plural
from forge_train_tools.messages import say, waiting

from . import screen
from .options import json_option, names_of, nproc_option, plugins_option, set_option
from .sampling import template_option

if TYPE_CHECKING:
    from forge_train_tools.inference.infer import Inferred


@click.command("infer", short_help="Write what a trained model gives for each record of a data set.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--data", multiple=True, required=True, metavar="SOURCE", help="Files, folders or patterns of records.")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="The file to write: .jsonl, .parquet or .safetensors."
)
@click.option(
    "--outputs",
    multiple=True,
    metavar="A,B",
    callback=names_of,
    help="What to write; by default what fits the model's head.",
)
@click.option(
    "--field", default="", metavar="NAME", help="Field of the text; by default text, or prompt and completion."
)
@click.option(
    "--long",
    type=click.Choice(["refuse", "left", "windows"]),
    default="refuse",
    help="Refuse records that are longer than what the model reads at once, cut them on their left, or read texts in "
    "windows.",
)
@template_option
@click.option("--batch", default=8, metavar="N", help="Records that pass through the model together (8).")
@plugins_option
@set_option
@nproc_option()
@json_option
def infer(assignments: tuple[str, ...], nproc: int | None, as_json: bool, **asked: Any) -> None:
    """Write what the model of PATH, a run, a checkpoint or a Hugging Face folder, gives for each record: a line of
    JSON, a row of Parquet, or a row of tensors, in the order of the records. A command that was stopped continues where
    it was, on any number of processes.

    A model of tokens gives the log-likelihood of the text, or of the completion after its prompt; a classifier the
    class and the probabilities; others their embedding or reward. `--outputs hidden` gives the hidden state of the last
    token, `layers.*.hidden` that after each layer, and `hidden_mean` the mean over all tokens.

    \b
    forge infer runs/first --data texts.jsonl --out scores.jsonl
    forge infer Qwen3-0.6B --data questions.jsonl --out scores.jsonl --long left
    forge infer runs/first --data texts.jsonl --out states.safetensors --outputs hidden --nproc 2
    forge infer runs/big --data texts.jsonl --out scores.jsonl --nproc 4 -p tp -s parallel.tp=2
    """
    from forge_train_tools.inference.infer import Inference
    from forge_train_tools.inference.infer import infer as run

    job = Inference(**asked, set=assignments)
    with waiting("reading records"):
        found = run(job, nproc=nproc or 1, told=say)
    if as_json:
        click.echo(dumps(dataclasses.asdict(found)))
    else:
        _show(found)


def _show(found: Inferred) -> None:
    processes = f" on {found.world} processes" if found.world > 1 else ""
    screen.line(f"{found.checkpoint}, step {found.step}{processes}", "bold")
    screen.line(
        f"  {format_plural(found.records, 'record')} in {found.out}; {found.tokens:,} tokens in {found.seconds:.1f} s, "
        f"{found.tokens / max(found.seconds, 1e-9):,.0f} tokens/s"
    )
    if found.cut:
        were = "record was cut on its" if found.cut == 1 else "records were cut on their"
        screen.line(f"  {found.cut:,} {were} left; `cut` says by how many tokens.", "yellow")
    if found.not_finite:
        screen.line(f"  A value is not finite in {format_plural(found.not_finite, 'record')}.", "red")
