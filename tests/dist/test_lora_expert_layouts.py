"""`lora` on stacks of experts over several ranks: loss and gradients equal those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compositions
from crossed import marked
from forge_train.engine import train
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.offline.adapters import export_adapter
from forge_train_tools.testing import Verifier

pytestmark = [pytest.mark.dist]

SETTINGS: dict[str, Any] = {
    "moe.experts": 6,
    "moe.hidden": 16,
    "moe.shared": 1,
    "lora.rank": 4,
    "lora.alpha": 4.0,
    "lora.groups": '[{match = "*.experts.up", rank = 2, alpha = 8.0}]',
    "lora.lr_ratio": 4.0,
    "train.init_missing": [],  # of random weights, and no checkpoints
    "checkpoint.only": [],
    "train.global_batch": 4,
    "train.micro_batch": 2,
}
IDLE = {"moe.experts": 32, "moe.top_k": 1, "moe.normalise": False}
"""Experts that no token takes."""
LAYOUTS: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "fsdp2×2": (2, ("fsdp2",), {}),
    "ep2, experts without tokens": (2, ("ep",), {"parallel.ep": 2, **IDLE}),
    "ep2, zero1, ac": (2, ("ep", "zero1", "ac"), {"parallel.ep": 2}),
    "tp2, all experts on each rank": (2, ("tp",), {"parallel.tp": 2}),
    "etp2": (2, ("ep", "tp"), {"parallel.tp": 2, "parallel.etp": 2}),
    "ep2×tp2": (4, ("ep", "tp"), {"parallel.ep": 2, "parallel.tp": 2}),
    "ep2×etp2": (4, ("ep", "tp"), {"parallel.ep": 2, "parallel.tp": 2, "parallel.etp": 2}),
    "pp2": (2, ("pp",), {"parallel.pp": 2, "train.micro_batch": 1}),
    "ep2×replicas2": (4, ("ep",), {"parallel.ep": 2, "parallel.dp_replicate": 2, "train.micro_batch": 1}),
}
EXTENDED = ("pp2", "ep2, zero1, ac", "ep2×tp2", "ep2×etp2", "ep2×replicas2")


@pytest.mark.parametrize("layout", marked(LAYOUTS, EXTENDED))
def test_a_decoder_agrees_with_one_process(layout: str, verify: Verifier, composition_file: Path) -> None:
    world, plugins, settings = LAYOUTS[layout]
    model = {key: value for key, value in settings.items() if key.startswith("moe.")}
    request = compositions._request(composition_file, ("moe", *plugins, "lora"), SETTINGS | settings)
    alone = compositions._request(composition_file, ("moe", "lora"), {**SETTINGS, **model, "train.micro_batch": 4})
    verdict = verify(request, world, steps=2, reference=alone)
    assert verdict.agree, verdict


@pytest.fixture(scope="module")
def adapter(composition_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Updates of attention and of experts, after a step."""
    folder = tmp_path_factory.mktemp("adapter")
    more = {"train.steps": 1, "adamw.lr": 0.1, "run.device": "cpu", "train.evaluate_every": 0, **ON}
    request = compositions._request(composition_file, ("moe", "lora"), SETTINGS | more)
    export_adapter(train(resolve(request), run_dir=folder / "runs").run, folder / "adapter")
    return folder / "adapter"


ON: dict[str, Any] = {"moe.shared": 0, "lora.modules": ["*.experts.*", "*.attention.*"]}
"""A model that a folder of PEFT can name."""
BENEATH = {name: LAYOUTS[name] for name in ("fsdp2×2", "tp2, all experts on each rank", "etp2", "ep2×tp2", "pp2")}


@pytest.mark.parametrize("layout", marked(BENEATH, ("fsdp2×2", "ep2×tp2", "pp2")))
def test_so_does_one_with_an_adapter_beneath(
    layout: str, verify: Verifier, composition_file: Path, adapter: Path
) -> None:
    world, plugins, settings = BENEATH[layout]
    own = {**SETTINGS, **ON, "lora.beneath": [str(adapter)]}
    request = compositions._request(composition_file, ("moe", *plugins, "lora"), own | settings)
    alone = compositions._request(composition_file, ("moe", "lora"), {**own, "train.micro_batch": 4})
    verdict = verify(request, world, steps=2, reference=alone)
    assert verdict.agree, verdict
