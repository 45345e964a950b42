"""Every axis at once: pipelines, slices of sequences, split matrices, experts and data, against one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import compositions
from crossed import marked
from forge_train_tools import verification
from forge_train_tools.testing import Verifier
from forge_train_tools.verification.numbers import errors
from forge_train_tools.verification.recording import read_gradients

pytestmark = [pytest.mark.dist]

BASE = {"decoder.layers": 4, "train.global_batch": 16, "train.micro_batch": 2}
EXPERTS = {"moe.experts": 8, "moe.hidden": 16, "moe.bias_speed": 0.01, "moe.z_loss": 0.001, "moe.balance": 0.1}
RICH = {"decoder.tied": True, "text.isolate": True}
ZERO2 = {"fsdp2.reshard": "never", "fsdp2.reduce": "each"}
CASES: dict[str, tuple[int, tuple[str, ...], tuple[str, ...], Mapping[str, Any], Mapping[str, Any]]] = {
    # World, axes of size 2, plugins of the model, its settings, those of the layout.
    "pp2 × ep2 × dp2, ZeRO-2": (
        4, ("pp", "ep"), ("moe",), EXPERTS, {**ZERO2, "pp.schedule": "1f1b"},
    ),
    "pp2 × hsdp 2×2": (
        8, ("pp", "dp_replicate"), (), RICH, {"pp.schedule": "interleaved_1f1b"},
    ),
    "pp2 × cp2 × tp2": (8, ("pp", "cp", "tp"), (), RICH, {"pp.schedule": "zbv"}),
    "pp2 × tp2 × ep2 × dp2": (8, ("pp", "tp", "ep"), ("moe",), EXPERTS, {"pp.schedule": "interleaved_1f1b"}),
    "pp2 × cp2 × ep2 × dp2": (8, ("pp", "cp", "ep"), ("moe",), {**EXPERTS, **RICH}, {"pp.schedule": "dualpipe_v"}),
}  # fmt: skip
EXTENDED = ("pp2 × cp2 × tp2", "pp2 × cp2 × ep2 × dp2", "pp2 × hsdp 2×2", "pp2 × tp2 × ep2 × dp2")
"""CI has three axes on four processes here, pp beside tp and ep in test_hf_layouts.py, and cp beside tp in
test_context.py."""


@pytest.mark.parametrize("name", marked(CASES, EXTENDED))
def test_every_axis_agrees_with_one_process(verify: Verifier, composition_file: Path, name: str) -> None:
    world, axes, model, settings, layout = CASES[name]
    common = {**BASE, **settings}
    request = compositions._request(composition_file, (*_plugins(axes), *model), {**common, **_sizes(axes), **layout})
    verdict = verify(request, world, steps=2, reference=compositions._request(composition_file, model, common))
    assert verdict.agree, verdict


@pytest.mark.extended
def test_in_float8_each_gradient_is_that_of_one_process_in_float8(verify: Verifier, composition_file: Path) -> None:
    """Within a hundredth of what float8 changes of it; losses, updates and checkpoints as `forge verify` judges."""
    axes, model, common = ("pp", "cp", "ep"), ("fp8", "moe"), {**BASE, **EXPERTS, **RICH}
    alone = verification.Reference.take(compositions._request(composition_file, model, common), 2)
    layout = {**common, **_sizes(axes), "pp.schedule": "zbv"}
    request = compositions._request(composition_file, (*_plugins(axes), *model), layout)
    found: dict[str, Tensor] = {}

    def start(nproc: int, arguments: dict[str, Any]) -> None:
        verify._start(nproc, arguments)
        gradients, _ = read_gradients(Path(arguments["folder"]), 1)
        found.update({name: gradient.clone() for name, gradient in gradients.items()})

    verdict = verification.verify(request, 8, start=start, reference=alone)
    assert verdict.agree, verdict
    assert alone.exact is not None
    assert found.keys() == alone.recording.gradients.keys()
    own = {one.name: one.error for one in errors(alone.exact.gradients, alone.recording.gradients)}
    apart = {one.name: one.error / own[one.name] for one in errors(alone.recording.gradients, found)}
    assert min(own.values()) > 1e-3, "float8 changes every gradient"
    assert max(apart.values()) < 0.01, max(apart.items(), key=lambda one: one[1])


def _plugins(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Of some axes; data-parallel ones need none beside the default."""
    return tuple(axis for axis in axes if not axis.startswith("dp"))


def _sizes(axes: tuple[str, ...]) -> dict[str, int]:
    return {f"parallel.{axis}": 2 for axis in axes}
