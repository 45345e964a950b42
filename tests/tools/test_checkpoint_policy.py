"""When a run saves, and what it keeps: by steps, time, request, and the best of a metric."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

import toys
from forge_train import ConfigError, Plugin, hookimpl
from forge_train.base.files import DiskError
from forge_train.checkpoint import writing
from forge_train.checkpoint.checkpoint import found
from forge_train.contract.events import Evaluation
from forge_train_tools import checkpoint_policy
from forge_train_tools.testing import TinyRun
from saving import ASYNC, filling, stepping

pytestmark = pytest.mark.unit


def steps(run: TinyRun) -> list[int]:
    """Steps that were saved."""
    return [event["step"] for event in run.events if event["event"] == "checkpoint_saved"]


def kept(run: TinyRun) -> list[int]:
    return sorted(saved.step for saved in found(run.run / "checkpoints"))


def test_a_dense_early_window(tmp_path: Path) -> None:
    config = {"checkpoint.early": 9, "checkpoint.every": 6, "checkpoint.keep": 1}
    run = toys.run(tmp_path, steps=18, config=config)
    assert steps(run) == [1, 2, 4, 6, 8, 12, 18]
    assert kept(run) == [1, 2, 4, 8, 18]


def test_every_so_many_minutes_since_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]

    class Clock:
        monotonic = staticmethod(lambda: now[0])

    def pass_time(step: int) -> None:
        now[0] += 60.0

    monkeypatch.setattr(checkpoint_policy, "time", Clock)
    run = toys.run(tmp_path, stepping(pass_time), steps=9, config={"checkpoint.minutes": 2.5, "checkpoint.every": 5})
    assert steps(run) == [3, 5, 8, 9]


def test_on_request_by_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_policy, "LOOK_EVERY", 0.0)
    request = tmp_path / "run" / "save"

    def ask(step: int) -> None:
        if step in (2, 5):
            request.touch()

    run = toys.run(tmp_path, stepping(ask), name="run", steps=7, config={"checkpoint.keep": 9})
    assert steps(run) == [2, 5, 7]
    assert not request.exists()


def test_the_file_is_looked_for_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Path] = []
    real = Path.exists

    def exists(self: Path, **more: Any) -> bool:
        if self.name == "save":
            looked.append(self)
        return real(self, **more)

    monkeypatch.setattr(Path, "exists", exists)
    began = time.monotonic()
    toys.run(tmp_path, steps=30)
    assert len(looked) <= 1 + time.monotonic() - began


class Scores(Plugin):
    """Gives evaluations a number of a plugin's own."""

    api = (1, 0)
    values = (3.0, 5.0, float("nan"), 2.0, 4.0, 1.0, 6.0, 5.5)

    @hookimpl
    def on_log(self, record: Any) -> None:
        if isinstance(record, Evaluation):
            record.add("score", self.values[record.step - 1])

    @hookimpl
    def on_step(self, step: Any) -> None:
        step.add("even", float(step.step % 2))


EVALUATED = {"train.evaluate_every": 1, "checkpoint.keep": 1}


@pytest.mark.parametrize("more", [{}, ASYNC])
@pytest.mark.parametrize(
    ("best_is", "keep_best", "saves", "keeps"),
    [("lowest", 1, [1, 4, 6, 8], [6, 8]), ("lowest", 2, [1, 4, 6, 8], [4, 6, 8]), ("highest", 2, [1, 2, 7, 8], [7, 8])],
)
def test_the_best_by_a_metric_of_evaluations(
    tmp_path: Path, best_is: str, keep_best: int, saves: list[int], keeps: list[int], more: dict[str, Any]
) -> None:
    best = {"best": "evaluation.scores.score", "best_is": best_is, "keep_best": keep_best}
    run = toys.run(tmp_path, Scores, steps=8, config={**EVALUATED, "checkpoint": best, **more})
    assert steps(run) == saves
    assert kept(run) == keeps


@pytest.mark.parametrize("more", [{}, ASYNC])
def test_the_best_stays_where_a_better_one_can_t_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    fills = filling(monkeypatch, 6, writing, "seal")
    config = {**EVALUATED, "checkpoint.best": "evaluation.scores.score", "checkpoint.every": 1, **more}
    with pytest.raises(DiskError):
        toys.run(tmp_path, Scores, fills, name="run", steps=8, config=config)
    assert [saved.step for saved in found(tmp_path / "run" / "checkpoints")] == [5, 4]


def test_the_best_is_remembered_by_a_resumed_run(tmp_path: Path) -> None:
    config = {**EVALUATED, "checkpoint.best": "evaluation.scores.score"}
    first = toys.run(tmp_path, Scores, name="run", steps=8, stop_at=5, config=config)
    assert (steps(first), kept(first)) == ([1, 4, 5], [4, 5])
    again = toys.run(tmp_path, Scores, name="run", steps=8, config=config)
    assert (steps(again), kept(again)) == ([1, 4, 5, 6, 8], [6, 8])


def test_the_best_by_a_line_of_metrics(tmp_path: Path) -> None:
    run = toys.run(tmp_path, Scores, steps=5, config={"checkpoint.best": "scores.even", "checkpoint.keep": 9})
    assert steps(run) == [1, 2, 5]
    run = toys.run(tmp_path, Scores, steps=5, config={"checkpoint.best": "loss", "checkpoint.keep": 1})
    losses = {line["step"]: line["loss"] for line in run.metrics}
    assert min(losses, key=losses.__getitem__) in kept(run)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"checkpoint.best": "perplexity"}, "checkpoint.best: there is no 'perplexity'; the lines of metrics have "),
        (
            {"checkpoint.best": "evaluation.accuracy", "train.evaluate_every": 1},
            "checkpoint.best: there is no 'evaluation.accuracy'; evaluations give loss, scores.score.",
        ),
        ({"checkpoint.best": "evaluation.loss"}, "'evaluation.loss' needs evaluations; set train.evaluate_every."),
        ({"checkpoint.keep_best": 2}, "name their metric: checkpoint.best."),
        ({"checkpoint.best_is": "highest"}, "name their metric: checkpoint.best."),
    ],
)
def test_a_metric_that_there_is_not(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        toys.run(tmp_path, Scores, config=config)
