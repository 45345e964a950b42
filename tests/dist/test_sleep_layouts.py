"""Runs that sleep between micro-batches, on layouts: what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compositions
from crossed import marked
from forge_train_tools.testing import Verifier

LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "fsdp2×2, ac": (("fsdp2", "ac"), {}),
    "ddp": (("ddp",), {}),
    "tp2": (("tp",), {"parallel.tp": 2}),
    "pp2": (("pp",), {"parallel.pp": 2}),
}


@pytest.mark.dist
@pytest.mark.parametrize("layout", marked(LAYOUTS, ["ddp"]))
def test_a_layout_that_sleeps_agrees(layout: str, verify: Verifier, composition_file: Path, tmp_path: Path) -> None:
    plugins, settings = LAYOUTS[layout]
    sleeps = {"sleeper.folder": str(tmp_path)}
    request = compositions._request(
        composition_file, (*plugins, "sleepers:Sleeper"), {"train.micro_batch": 6, **settings, **sleeps}
    )
    reference = compositions._request(composition_file, ("sleepers:Sleeper",), {"train.micro_batch": 12, **sleeps})
    verdict = verify(request, 2, steps=2, reference=reference)
    assert verdict.agree, verdict
