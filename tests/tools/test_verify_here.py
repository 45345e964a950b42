"""`forge verify` on a layout of one process, in this process: what it says of plugins that do what they must not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import toys
from forge_train import ForgeError, Plugin, hookimpl, section
from forge_train.contract.events import Evaluation
from forge_train.mesh.layout import Layout
from forge_train_kit.ranks import named
from forge_train_tools import verification
from forge_train_tools.configuration.request import Request
from forge_train_tools.launching.launch import Ended, WorkerCommand, WorkerResult
from forge_train_tools.verification import Verdict, verify
from forge_train_tools.verification.ranks import peers_apart
from forge_train_tools.verification.record import worker
from forge_train_tools.verification.recording import Record, Recording

pytestmark = [pytest.mark.unit]


LAYOUT: list[bool] = []
"""Holds one thing while the layout's steps are taken."""


def verified(folder: Path, *plugins: str, **values: Any) -> Verdict:
    """A toy run against itself, with plugins of this file."""
    settings = {"train.evaluate_every": 2, **values}
    file = toys.write_config(folder, *(f"{__name__}:{name}" for name in plugins), **settings)

    def start(nproc: int, arguments: Mapping[str, Any]) -> None:
        LAYOUT.append(True)
        try:
            worker(**arguments)
        finally:
            LAYOUT.clear()

    return verify(Request(str(file)), 1, steps=2, start=start)


class Meddler(Plugin):
    """Knows the model and the optimizer."""

    api = (1, 0)

    @hookimpl
    def on_start(self, model: Any, optimizer: Any) -> None:
        self.weight, self.optimizer = dict(model.named_parameters())["layers.0.up.weight"], optimizer

    def move_weights(self) -> None:
        with torch.no_grad():
            self.weight.mul_(1.001)

    def move_state(self) -> None:
        self.optimizer.state[self.weight]["exp_avg"].mul_(0.5)


class AtEvaluation(Meddler):
    @hookimpl
    def on_log(self, record: Any) -> None:
        if isinstance(record, Evaluation):
            self.move_weights()


class AtSaving(Meddler):
    @hookimpl
    def on_checkpoint(self, event: Any) -> None:
        if event.kind == "saving":
            self.move_state()


class AtSaved(Meddler):
    @hookimpl
    def on_checkpoint(self, event: Any) -> None:
        if event.kind == "saved":
            self.move_state()


class Around(Meddler):
    @hookimpl
    def around(self, span: str, job: Any) -> Any:
        @contextmanager
        def moves() -> Any:
            yield
            self.move_weights()

        return moves if span == "evaluate" else None


class Watches(Meddler):
    """Looks, and changes nothing."""

    @hookimpl
    def on_log(self, record: Any) -> None:
        if isinstance(record, Evaluation):
            assert record.loss > 0

    @hookimpl
    def on_checkpoint(self, event: Any) -> None:
        assert event.path.is_dir() == (event.kind == "saved")


def test_a_plugin_that_looks_on_is_not_called_wrong(tmp_path: Path) -> None:
    verdict = verified(tmp_path, "Watches")
    assert verdict.agree, verdict
    assert {"checkpoint", "evaluation"} <= {check.name for check in verdict.checks}


@pytest.mark.parametrize(
    ("plugin", "part", "says"),
    [
        ("AtEvaluation", "evaluation", r"Plugin 'at_evaluation' .*, hook on_log \(.*\) changes layers\.0\.up"),
        ("AtSaving", "checkpoint", r"Plugin 'at_saving' .*, hook on_checkpoint \(.*\) changes optimizer\..*exp_avg"),
        ("AtSaved", "checkpoint", r"Plugin 'at_saved' .*, hook on_checkpoint \(.*\) changes optimizer\..*exp_avg"),
        ("Around", "evaluation", r"Evaluating changes layers\.0\.up\.weight: evaluating and saving must leave"),
    ],
)
def test_whoever_changes_the_model_or_the_optimizer_is_named(tmp_path: Path, plugin: str, part: str, says: str) -> None:
    verdict = verified(tmp_path, plugin)
    assert verdict.failed == {part}, verdict
    assert re.match(says, verdict.advice[0]), verdict.advice


class Dropout(Plugin):
    """Drops from the residual stream; the layout draws other numbers than one process, as other ranks do."""

    api = (1, 0)

    @hookimpl
    def on_start(self, model: Any) -> None:
        torch.manual_seed(bool(LAYOUT))
        model.parts[0].layers["1"].register_forward_pre_hook(lambda part, args: F.dropout(args[0], 0.1, part.training))


def test_a_model_that_draws_random_numbers_is_told_so(tmp_path: Path) -> None:
    verdict = verified(tmp_path, "Dropout")
    assert {"loss", "gradients"} <= verdict.failed
    (said,) = verdict.advice
    assert said.startswith("The model draws random numbers in training, as dropout does")


class Vetoes(Plugin):
    """Vetoes a step, or all, of the layout, or of both sides."""

    api = (1, 0)

    @section
    class Config:
        both: bool = False

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        if self.config.both or (LAYOUT and update.step == 2):
            update.veto("it looks odd")


def test_a_vetoed_step_is_told(tmp_path: Path) -> None:
    verdict = verified(tmp_path, "Vetoes")
    assert "updates" in verdict.failed
    assert verdict.advice[0].startswith(
        "A plugin vetoes step 2 in on_gradients on rank 0 of the layout alone ('it looks odd')"
    )


def test_where_every_step_is_vetoed_nothing_was_compared(tmp_path: Path) -> None:
    verdict = verified(tmp_path, "Vetoes", **{"vetoes.both": True})
    assert verdict.agree
    assert verdict.advice == ("Every step was vetoed (it looks odd), so no update was compared: try more --steps.",)


def test_processes_are_named_with_their_places_in_the_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def launch(task: WorkerCommand, nproc: int) -> Ended:
        ended = Ended(task.placed([WorkerResult(rank, 1, "killed", "was killed.") for rank in (2, 3)], nproc))
        said.append(ended.complaint())
        return ended

    monkeypatch.setattr(verification, "launch", launch)
    file = toys.write_config(tmp_path, **{"parallel.tp": 2, "train.global_batch": 4})
    with pytest.raises(ForgeError, match=re.escape("Rank 2 (dp_shard 1, tp 0) was killed.")):
        verify(Request(str(file)), 4)
    assert said == ["Rank 2 (dp_shard 1, tp 0) was killed.\nRank 3 (dp_shard 1, tp 1) failed too: was killed."]


def test_ranks_that_differ_are_named_with_what_they_share() -> None:
    layout = Layout(pp=2, dp_shard=2, tp=2)
    assert named([3], layout) == "rank 3 (stage 0, dp_shard 1, tp 1)"
    assert named({7, 5}, layout) == "ranks 5, 7 (stage 1, tp 1)"
    assert named([0, 7], layout) == "ranks 0, 7"
    assert named([1], Layout(dp_shard=2)) == "rank 1"
    ranks = [Record(rank, data_rank=rank // 2, batches=[[str(rank)]]) for rank in range(4)]
    recording = Recording(ranks, {}, {}, Layout(dp_shard=2, tp=2))
    assert peers_apart(recording) == (
        2,
        (
            "rank 1 (dp_shard 0, tp 1) and rank 0 (dp_shard 0, tp 0) (data-parallel rank 0), "
            "rank 3 (dp_shard 1, tp 1) and rank 2 (dp_shard 1, tp 0) (data-parallel rank 1)"
        ),
    )
