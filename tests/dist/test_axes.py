"""Every axis at once: pipelines, slices of sequences, split matrices, experts and data, against one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import compositions
from forge_train.testing import Verifier

pytestmark = [pytest.mark.dist, pytest.mark.accept("axes", 1)]

BASE = {"decoder.layers": 4, "train.global_batch": 16, "train.micro_batch": 2}
EXPERTS = {"moe.experts": 8, "moe.hidden": 16, "moe.bias_speed": 0.01, "moe.z_loss": 0.001, "moe.balance": 0.1}
RICH = {"decoder.tied": True, "text.isolate": True}
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...], Mapping[str, Any], str]] = {
    # World of 8: plugins of the layout, of the model, the model's settings, the schedule.
    "pp2 × cp2 × tp2": (("pp", "cp", "tp"), (), RICH, "zbv"),
    "pp2 × tp2 × ep2 × dp2": (("pp", "tp", "ep"), ("moe",), EXPERTS, "interleaved_1f1b"),
    "pp2 × cp2 × ep2 × dp2": (("pp", "cp", "ep"), ("moe",), {**EXPERTS, **RICH}, "dualpipe_v"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_axis_agrees_with_one_process(verify: Verifier, composition_file: Path, name: str) -> None:
    plugins, model, settings, schedule = CASES[name]
    common = {**BASE, **settings}
    sizes = {f"parallel.{axis}": 2 for axis in plugins}
    layout = {**common, **sizes, "pp.schedule": schedule}
    reference = compositions._request(composition_file, model, common)
    verdict = verify(
        compositions._request(composition_file, (*plugins, *model), layout), 8, steps=2, reference=reference
    )
    assert verdict.agree, verdict
