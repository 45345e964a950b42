"""What tasks cost a run that evaluates: the CPU time of one thread, beside that of their forward passes alone.

    python benchmarks/evaluating_training.py   # writes benchmarks/results/evaluating-training.md, in five minutes

Forward passes are what an evaluation no longer takes if the model and its head give at once what they gave before.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import textwrap

import torch
from evaluating import TASKS, write_tasks

from forge_train import Loader, Model
from forge_train.step.forward import Evaluations, Forward
from forge_train_kit import evaluators
from forge_train_kit.contract import Evaluator
from forge_train_tools import train
from forge_train_tools.generation.forwards import Forwards

RESULTS = Path(__file__).parent / "results" / "evaluating-training.md"
ROUNDS, TOKENS = 4, 16
MODEL: dict[str, Any] = {"decoder.dim": 256, "decoder.layers": 4, "decoder.heads": 8, "train.sequence": 128}
BAR = 1.02
HARNESS = """\
task: harness
dataset_path: json
dataset_kwargs: {data_files: {test: choices.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
KINDS: Mapping[str, str] = {
    "500 choices, from a local file": "scored.toml",
    "500 choices, by lm-eval": "harness.yaml",
    "250 answers, written": "written.toml",
}


@dataclass
class Clock:
    """CPU seconds of this thread, of each evaluation."""

    whole: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(whole / passes for whole, passes in zip(self.whole, self.passes, strict=True))


@contextmanager
def replaced(model: Model, by: Callable[[Callable[..., Any], list[Any]], Callable[..., Any]]) -> Iterator[None]:
    """A block in which what computes (the model, its head, a forward of one that writes) is replaced."""
    (part,) = model.parts
    calls: dict[Any, str] = {part: "forward", part.get_submodule("head"): "forward", Forwards: "__call__"}
    with ExitStack() as stack:
        for at, (owner, name) in enumerate(calls.items()):
            stack.enter_context(patch.object(owner, name, by(getattr(owner, name), KNOWN[at])))
        yield


KNOWN: tuple[list[Any], ...] = ([], [], [])
"""What each gave."""


def noting(call: Callable[..., Any], known: list[Any]) -> Callable[..., Any]:
    known.clear()

    def called(*rest: Any, **more: Any) -> Any:
        known.append(call(*rest, **more))
        return known[-1]

    return called


def replaying(_: Callable[..., Any], known: list[Any]) -> Callable[..., Any]:
    left = iter([*known])
    return lambda *_, **__: next(left)


def measured(task: str, folder: str) -> Clock:
    """A run that asks a task at each of its steps. Each evaluation is timed whole, and again without computing."""
    clock, apart = Clock(), [0.0]
    measure, mean_loss, run = evaluators.measure, Forward.mean_loss, Evaluations.run

    def measured_twice(forward: Forward, evaluator: Evaluator, data: Loader, *rest: Any) -> None:
        start, began = data.state_dict(), time.thread_time()
        with replaced(forward.model, noting):
            measure(forward, evaluator, data, *rest)
        between = time.thread_time()
        data.load_state_dict(start)
        with replaced(forward.model, replaying):
            measure(forward, evaluator, data, *rest)
        again = time.thread_time() - between
        clock.passes.append(between - began - again)
        apart[0] += again

    def held_out(*rest: Any) -> Any:
        began = time.thread_time()
        found = mean_loss(*rest)
        apart[0] += time.thread_time() - began
        return found

    def timed(*rest: Any) -> Any:
        began, apart[0] = time.thread_time(), 0.0
        found = run(*rest)
        clock.whole.append(time.thread_time() - began - apart[0])
        return found

    settings = {"run.device": "cpu", "train.steps": ROUNDS, "train.evaluate_every": 1, "train.evaluate_batches": 1}
    sizes = {"train.global_batch": 8, "train.micro_batch": 8, "checkpoint.every": 0, "text.path": textwrap.__file__}
    asked = {"lm_eval.tasks": [task]}
    with (
        patch.object(evaluators, "measure", measured_twice),
        patch.object(Forward, "mean_loss", held_out),
        patch.object(Evaluations, "run", timed),
    ):
        train(plugins=["text", "lm_eval"], set=MODEL | settings | sizes | asked, run_dir=folder, quiet=True)
    return clock


def write_all() -> None:
    write_tasks()
    written = TASKS.format(tokens=TOKENS).partition("[likeliest]")[2].partition("[drawn]")[0]
    Path("written.toml").write_text("[likeliest]" + written, encoding="utf-8")
    Path("harness.yaml").write_text(HARNESS, encoding="utf-8")


def page(found: Mapping[str, Clock]) -> str:
    where = (
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    lines = [
        "# What tasks cost a run",
        "",
        f"Written by `python benchmarks/evaluating_training.py` on {time.strftime('%Y-%m-%d')}: {where}.",
        f"A model of {MODEL['decoder.layers']} layers of {MODEL['decoder.dim']} is asked by `lm_eval` at each step of",
        "a run. CPU seconds of one thread, medians of several evaluations, without the held-out loss. Its forward",
        "passes are what an evaluation no longer takes if the model and its head give at once what they gave before.",
        "",
        "| what | evaluation | its forward passes | ratio | bar | met |",
        "|---|---|---|---|---|---|",
    ]
    for what, clock in found.items():
        whole, passes = map(statistics.median, (clock.whole, clock.passes))
        met = "yes" if clock.ratio <= BAR else "no"
        lines.append(f"| {what} | {whole:.2f} | {passes:.2f} | {clock.ratio:.3f} | ≤ {BAR} | {met} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
        write_all()
        found = {what: measured(task, folder) for what, task in KINDS.items()}
    RESULTS.write_text(page(found), encoding="utf-8")
