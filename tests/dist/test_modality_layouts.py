"""Models that take in items of another modality, on two ranks of each kind, equal one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compositions
from crossed import marked
from forge_train_tools.testing import Verifier

pytestmark = [pytest.mark.dist]

MODEL: dict[str, Any] = {"train.global_batch": 4, "train.micro_batch": 2}
ONE = {"train.micro_batch": 1}
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "fsdp2": (("fsdp2",), {}),
    "fsdp2, two micro-batches, ac": (("fsdp2", "ac"), ONE),
    "ddp": (("ddp",), {}),
    "tp2": (("tp",), {"parallel.tp": 2}),
    "tp2, a sequence that does not divide": (("tp",), {"parallel.tp": 2, "train.sequence": 15}),
    "tp2, not along the sequence, ac": (("tp", "ac"), {"parallel.tp": 2, "tp.sequence_parallel": False}),
    "pp2, ac": (("pp", "ac"), {"parallel.pp": 2, **ONE}),
    "cp2": (("cp", "fsdp2"), {"parallel.cp": 2}),
    "ep2": (("moe", "ep", "fsdp2"), {"moe.experts": 4, "moe.hidden": 16, "parallel.ep": 2}),
}
EXTENDED = ("fsdp2", "ddp")
"""CI has these axes with more options."""


@pytest.mark.parametrize("layout", marked(LAYOUTS, EXTENDED))
def test_agrees_with_one_process(layout: str, verify: Verifier, composition_file: Path) -> None:
    plugins, settings = LAYOUTS[layout]
    request = compositions._request(composition_file, ("scans:Scans", *plugins), MODEL | settings)
    alone = {key: value for key, value in settings.items() if key.startswith(("moe.", "train.sequence"))}
    reference = compositions._request(
        composition_file, ("scans:Scans", *(one for one in plugins if one == "moe")), MODEL | alone
    )
    verdict = verify(request, 2, steps=2, reference=reference)
    assert verdict.agree, verdict
