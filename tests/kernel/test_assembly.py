"""A run looked at from inside: when a watcher is told what, and that looking changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_train import MicroBatch, Plugin, Update, hookimpl
from forge_train.engine import train
from forge_train.step.step import Stepper, Watcher
from forge_train_tools.testing import run_forge
from forge_train_tools.testing.runs import prepared

pytestmark = [pytest.mark.unit]

TOLD: list[str] = []


class Vetoes(Plugin):
    """Vetoes the second step."""

    api = (1, 0)

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        TOLD.append("plugins")
        if update.step == 2:
            update.veto("to see")


class Told(Watcher):
    stepper: Stepper

    def data(self, job: Any, split: Any) -> Any:
        TOLD.append(f"data {split}")
        return super().data(job, split)

    def on_assembled(self, stepper: Stepper) -> None:
        TOLD.append("assembled")
        self.stepper = stepper

    def on_micro_batch(self, micro: MicroBatch) -> None:
        TOLD.append("last" if micro.last else "micro-batch")

    def on_backward(self, update: Update) -> Update:
        TOLD.append(f"backward {update.step}")
        assert any(parameter.grad is not None for parameter in update.parameters)
        return update

    def on_update(self, update: Update) -> None:
        TOLD.append(f"update {update.step}")


def test_a_watcher_is_told_in_order_and_changes_nothing(tmp_path: Path) -> None:
    plain = run_forge([Vetoes], steps=3, folder=tmp_path / "plain")
    TOLD.clear()
    watcher = Told()
    with prepared([Vetoes], steps=3, folder=tmp_path) as setup:
        finished = train(setup, run_dir=tmp_path, watcher=watcher)
    expected = ["data train", "assembled"]
    for step in (1, 2, 3):
        expected += ["micro-batch", "last", f"backward {step}", "plugins", *[f"update {step}"] * (step != 2)]
    assert expected == TOLD
    assert finished.loss == plain.finished.loss
    weights = plain.model.state_dict()
    for name, weight in watcher.stepper.model.state_dict().items():
        assert torch.equal(weight, weights[name]), name


class Emptied(Told):
    """Goes on with another update."""

    def on_backward(self, update: Update) -> Update:
        for parameter in update.parameters:
            parameter.grad = None
        return Update(update.step, update.loss, torch.zeros(()), update.parameters)


def test_a_step_goes_on_with_what_a_watcher_returns(tmp_path: Path) -> None:
    watcher = Emptied()
    with prepared(config={"adamw": {"weight_decay": 0.0}}, steps=1, folder=tmp_path) as setup:
        train(setup, run_dir=tmp_path, watcher=watcher)
    with prepared(steps=1, folder=tmp_path) as setup:
        plain = Told()
        train(setup, run_dir=tmp_path, watcher=plain)
    moved = dict(plain.stepper.model.named_parameters())
    assert not watcher.stepper.optimizer.state
    assert any(not torch.equal(p, moved[name]) for name, p in watcher.stepper.model.named_parameters())
