"""Images in tiles, beside the tokens: any layout computes what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compositions
from crossed import marked
from drawn import TILES
from forge_train_tools.testing import Verifier

pytestmark = [pytest.mark.dist]

CELLS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "fsdp2": (("fsdp2", "ac"), {}),
    "tp2": (("tp",), {"parallel.tp": 2}),
    "cp2": (("cp", "fsdp2"), {"parallel.cp": 2}),
    "pp2": (("pp",), {"parallel.pp": 2, "train.micro_batch": 1}),
}


@pytest.mark.parametrize("cell", marked(CELLS, ("tp2", "cp2", "pp2")))
def test_agrees_with_one_process(cell: str, verify: Verifier, composition_file: Path) -> None:
    plugins, layout = CELLS[cell]
    beside = ("image_tiles", "cross_attention", "drawn:Tiled")
    model = {"train.global_batch": 4, "train.micro_batch": 2, **TILES}
    request = compositions._request(composition_file, (*beside, *plugins), model | layout)
    alone = compositions._request(composition_file, beside, model)
    verdict = verify(request, 2, steps=2, reference=alone)
    assert verdict.agree, verdict
