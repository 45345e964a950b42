"""Runs on messages with weights: evaluation, a mixture, reading ahead, and plugins that can't weigh labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge_train import ConfigError, Plugin, hookimpl
from forge_train_kit import hookspecs
from forge_train_kit.data.prepare import Preparation, Report, prepare
from forge_train_plugins.tasks._cross_entropy import ChunkedCrossEntropy
from forge_train_plugins.tasks.next_token import NextTokenTask
from forge_train_tools.testing import TinyRun, run_forge

pytestmark = [pytest.mark.unit]

CONFIG: dict[str, Any] = {"adamw.lr": 1e-12, "train.evaluate_every": 1, "train.sequence": 64}
"""So small a step changes no weight of the model."""
FIRST, SECOND = len("bb\n\n") + 1, len("ddd\n\n") + 2
"""Tokens learned of the two answers: the last one ends the text, too."""


def write(file: Path, weights: tuple[float, float], count: int = 16) -> Path:
    """Conversations with two answers, `bb` and `ddd`, of these weights."""
    records = [
        [
            {"role": "user", "content": f"{file.stem}{number}"},
            {"role": "assistant", "content": "bb", "weight": weights[0]},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "ddd", "weight": weights[1]},
        ]
        for number in range(count)
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"messages": one}) + "\n" for one in records), encoding="utf-8")
    return file


def tuned(folder: Path, weights: tuple[float, float], *plugins: Any, **more: Any) -> TinyRun:
    file = write(folder / "chats.jsonl", weights)
    section = {"path": str(file), "cache": str(folder / "cache"), "template": "plain", "held_out": 0.5}
    return run_forge(["sft", *plugins], {"sft": section, **CONFIG, **more}, steps=1, folder=folder)


def evaluated(run: TinyRun) -> Any:
    (found,) = (event for event in run.events if event["event"] == "evaluation")
    return found


def mean(weights: tuple[float, float], first: float, second: float) -> float:
    """The mean loss by the losses of the two answers alone."""
    counted = weights[0] * FIRST, weights[1] * SECOND
    return (counted[0] * first + counted[1] * second) / sum(counted)


@pytest.mark.parametrize("weights", [(0.25, 1.5), (3.0, 0.5)])
def test_a_loss_is_the_weighted_mean_in_training_and_evaluation(tmp_path: Path, weights: tuple[float, float]) -> None:
    runs = [tuned(tmp_path / str(at), one) for at, one in enumerate(((1, 0), (0, 1), weights))]
    for losses in ([run.losses[0] for run in runs], [evaluated(run)["loss"] for run in runs]):
        assert losses[2] == pytest.approx(mean(weights, *losses[:2]), rel=1e-6)
        assert abs(losses[2] - mean((1, 1), *losses[:2])) > 1e-3, "the weights show"
    tokens = [evaluated(run)["tokens"] for run in runs]
    assert tokens[2] == tokens[0] + tokens[1] > 0, "tokens are counted, whatever they weigh"


@pytest.mark.slow
def test_processes_that_read_ahead_weigh_alike(tmp_path: Path) -> None:
    inline = tuned(tmp_path / "inline", (0.25, 1.5))
    ahead = {"sft.prefetch.workers": 2, "sft.prefetch.kind": "processes"}
    assert tuned(tmp_path / "ahead", (0.25, 1.5), **ahead).numbers == inline.numbers
    assert tuned(tmp_path / "plain", (1, 1)).losses != inline.losses


def mixed(folder: Path, weights: tuple[float, float], *plugins: Any) -> TinyRun:
    """A mixture of a source with weights, and one without."""
    for name, given in (("a", weights), ("b", (1, 1))):
        file = write(folder / f"{name}.jsonl", given, 32)
        asked = Preparation((str(file),), folder / name, chat=True, template="plain", held_out=0.5)
        prepare(asked, Report())
    sources = [{"path": str(folder / name)} for name in "ab"]
    config = {"mixture.sources": sources, "mixture.packing": "best_fit", **CONFIG}
    return run_forge(["mixture", *plugins], config, steps=1, without=["text"], folder=folder)


@pytest.mark.slow
def test_a_mixture_weighs_the_source_that_has_weights(tmp_path: Path) -> None:
    weights = 0.25, 1.5
    runs = [mixed(tmp_path / str(at), one) for at, one in enumerate(((1, 0), (0, 1), (1, 1), weights))]
    lines, events = [run.metrics[0] for run in runs], [evaluated(run) for run in runs]
    for one in ("mixture.loss.a", "mixture.loss.b"):
        losses = [line[one] for line in lines]
        expected = mean(weights, *losses[:2]) if one.endswith("a") else losses[2]
        assert losses[3] == pytest.approx(expected, rel=1e-6), one
    held_out = [event["metrics"] for event in events]
    assert held_out[3]["a.loss"] == pytest.approx(mean(weights, held_out[0]["a.loss"], held_out[1]["a.loss"]), rel=1e-6)
    assert held_out[3]["b.loss"] == held_out[2]["b.loss"]
    both = [line["mixture.loss.a"] for line in lines][3], lines[3]["mixture.loss.b"]
    count = lines[3]["mixture.tokens.a"] / (FIRST + SECOND), lines[3]["mixture.tokens.b"]
    counted = count[0] * (weights[0] * FIRST + weights[1] * SECOND), count[1]
    whole = (counted[0] * both[0] + counted[1] * both[1]) / sum(counted)
    assert lines[3]["loss"] == pytest.approx(whole, rel=1e-6)
    assert abs(lines[3]["loss"] - lines[2]["loss"]) > 1e-3, "the weights show"


class Other(Plugin):
    """A task that knows nothing of weights."""

    api = (1, 0)
    requires = ("loss",)

    @hookimpl
    def task(self, job: Any) -> Any:
        return NextTokenTask(hookspecs.loss(job))


class Unweighted(Plugin):
    """A loss that can't weigh labels."""

    api = (1, 0)

    @hookimpl
    def loss(self, job: Any) -> Any:
        return ChunkedCrossEntropy().__call__


@pytest.mark.slow
def test_who_can_t_weigh_is_refused(tmp_path: Path) -> None:
    other = "messages have weights other than 0 and 1, and plugin 'other', which provides the task, does not weigh lab"
    loss = "messages have weights other than 0 and 1, and plugin 'unweighted', which provides the loss, can't weigh la"
    for plugin, says in ((Other, other), (Unweighted, loss)):
        with pytest.raises(ConfigError, match=f"^sft.path: {says}"):
            tuned(tmp_path / plugin.__name__, (0.5, 1), plugin)
        with pytest.raises(ConfigError, match=f"^mixture.sources: 'a': {says}"):
            mixed(tmp_path / plugin.__name__, (0.5, 1), plugin)
        assert tuned(tmp_path / "plain", (1, 0), plugin).losses


def test_tokens_that_can_t_be_weighed_are_refused(tmp_path: Path) -> None:
    asked = Preparation((str(write(tmp_path / "a.jsonl", (0.5, 1))),), tmp_path / "a", chat=True, template="plain")
    prepare(asked, Report())
    config = {"tokens.path": str(tmp_path / "a"), **CONFIG, "train.evaluate_every": 0}
    with pytest.raises(ConfigError, match=r"^tokens\.path: .* plugin 'unweighted', which provides the loss"):
        run_forge(["tokens", Unweighted], config, steps=1, without=["text"], folder=tmp_path)
