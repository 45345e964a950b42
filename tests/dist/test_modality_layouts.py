"""Models that take in items of another modality, on two ranks of each kind, equal one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compositions
from crossed import few
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
    "tp2, experts split too": (
        ("moe", "ep", "tp"),
        {"moe.experts": 4, "moe.hidden": 16, "parallel.tp": 2, "parallel.etp": 2},
    ),
    "tp2, norms shared": (("tp",), {"parallel.tp": 2, "mot.shared": ["norms"]}),
    "pp2, attention shared, ac": (("pp", "ac"), {"parallel.pp": 2, "mot.shared": ["attention"], **ONE}),
    "pp2, input and weight gradients apart": (("pp",), {"parallel.pp": 2, "pp.schedule": "zbv", **ONE}),
}
FUSIONS: dict[str, dict[str, Any]] = {
    "prefix": {},
    "cross_attention": {"decoder.layers": 3, "cross_attention.every": 1, "cross_attention.gate": 0.5},
    "mot": {"decoder.qk_norm": True, "decoder.bias": True, "decoder.o_bias": True, "decoder.norm": "layer"},
    "moma": {
        "moe.experts": 6,
        "moma.experts.scan": 2,
        "moe.hidden": 16,
        "moe.bias_speed": 0.01,
        "moe.balance": 0.1,
    },
}
"""Fusion → settings with which it has weights of every kind."""
IN_CI = {
    "prefix": ["fsdp2, two micro-batches, ac", "pp2, ac"],
    "cross_attention": ["tp2, a sequence that does not divide", "pp2, ac"],
    "mot": ["fsdp2", "tp2, norms shared", "tp2, not along the sequence, ac", "pp2, ac", "cp2"],
    "moma": ["ep2", "tp2", "pp2, ac", "cp2"],
}
"""test_image_layouts.py has `prefix` on tp2 and cp2, and test_frozen_encoders.py `cross_attention` on cp2."""
REFUSED = {
    "moma": ["tp2, a sequence that does not divide"],
    "mot": ["ep2", "tp2, experts split too"],
}
"""Experts are shared out over equal pieces of sequences, and `mot` takes none."""
OF_MOT = [name for name, (_, settings) in LAYOUTS.items() if "mot.shared" in settings]
CASES = [
    (fusion, layout)
    for fusion in FUSIONS
    for layout in LAYOUTS
    if layout not in REFUSED.get(fusion, []) and (fusion == "mot" or layout not in OF_MOT)
]


@pytest.mark.parametrize(
    ("fusion", "layout"), few(CASES, [(fusion, layout) for fusion, layouts in IN_CI.items() for layout in layouts])
)
def test_agrees_with_one_process(fusion: str, layout: str, verify: Verifier, composition_file: Path) -> None:
    plugins, settings = LAYOUTS[layout]
    plugins = ("scans:Scans", fusion, *plugins, *(["moe"] if fusion == "moma" and "moe" not in plugins else []))
    settings = MODEL | settings | FUSIONS[fusion]
    request = compositions._request(composition_file, plugins, settings)
    alone = {key: value for key, value in settings.items() if not key.startswith(("parallel.", "tp.", "pp."))}
    reference = compositions._request(
        composition_file,
        tuple(one for one in plugins if one in ("scans:Scans", fusion, "moe")),
        alone | {"train.micro_batch": 2},
    )
    verdict = verify(request, 2, steps=2, reference=reference)
    assert verdict.agree, verdict
