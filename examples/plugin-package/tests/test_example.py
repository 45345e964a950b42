"""The plugins keep the contract, and do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from forge_train_example.frozen_norms import FrozenNorms
from forge_train_example.signum import Signum
from forge_train_example.sparkline import sparkline
from forge_train_example.spike_guard import SpikeGuard
from forge_train_example.stopwatch import Stopwatch

from forge_train_tools.testing import RunForge, assert_conforms


@pytest.mark.parametrize("plugin", [FrozenNorms, Signum, SpikeGuard, Stopwatch])
def test_it_conforms(plugin: type, tmp_path: Path) -> None:
    assert_conforms(plugin, strict=True, folder=tmp_path)


def test_signum_moves_every_weight_by_the_learning_rate() -> None:
    from forge_train_example._signum import SignDescent

    weight = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    optimizer = SignDescent([weight], lr=0.5, momentum=0.9)
    weight.grad = torch.tensor([2.0, -0.1, 0.0])
    optimizer.step()
    assert weight.tolist() == [0.5, -1.5, 3.0]


def test_frozen_norms_keeps_what_it_matches(run_forge: RunForge) -> None:
    run = run_forge([FrozenNorms])
    kept = {name: parameter for name, parameter in run.model.named_parameters() if "norm" in name}
    assert kept
    assert all(bool((parameter == 1).all()) for parameter in kept.values())
    assert not bool((dict(run.model.named_parameters())["head.weight"] == 1).any())


def test_spike_guard_skips_steps(run_forge: RunForge) -> None:
    run = run_forge([SpikeGuard], {"spike_guard.factor": 0.5}, steps=4)
    assert [line["spike_guard.skipped"] for line in run.metrics] == [0, 1, 2, 3]


def test_stopwatch_logs_timings(run_forge: RunForge) -> None:
    (line,) = run_forge([Stopwatch], steps=1).metrics
    assert line["stopwatch.optimizer"] > 0
    assert set(line["timing"]) == {"stopwatch.forward_backward", "stopwatch.optimizer"}


def test_sparkline_draws_a_run(run_forge: RunForge) -> None:
    run = run_forge([Signum], {"signum.lr": 1e-2}, steps=6)
    drawn = CliRunner().invoke(sparkline, [str(run.run)])
    assert drawn.exit_code == 0
    assert drawn.output.startswith("loss 5.573 █")
    assert isinstance(CliRunner().invoke(sparkline, [str(run.run), "--metric", "no"]).exception, Exception)
