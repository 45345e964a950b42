"""Runs that encode each image once equal one process that encodes images in every batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compositions
import items_data
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
IN_CI = [("thawed", "fsdp2")]


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


FUSIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "cross_attention": ((), {"cross_attention.every": 1, "cross_attention.gate": 0.5}),
    "mot": ((), {}),
    "moma": (("moe",), {"moe.experts": 4, "moe.hidden": 16}),
}
FUSED = [(fusion, layout) for fusion in FUSIONS for layout in ("fsdp2", "pp2", "cp2")]


@pytest.mark.parametrize(("fusion", "layout"), few(FUSED, [("cross_attention", "pp2")]))
def test_records_of_several_images_agree_with_every_fusion(
    fusion: str, layout: str, verify: Verifier, tmp_path: Path
) -> None:
    """Rows of several records, of which some have two images and others none; the encoder thaws after a step."""
    world, plugins, settings = LAYOUTS[layout]
    beside, options = FUSIONS[fusion]
    own = ("image", "freeze", fusion, *beside)
    file = records(tmp_path)
    model = {**OPTIONS, "image.fit": "square", **SETTINGS["thawed"], **options}
    once = {"image.once": True, "image.cache": str(tmp_path / "kept")}
    request = compositions._request(file, (*own, *plugins), model | settings | once)
    verdict = verify(request, world, steps=3, reference=compositions._request(file, own, model))
    assert verdict.agree, "\n".join(map(str, (*verdict.checks, *verdict.advice)))
    assert len([*(tmp_path / "kept").glob("*/*/*.safetensors")]) <= 4


def records(folder: Path) -> Path:
    """A configuration with texts, and four images among them."""
    pillow = pytest.importorskip("PIL.Image")
    names = [f"{number}.png" for number in range(4)]
    for number, name in enumerate(names):
        pillow.new("RGB", (8, 8), (60 * number, 200 - 50 * number, 90)).save(folder / name)
    given = [
        {"text": "<image>" * (at % 3) + f"ab {at}", "images": [*names, *names][at % 4 :][: at % 3]} for at in range(60)
    ]
    data = {
        "path": str(items_data.write_records(folder / "data.jsonl", given)),
        "cache": str(folder / "cache"),
        "shuffle": False,
    }
    train = {"sequence": 24, "steps": 3, "global_batch": 4, "micro_batch": 2}
    decoder = {"dim": 32, "layers": 2, "heads": 4, "hidden": 48}
    compositions.write_config(
        file := folder / "run.toml",
        ("decoder", "multimodal"),
        train=train,
        multimodal=data,
        decoder=decoder,
        checkpoint={"allow_changes": ["image.once"]},
    )
    return file
