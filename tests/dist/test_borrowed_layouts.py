"""An encoder that is a vision model of `transformers`, on two ranks, equals one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import compositions
from crossed import marked
from forge_train_tools.testing import Verifier

transformers: Any = pytest.importorskip("transformers")
pytestmark = [pytest.mark.dist]

CELLS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "fsdp2, ac": (("fsdp2", "ac"), {}),
    "tp2": (("tp",), {"parallel.tp": 2}),
    "cp2": (("cp", "fsdp2"), {"parallel.cp": 2}),
    "pp2, frozen": (
        ("pp", "freeze"),
        {"parallel.pp": 2, "train.micro_batch": 1, "freeze.parameters": ["fusion.enter.encoders.image.vision.*"]},
    ),
}
EXTENDED = ("tp2", "cp2", "pp2, frozen")
"""tests/dist/test_image_layouts.py has these axes with an encoder of Forge's own."""
OPTIONS = {
    "image.fit": "square",
    "image.connector": "resampler",
    "image.queries": 2,
    "image.merge": 1,
    "image.std": 0.2,
    "train.global_batch": 4,
    "train.micro_batch": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random DINOv2 for images of 8 × 8 pixels."""
    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2, image_size=8, patch_size=2
    )
    path = tmp_path_factory.mktemp("dinov2")
    transformers.Dinov2Model(config).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("cell", marked(CELLS, EXTENDED))
def test_agrees_with_one_process(cell: str, verify: Verifier, composition_file: Path, folder: str) -> None:
    plugins, layout = CELLS[cell]
    frozen = {key: value for key, value in layout.items() if key.startswith("freeze.")}
    beside = ("image", "drawn:Squares", *(["freeze"] if frozen else []))
    model = {**OPTIONS, "image.model": folder, **frozen}
    request = compositions._request(composition_file, (*beside, *(set(plugins) - {"freeze"})), model | layout)
    alone = compositions._request(composition_file, beside, model)
    verdict = verify(request, 2, steps=2, reference=alone)
    assert verdict.agree, verdict
