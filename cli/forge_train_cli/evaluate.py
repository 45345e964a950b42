"""`forge eval`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forge_train.base.errors import ConfigError
from forge_train.base.strict_json import dumps
from forge_train_kit.format import format_number
from forge_train_tools.messages import say, waiting

from . import screen
from .options import json_option, nproc_option, plugins_option, set_option

if TYPE_CHECKING:
    from forge_train_tools.evaluation.job import EvaluatedTasks
    from forge_train_tools.offline.evaluate import Evaluated


@click.command("eval", short_help="Evaluate a trained model as its run does, or on tasks.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--task",
    "tasks",
    multiple=True,
    metavar="TASK",
    help="A file of tasks (.toml) or of records (.jsonl), a task of lm-eval, or a YAML file for it.",
)
@click.option("--limit", default=0, metavar="N", help="Take the first N records of each task; 0 means all.")
@click.option("--batch", default=8, metavar="N", help="Requests that pass through the model together (8).")
@click.option(
    "--samples", type=click.Path(path_type=Path), metavar="DIR", help="Keep each request and answer in a new folder."
)
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="RESULTS",
    help="Compare with a run, a checkpoint or a folder of samples by a paired test.",
)
@plugins_option
@set_option
@nproc_option()
@json_option
def evaluate(
    path: Path,
    tasks: tuple[str, ...],
    limit: int,
    batch: int,
    samples: Path | None,
    against: Path | None,
    plugins: tuple[str, ...],
    assignments: tuple[str, ...],
    nproc: int | None,
    as_json: bool,
) -> None:
    """Evaluate the model of PATH, a run (its newest whole checkpoint), a checkpoint or a Hugging Face folder: on tasks;
    or without --task as its run does, which is the loss on held-out text and every evaluation that its plugins define.
    Results of tasks are written to the run.

    \b
    forge eval runs/first
    forge eval runs/first/checkpoints/step-00000100 -s train.evaluate_batches=50
    forge eval Qwen3-0.6B -s text.path=my-texts
    forge eval runs/first --nproc 2 -p my_package.plugin:Accuracy
    forge eval runs/first --task tasks.toml --samples answers
    forge eval runs/second --task tasks.toml --against runs/first
    """
    if not tasks:
        return _as_its_run(path, plugins, assignments, nproc, as_json, (limit, batch, samples, against))
    from forge_train_tools.evaluation.job import Evaluation, evaluate_tasks

    asked = Evaluation(
        path=path,
        tasks=tasks,
        limit=limit,
        batch=batch,
        samples=samples,
        against=against,
        plugins=plugins,
        set=assignments,
    )
    with waiting("evaluating"):
        found = evaluate_tasks(asked, nproc=nproc or 1, told=say)
    if as_json:
        click.echo(dumps(found.plain()))
    else:
        _show_tasks(found)
    return None


def _as_its_run(
    path: Path,
    plugins: tuple[str, ...],
    assignments: tuple[str, ...],
    nproc: int | None,
    as_json: bool,
    of_tasks: tuple[object, ...],
) -> None:
    if of_tasks != (0, 8, None, None):
        raise ConfigError("--limit, --batch, --samples and --against are for tasks; name one with --task.")
    with waiting("evaluating"):
        from forge_train_tools.offline.evaluate import evaluate as run
        from forge_train_tools.offline.opening import Wanted

        found = run(path, wanted=Wanted(plugins, assignments), nproc=nproc or 1)
    if as_json:
        click.echo(dumps(dataclasses.asdict(found)))
    else:
        _show(found)


def _show(found: Evaluated) -> None:
    _headline(found)
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


def _headline(found: Evaluated | EvaluatedTasks) -> None:
    processes = f" on {found.world} processes" if found.world > 1 else ""
    screen.line(f"{found.checkpoint}, step {found.step}{processes}", "bold")


def _show_tasks(found: EvaluatedTasks) -> None:
    _headline(found)
    rows = []
    for name, task in found.tasks.items():
        for at, (metric, one) in enumerate(task.metrics.items()):
            first = (name, f"{task.records:,}") if not at else ("", "")
            error = "–" if one.error is None else format_number(one.error)
            rows.append((*first, metric, format_number(one.value), error))
    screen.table(("task", "records", "metric", "value", "± error"), rows, right=(1, 3, 4))
    for name, task in found.tasks.items():
        if task.cut:
            were = "request was" if task.cut == 1 else "requests were"
            screen.line(f"  {name}: {task.cut:,} {were} too long for the model, and cut on the left.", "yellow")
    if found.differences is not None:
        _show_differences(found)
    if found.recorded:
        screen.line(f"  Written to {found.recorded}; `forge runs compare` shows it.", "dim")


def _show_differences(found: EvaluatedTasks) -> None:
    rows = [
        (
            name if not at else "",
            metric,
            format_number(one.before),
            format_number(one.now),
            format_number(one.difference),
            "–" if one.error is None else format_number(one.error),
            f"{one.p:.4f}",
        )
        for name, table in (found.differences or {}).items()
        for at, (metric, one) in enumerate(table.items())
    ]
    if rows:
        screen.heading("Paired, by record")
        screen.table(("task", "metric", "before", "now", "difference", "± error", "p"), rows, right=range(2, 7))
    if other := [name for name, table in (found.differences or {}).items() if not table]:
        screen.line(
            f"  Not compared, because the questions, right answers or checks differ: {', '.join(other)}.", "yellow"
        )
    if absent := [name for name in found.tasks if name not in (found.differences or {})]:
        screen.line(f"  Not compared, because there is no result: {', '.join(absent)}.", "yellow")
