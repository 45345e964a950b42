"""Runs that encode each image once equal one process that encodes images in every batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compositions
from crossed import few
from drawn import OPTIONS, SQUARE
from forge_train_tools.testing import Verifier

pytestmark = [pytest.mark.dist]

PATTERN = "*.encoders.image.vision.*"
FROZEN = {"freeze.parameters": [PATTERN]}
SETTINGS: dict[str, dict[str, Any]] = {
    "frozen": FROZEN,
    "one size": {**FROZEN, **SQUARE},
    "thawed": {**FROZEN, "freeze.thaw": f'[{{match = "{PATTERN}", steps = 1}}]'},
}
LAYOUTS: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "alone": (1, (), {}),
    "fsdp2": (2, ("fsdp2",), {"train.micro_batch": 1}),
    "ddp, ac": (2, ("ddp", "ac"), {}),
    "tp2": (2, ("tp",), {"parallel.tp": 2}),
    "cp2": (2, ("cp", "fsdp2"), {"parallel.cp": 2}),
    "pp2": (2, ("pp",), {"parallel.pp": 2, "train.micro_batch": 1}),
    "bf16, fsdp2": (2, ("fsdp2",), {"train.precision": "bf16"}),
}
CASES = [(setting, layout) for setting in SETTINGS for layout in LAYOUTS]
IN_CI = [("thawed", "fsdp2"), ("frozen", "pp2"), ("one size", "tp2")]


@pytest.mark.parametrize(("setting", "layout"), few(CASES, IN_CI))
def test_agrees_with_one_process(
    setting: str, layout: str, verify: Verifier, composition_file: Path, tmp_path: Path
) -> None:
    """Three steps. The second and the third are also taken from a checkpoint, when all items are there already."""
    world, plugins, settings = LAYOUTS[layout]
    own = ("image", "drawn:Squares" if setting == "one size" else "drawn:Drawn", "freeze")
    batch = {"train.global_batch": 4, "train.micro_batch": 2, "checkpoint.allow_changes": ["image.once"]}
    model = {**batch, **OPTIONS, **SETTINGS[setting]}
    once = {"image.once": True, "image.cache": str(tmp_path)}
    request = compositions._request(composition_file, (*own, *plugins), model | settings | once)
    narrow = {key: value for key, value in settings.items() if key == "train.precision"}
    if narrow:  # items encoded side by side round otherwise, by 3e-3 of their features
        narrow |= {**once, "image.cache": str(tmp_path / "alone")}
    reference = compositions._request(composition_file, own, model | narrow)
    verdict = verify(request, world, steps=3, reference=reference)
    assert verdict.agree, "\n".join(map(str, (*verdict.checks, *verdict.advice)))
    assert [*tmp_path.glob("*/*/*.safetensors")]
