"""Models whose encoder is frozen, for good or for the first step, on two ranks of each kind, equal one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compositions
import items_data
from crossed import few
from forge_train_tools.testing import Pool, Verifier

pytestmark = [pytest.mark.dist]

ONE = {"train.micro_batch": 1}
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "fsdp2": (("fsdp2",), ONE),
    "tp2": (("tp",), {"parallel.tp": 2}),
    "pp2": (("pp",), {"parallel.pp": 2, **ONE}),
    "cp2": (("cp", "fsdp2"), {"parallel.cp": 2}),
    "packed": (("fsdp2",), ONE),
    "ep2": (("ep", "fsdp2"), {"parallel.ep": 2}),
}
FUSIONS: dict[str, dict[str, Any]] = {
    "prefix": {},
    "cross_attention": {"decoder.layers": 3, "cross_attention.every": 1, "cross_attention.gate": 0.5},
    "mot": {},
    "moma": {"moe.experts": 6, "moma.experts.scan": 2, "moe.hidden": 16},
}
FROZEN = {"freeze.parameters": ["*.encoders.scan.embed.*", "*.encoders.scan.layers.*"]}
ENCODERS: dict[str, dict[str, Any]] = {
    "frozen": FROZEN,
    "thawed": {**FROZEN, "freeze.thaw": '[{match = "*.encoders.scan.*", steps = 1}]'},
}
CASES = [
    (encoder, fusion, layout)
    for encoder in ENCODERS
    for fusion in FUSIONS
    for layout in LAYOUTS
    if layout != "ep2" or fusion == "moma"
]
IN_CI = [
    ("frozen", "prefix", "packed"),
    ("frozen", "mot", "tp2"),
    ("frozen", "moma", "ep2"),
    ("thawed", "prefix", "fsdp2"),
    ("thawed", "cross_attention", "cp2"),
]
"""Pipelines: the test below, and tests/dist/test_image_once_layouts.py."""


def packed(folder: Path) -> Path:
    """A configuration with rows of several records, each of up to two items."""
    names = items_data.write_scans(folder, (1, 3, 2, 4))
    given = [{"text": "<scan>" * (at % 3) + f"ab {at}", "scans": names[: at % 3]} for at in range(60)]
    data = {
        "path": str(items_data.write_records(folder / "data.jsonl", given)),
        "cache": str(folder / "cache"),
        "shuffle": False,
    }
    decoder = {"dim": 32, "layers": 2, "heads": 4, "hidden": 48}
    compositions.write_config(
        file := folder / "run.toml",
        ("decoder", "multimodal"),
        train={"sequence": 24, "steps": 3},
        multimodal=data,
        decoder=decoder,
    )
    return file


@pytest.mark.parametrize(("encoder", "fusion", "layout"), few(CASES, IN_CI))
def test_agrees_with_one_process(
    encoder: str, fusion: str, layout: str, verify: Verifier, composition_file: Path, tmp_path: Path
) -> None:
    """Three steps, of which the second is the first to train what thaws."""
    plugins, settings = LAYOUTS[layout]
    own = ("scans:Scans", "freeze", fusion, *(["moe"] if fusion == "moma" else []))
    model = {"train.global_batch": 4, "train.micro_batch": 2, **FUSIONS[fusion], **ENCODERS[encoder]}
    file = composition_file
    if layout == "packed":
        own, file = ("items_data:Scans", *own[1:]), packed(tmp_path)
    request = compositions._request(file, (*own, *plugins), model | settings)
    reference = compositions._request(file, own, model)
    verdict = verify(request, 2, steps=3, reference=reference)
    assert verdict.agree, "\n".join(map(str, (*verdict.checks, *verdict.advice)))


def test_copies_of_a_frozen_encoder_in_a_pipeline_are_frozen_too(ranks: Pool, tmp_path: Path) -> None:
    """Cross attention has one in each part; it has no gradients until the encoder thaws."""
    plugins = ["scans:Scans", "cross_attention", "freeze", "pp"]
    thaw = [{"match": "*.encoders.scan.*", "steps": 1}]
    config = {"parallel.pp": 2, "train.micro_batch": 1, "freeze.thaw": thaw, **FUSIONS["cross_attention"], **FROZEN}
    stages = ranks.run("frozen_cases:trained", 2, folder=str(tmp_path), plugins=plugins, config=config, steps=2)
    for frozen, thawed in stages:
        encoders = [name for name in thawed if ".encoders.scan." in name]
        assert [name for name in encoders if name in frozen] == [one for one in encoders if "connector" in one]
        assert len(encoders) > 3
