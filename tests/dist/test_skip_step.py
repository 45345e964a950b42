"""`skip_step`: what it skips, on one process and several, across a resume, and when it gives up."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

import skip_cases
from forge_train import DivergedError
from forge_train_kit.outliers import limit
from forge_train_plugins.optimizers.skip_step import SkipStep
from forge_train_tools.testing import Pool, RunForge

pytestmark = [pytest.mark.dist]
CONFIG = {"skip_step.warmup": 8, "skip_step.window": 8, "adamw.lr": 1e-3}


def test_the_limit_is_the_robust_z_score() -> None:
    norms = torch.randn(4001, generator=torch.Generator().manual_seed(0)).mul(0.5).add(10).tolist()
    assert limit(norms, 6.0) == pytest.approx(13.0, rel=0.02), "of a normal distribution, mean + 6 σ"
    assert limit([*norms, *[1e6] * 100], 6.0) == pytest.approx(13.0, rel=0.03), "outliers do not move it"
    assert limit([2.0] * 8, 6.0) == pytest.approx(2.0 * (1 + 6e-3 / 0.6745))


class FakeUpdate:
    def __init__(self, norm: float, vetoed: str = "") -> None:
        self.step, self.grad_norm, self.vetoed = 1, torch.tensor(norm), vetoed

    def veto(self, reason: str) -> None:
        self.vetoed = reason


def decide(plugin: Any, norm: float, vetoed: str = "") -> str:
    update = FakeUpdate(norm, vetoed)
    plugin.on_gradients(update)
    return update.vetoed


def test_it_acts_after_its_warm_up_and_sooner_for_what_is_no_number() -> None:
    plugin = SkipStep(SkipStep.Config(warmup=8, window=8))
    norms = [1.0, 1.2, 0.9, 50.0, 1.1, 1.0, 0.8, 1.05]
    assert [decide(plugin, norm) for norm in norms[:4]] == [""] * 4
    assert decide(plugin, float("nan")) == "the gradient norm is nan, not finite"
    assert decide(plugin, float("inf")) == "the gradient norm is inf, not finite"
    assert [decide(plugin, norm) for norm in norms[4:]] == [""] * 4
    middle = statistics.median(norms)
    bound = middle + 6 * statistics.median(abs(norm - middle) for norm in norms) / 0.6745
    assert decide(plugin, bound * 1.001).startswith("the gradient norm is ")
    assert decide(plugin, bound * 0.999) == ""
    assert decide(plugin, 1e-9) == "", "small norms are no harm"
    assert decide(plugin, 1e9, "another plugin") == "another plugin"
    assert plugin.state_dict()["skipped"] == 3


def test_a_skipped_norm_moves_no_limit_and_too_many_in_a_row_end_the_run() -> None:
    plugin = SkipStep(SkipStep.Config(warmup=8, window=8, most=3))
    for number in range(8):
        decide(plugin, 1 + number / 10)
    for _ in range(3):
        assert decide(plugin, 100.0)
    with pytest.raises(DivergedError, match=r"the gradient norm is 100, above .* after 3 skipped steps in a row"):
        decide(plugin, 100.0)
    assert max(plugin.state_dict()["norms"]) < 2


def test_a_skipped_step_leaves_the_weights_is_told_and_resumed(run_forge: RunForge) -> None:
    plugins = ["skip_step", skip_cases.Burst]
    whole = run_forge(plugins, CONFIG, steps=14, name="whole")
    skipped = [event for event in whole.events if event["event"] == "anomaly"]
    assert [event["step"] for event in skipped] == [11], "the spike; one in the warm-up is let through"
    assert skipped[0]["kind"] == "skip_step"
    assert [line["skip_step.skipped"] for line in whole.metrics] == [0] * 10 + [1] * 4
    run_forge(plugins, CONFIG, steps=14, name="stopped", stop_at=9)
    again = run_forge(plugins, CONFIG, steps=14, name="stopped")
    assert again.numbers == whole.numbers
    assert again.plugin("skip_step").state_dict() == whole.plugin("skip_step").state_dict()


def test_all_ranks_skip_the_same_steps(ranks: Pool, tmp_path: Path) -> None:
    replies = ranks.run(skip_cases.train, 2, timeout=200, folder=str(tmp_path), config=CONFIG)
    assert [reply["skipped"] for reply in replies] == [[11], [11]]
    assert replies[0]["state"] == replies[1]["state"]
