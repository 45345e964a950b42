"""`freeze` on several ranks: loss and gradients equal those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compositions
from forge_train_tools.testing import Verifier

pytestmark = [pytest.mark.dist]

FREEZE = {"freeze.parameters": ["embedding.*", "layers.0.*"], "freeze.but": ["layers.0.*norm*"]}
BATCH = {"train.global_batch": 4, "train.micro_batch": 2}
LAYOUTS: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "fsdp2×2, ac": (2, ("fsdp2", "ac"), {}),
    "ddp": (2, ("ddp",), {}),
    "zero1": (2, ("zero1",), {}),
    "tp2": (2, ("tp",), {"parallel.tp": 2}),
    "pp2, a stage without anything to train": (
        2,
        ("pp",),
        {"parallel.pp": 2, "freeze.but": [], "train.micro_batch": 1},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_agrees_with_one_process(layout: str, verify: Verifier, composition_file: Path) -> None:
    world, plugins, settings = LAYOUTS[layout]
    settings = BATCH | FREEZE | settings
    request = compositions._request(composition_file, (*plugins, "freeze"), settings)
    own = {key: value for key, value in settings.items() if key.startswith(("freeze.", "train.global"))}
    reference = compositions._request(composition_file, ("freeze",), {**own, "train.micro_batch": 4})
    verdict = verify(request, world, steps=2, reference=reference)
    assert verdict.agree, verdict
