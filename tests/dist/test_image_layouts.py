"""The encoder of images on two ranks equals one process, trained and frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compositions
from crossed import marked
from drawn import OPTIONS, SQUARE
from forge_train_tools.testing import Verifier

pytestmark = [pytest.mark.dist]

FROZEN = {"freeze.parameters": ["fusion.enter.encoders.image.vision.*"]}
SECTIONS = {
    "decoder.rope.sections": [2, 1, 1],
    "image.positions": "rotary",
    "image.window": 2,
    "image.full_layers": [1],
    "image.norm": "rms",
    "image.gated": True,
    "image.activation": "silu",
    "image.patch_frames": 2,
    "image.connector_hidden": 24,
}
"""Of Qwen2.5-VL."""
CLIPS = {**SECTIONS, "video.encoded_by": "image", "video.size": 8, "video.fit": "keep"}
"""Images and clips that share its encoder."""
CELLS: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    "fsdp2, ac": (("fsdp2", "ac"), {}, {"image.positions": "rotary"}),
    "fsdp2, frozen": (("fsdp2",), {}, FROZEN),
    "tp2": (("tp",), {"parallel.tp": 2}, {"image.connector": "pooling"}),
    "cp2": (("cp", "fsdp2"), {"parallel.cp": 2}, {}),
    "pp2": (("pp",), {"parallel.pp": 2, "train.micro_batch": 1}, {"image.positions": "sines"}),
    "fsdp2, one size": (("fsdp2",), {}, SQUARE),
    "cp2, three axes": (("cp", "fsdp2"), {"parallel.cp": 2}, SECTIONS),
    "tp2, three axes, ac": (("tp", "ac"), {"parallel.tp": 2}, SECTIONS),
    "pp2, three axes": (("pp",), {"parallel.pp": 2, "train.micro_batch": 1}, SECTIONS),
    "fsdp2, clips too": (("fsdp2", "ac"), {"train.micro_batch": 1}, CLIPS),
    "tp2, clips too": (("tp",), {"parallel.tp": 2}, CLIPS),
    "cp2, clips too": (("cp", "fsdp2"), {"parallel.cp": 2}, CLIPS),
    "pp2, clips too": (("pp",), {"parallel.pp": 2, "train.micro_batch": 1}, CLIPS),
    "pp2, frozen": (("pp",), {"parallel.pp": 2, "train.micro_batch": 1}, FROZEN),
}
EXTENDED = (
    *("fsdp2, ac", "cp2", "fsdp2, one size", "pp2", "pp2, frozen", "tp2, three axes, ac", "pp2, three axes"),
    *("tp2, clips too", "cp2, clips too", "pp2, clips too"),
)
"""tests/dist/test_modality_layouts.py has these axes, and CI images and clips on one of them."""


@pytest.mark.parametrize("cell", marked(CELLS, EXTENDED))
def test_agrees_with_one_process(cell: str, verify: Verifier, composition_file: Path) -> None:
    plugins, layout, options = CELLS[cell]
    drawn = "drawn:Squares" if options is SQUARE else "drawn:Clips" if options is CLIPS else "drawn:Drawn"
    beside = (
        *(["image", "video"] if options is CLIPS else ["image"]),
        drawn,
        *(["freeze"] if options is FROZEN else []),
    )
    model = {"train.global_batch": 4, "train.micro_batch": 2, **OPTIONS, **options}
    request = compositions._request(composition_file, (*beside, *plugins), model | layout)
    alone = compositions._request(composition_file, beside, model)
    verdict = verify(request, 2, steps=2, reference=alone)
    assert verdict.agree, verdict
