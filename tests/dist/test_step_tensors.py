"""What an outside task adds to batches and records is the same on one process, in micro-batches, along every axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compositions
import step_tensors
from crossed import marked
from forge_train import PluginError
from forge_train_tools.testing import RunForge, Verifier

pytestmark = [pytest.mark.dist]

OWN = ("step_tensors:Weighing", "step_tensors:Leaving", "step_tensors:Watching")
TEXT = {"text.isolate": True}
LAYOUTS: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "dp2": (2, ("fsdp2",), {"parallel.dp_shard": 2, "train.micro_batch": 6}),
    "pp2": (2, ("pp",), {"parallel.pp": 2, "train.micro_batch": 12}),
    "pp2, split": (2, ("pp", "ac"), {"parallel.pp": 2, "train.micro_batch": 6, "pp.schedule": "zbv"}),
    "cp2": (2, ("cp", "fsdp2"), {"parallel.cp": 2, "train.micro_batch": 12}),
    "cp2 × dp2": (4, ("cp", "fsdp2"), {"parallel.cp": 2, "parallel.dp_shard": 2, "train.micro_batch": 6}),
    "pp2 × cp2": (4, ("pp", "cp", "fsdp2"), {"parallel.pp": 2, "parallel.cp": 2, "train.micro_batch": 12}),
}


EXTENDED = ("pp2", "cp2 × dp2", "pp2 × cp2")
"""CI has each axis alone, pp with a split backward pass."""


@pytest.mark.parametrize("name", marked(LAYOUTS, EXTENDED))
def test_a_step_keeps_the_same_on_every_layout(verify: Verifier, composition_file: Path, name: str) -> None:
    world, plugins, settings = LAYOUTS[name]
    common = {**TEXT, "decoder.layers": 4}
    reference = compositions._request(composition_file, OWN, common)
    request = compositions._request(composition_file, (*plugins, *OWN), {**common, **settings})
    verdict = verify(request, world, steps=2, reference=reference)
    assert verdict.agree, verdict
    assert "metrics" in {check.name for check in verdict.checks}


def test_weights_of_a_rank_s_own_documents_are_found_out(verify: Verifier, composition_file: Path) -> None:
    own = ("step_tensors:WeighingHere",)
    reference = compositions._request(composition_file, own, TEXT)
    _, plugins, settings = LAYOUTS["dp2"]
    verdict = verify(
        compositions._request(composition_file, (*plugins, *own), {**TEXT, **settings}), 2, steps=2, reference=reference
    )
    assert {"loss", "gradients"} <= verdict.failed, verdict


def test_three_micro_batches_are_one_batch(run_forge: RunForge) -> None:
    found = []
    for size in (12, 4):
        config = {"train.global_batch": 12, "train.micro_batch": size, "train.evaluate_every": 3, **TEXT}
        run = run_forge([step_tensors.Weighing, step_tensors.Leaving, step_tensors.Watching], config)
        evaluated = [event["loss"] for event in run.events if event["event"] == "evaluation"]
        lines = [{key: value for key, value in line.items() if "watching" in key} for line in run.metrics]
        found.append((run.losses, [line["grad_norm"] for line in run.metrics], evaluated, lines))
    (losses, norms, evaluated, lines), other = found
    assert len(lines[0]) == 6
    assert other[0] == pytest.approx(losses, rel=1e-5)
    assert other[1] == pytest.approx(norms, rel=1e-5)
    assert other[2] == pytest.approx(evaluated, rel=1e-5)
    assert other[3] == [pytest.approx(line, rel=1e-4) for line in lines]


def test_its_batches_end_with_the_step_and_with_the_evaluation(run_forge: RunForge) -> None:
    run = run_forge([step_tensors.Weighing, step_tensors.Peeking], {"train.evaluate_every": 1, **TEXT}, steps=2)
    assert all(line["peeking.documents"] >= 4 for line in run.metrics)
    assert run.plugin("peeking").found == [0] * 4


def test_a_batch_that_is_cut_by_hand_is_refused(run_forge: RunForge) -> None:
    with pytest.raises(PluginError, match=r"Plugin 'hand_cut' .* cut a batch from 32 to 8 positions by hand; cut it"):
        run_forge([step_tensors.HandCut])
