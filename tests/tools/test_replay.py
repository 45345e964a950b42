"""`forge debug step`: a step again is the step that was, wherever it begins."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from forge_cli import forge
from forge_train import ConfigError
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.offline.replay import replay
from forge_train_tools.testing import Pool, RunForge, run_forge

pytestmark = [pytest.mark.unit]
STEPS = 6


def before(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(("every", "step", "begun"), [(2, 4, "step-00000002"), (2, 5, "step-00000004"), (0, 3, "")])
def test_it_repeats_what_was_recorded(run_forge: RunForge, every: int, step: int, begun: str) -> None:
    config = {"checkpoint.every": every, "checkpoint.keep": 9}
    run = run_forge(["ema", "anomaly"], config, steps=STEPS)
    files = before(run.run)
    found = replay(run.run, step)
    assert before(run.run) == files, "nothing is written"
    assert (found.checkpoint, found.step) == (begun, step)
    assert found.data_range == (4 * (step - 1), 4 * step)
    assert (found.loss, found.grad_norm) == (run.losses[step - 1], run.metrics[step - 1]["grad_norm"])
    assert (found.recorded_loss, found.recorded_grad_norm) == (found.loss, found.grad_norm)
    assert math.sqrt(sum(norm**2 for norm in found.gradients.values())) == pytest.approx(found.grad_norm, rel=1e-5)
    assert set(found.gradients) == {name for name, _ in run.model.named_parameters()}
    assert len(found.sequences) == 4
    losses = [loss for row in found.sequences for loss in row.losses if loss is not None]
    assert sum(losses) / len(losses) == pytest.approx(found.loss, rel=1e-5)
    assert all(row.inputs[1:] == row.labels[:-1] for row in found.sequences)


def test_a_step_of_a_run_from_published_weights(run_forge: RunForge, tmp_path: Path) -> None:
    export_checkpoint(run_forge([], {"adamw.lr": 1e-2}, steps=2).run, tmp_path / "published")
    run = run_forge([], {"train.init_from": str(tmp_path / "published"), "checkpoint.every": 0}, steps=2)
    found = replay(run.run, 2)
    assert (found.checkpoint, found.loss) == ("", run.losses[1])


@pytest.mark.slow
def test_a_step_of_two_ranks(ranks: Pool, tmp_path: Path) -> None:
    config = {"checkpoint.every": 3, "train.global_batch": 12, "train.micro_batch": 1}
    arguments = {"plugins": ["fsdp2"], "config": config, "steps": STEPS, "name": "run"}
    told = ranks.run("test_replay:train", 2, timeout=300, folder=str(tmp_path), **arguments)[0]
    found = replay(Path(told["run"]), 5)
    assert found.loss == pytest.approx(told["losses"][4], rel=1e-5)
    assert found.recorded_loss == told["losses"][4]
    assert found.checkpoint == "step-00000003"


def train(folder: str, plugins: list[str], config: dict[str, Any], **more: Any) -> dict[str, Any]:
    run = run_forge(plugins, config, folder=Path(folder), **more)
    return {"run": str(run.run), "losses": run.losses}


def test_the_command(run_forge: RunForge) -> None:
    run = run_forge([], {"checkpoint.every": 2, "log.every": 2}, steps=STEPS)
    ended = forge("debug", "step", run.run, 3, "--json")
    assert ended.code == 0, ended.err
    assert (ended.json["step"], ended.json["recorded_loss"]) == (3, None)
    assert len(json.loads(ended.out)["sequences"][0]["losses"]) == 32
    ended = forge("debug", "step", run.run, 4)
    assert "Tokens with the largest loss" in ended.out
    assert f"{run.losses[1]:.7g}" in ended.out
    ended = forge("debug", "step", run.run, 7)
    assert (ended.code, "has steps 1 to 6, not 7" in ended.err) == (2, True)
    with pytest.raises(ConfigError, match="is not a run"):
        replay(run.run / "checkpoints", 1)
