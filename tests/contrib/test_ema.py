"""The average is the one of the formula, evaluation uses it, and training does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ema_cases
from forge_train import Model, Plugin, StepResult, Update, hookimpl
from forge_train.plugin import hookspecs
from forge_train_contrib.ema import EMA
from forge_train_tools.testing import Pool, RunForge, TinyRun, assert_conforms

EVALUATED = {"train.evaluate_every": 1, "train.evaluate_batches": 2}


class Recorder(Plugin):
    """Keeps the weights of every step."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.weights: list[dict[str, Tensor]] = []

    @hookimpl
    def on_start(self, model: Model) -> None:
        self.model = model

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        self.weights.append(weights(self.model))


class VetoSecond(Plugin):
    """Skips the second step."""

    api = (1, 0)

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        if update.step == 2:
            update.veto("on purpose")


def weights(model: Model) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def average(run: TinyRun) -> dict[str, Tensor]:
    found: dict[str, Tensor] = run.plugin("ema").state_dict()["average"]
    return found


def by_hand(history: list[dict[str, Tensor]], decay: float) -> dict[str, Tensor]:
    """The formula in double precision."""
    mean = {name: weight.double() for name, weight in history[0].items()}
    for number, now in enumerate(history[1:], start=1):
        share = min(decay, number / (number + 9))
        mean = {name: share * mean[name] + (1 - share) * weight.double() for name, weight in now.items()}
    return mean


def losses_at_evaluation(run: TinyRun) -> list[float]:
    return [event["loss"] for event in run.events if event["event"] == "evaluation"]


@pytest.mark.slow
def test_it_conforms() -> None:
    assert_conforms("ema", strict=True)


@pytest.mark.parametrize("decay", [0.15, 0.999])
def test_the_average_is_that_of_the_formula(run_forge: RunForge, decay: float) -> None:
    run = run_forge([EMA, Recorder], {"ema.decay": decay, "adamw.lr": 1e-2}, steps=6)
    expected = by_hand(run.plugin("recorder").weights, decay)
    for name, mean in average(run).items():
        torch.testing.assert_close(mean.double(), expected[name], rtol=1e-5, atol=1e-7)
        assert not torch.equal(mean, run.plugin("recorder").weights[-1][name])


def test_a_skipped_step_does_not_count(run_forge: RunForge) -> None:
    run = run_forge([EMA, Recorder, VetoSecond], {"adamw.lr": 1e-2}, steps=4)
    first, second, *rest = run.plugin("recorder").weights
    assert all(torch.equal(first[name], second[name]) for name in first)
    expected = by_hand([first, *rest], 0.999)
    for name, mean in average(run).items():
        torch.testing.assert_close(mean.double(), expected[name], rtol=1e-5, atol=1e-7)
    assert run.plugin("ema").state_dict()["steps"] == 3


def test_evaluation_is_that_of_the_average(run_forge: RunForge) -> None:
    run = run_forge([EMA], {**EVALUATED, "adamw.lr": 1e-2}, steps=4)
    task = hookspecs.task(run.job)
    executor = hookspecs.executor(run.model, task, run.job)
    loader, prepare = run.job.hooks.build_data("validation"), run.job.hooks.prepare_batch()
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            parameter.copy_(average(run)[name])
    count = EVALUATED["train.evaluate_batches"] * run.job.config.train.global_batch // run.job.config.train.micro_batch
    batches = prepare([next(loader) for _ in range(count)])
    total = sum(float(executor.evaluate(batch)) for batch in batches)
    assert losses_at_evaluation(run)[-1] == pytest.approx(total / sum(task.weight(one) for one in batches), rel=1e-6)


def test_evaluation_leaves_no_trace_in_the_weights(run_forge: RunForge) -> None:
    config = {"adamw.lr": 1e-2}
    plain = run_forge(config=config, steps=4)
    averaged = run_forge([EMA], {**config, **EVALUATED}, steps=4)
    assert averaged.numbers == plain.numbers
    assert all(torch.equal(weights(plain.model)[name], weight) for name, weight in weights(averaged.model).items())
    unaveraged = run_forge(config={**config, **EVALUATED}, steps=4)
    assert losses_at_evaluation(averaged)[1:] != losses_at_evaluation(unaveraged)[1:]


def test_a_resumed_run_has_the_same_average(run_forge: RunForge) -> None:
    whole = run_forge([EMA], EVALUATED, steps=4, name="whole")
    run_forge([EMA], EVALUATED, steps=4, name="stopped", stop_at=2)
    resumed = run_forge([EMA], EVALUATED, steps=4, name="stopped")
    assert resumed.numbers == whole.numbers
    assert losses_at_evaluation(resumed)[-1] == losses_at_evaluation(whole)[-1]
    assert all(torch.equal(average(whole)[name], mean) for name, mean in average(resumed).items())


def test_weights_that_are_loaded_at_the_start_are_all_it_knows(run_forge: RunForge) -> None:
    source = run_forge(steps=2)
    run = run_forge([EMA, Recorder], {"train.init_from": str(source.run)}, steps=1)
    assert all(torch.equal(run.plugin("recorder").weights[0][name], mean) for name, mean in average(run).items())


@pytest.mark.slow
@pytest.mark.dist
def test_the_average_of_sharded_weights_is_sharded_and_resumed(
    ranks: Pool, run_forge: RunForge, tmp_path: Path
) -> None:
    folder = str(tmp_path / "ranks")
    whole, _ = ranks.run(ema_cases.sharded, 2, folder=folder, name="whole", stop_at=None)
    ranks.run(ema_cases.sharded, 2, folder=folder, name="stopped", stop_at=2)
    resumed, _ = ranks.run(ema_cases.sharded, 2, folder=folder, name="stopped", stop_at=None)
    assert whole["types"] == ["DTensor"]
    assert resumed == whole
    alone = run_forge([EMA], ema_cases.CONFIG, steps=4)
    assert losses_at_evaluation(alone) == pytest.approx(whole["evaluations"], rel=1e-5)
    for name, mean in average(alone).items():
        torch.testing.assert_close(torch.tensor(whole["average"][name]), mean, rtol=1e-4, atol=1e-6)
