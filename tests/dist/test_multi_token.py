"""`forge verify` with multi-token prediction on every axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compositions
from crossed import marked
from forge_train_tools.testing import Verifier

pytestmark = [pytest.mark.dist]

MODEL: dict[str, Any] = {"mtp.depths": 2, "train.global_batch": 4, "train.micro_batch": 2}
TP, PP, CP = {"parallel.tp": 2}, {"parallel.pp": 2}, {"parallel.cp": 2}
EXPERTS = {"moe.experts": 4, "moe.hidden": 16, "parallel.ep": 2}
LATENT = {"mla.kv_rank": 16, "mla.q_rank": 24, "mla.rope_dim": 4}
TIED, PACKED = {"decoder.tied": True}, {"text.isolate": True}
LAYOUTS: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "fsdp2, ac": (2, ("fsdp2", "ac"), PACKED),
    "fsdp2, tied, accumulation": (2, ("fsdp2",), {**TIED, "train.micro_batch": 1, "fsdp2.reshard": "never"}),
    "ddp": (2, ("ddp",), {}),
    "zero1": (2, ("zero1",), {}),
    "tp2": (2, ("tp",), TP | PACKED),
    "tp2, tied, not along the sequence": (2, ("tp",), {**TP, **TIED, "tp.sequence_parallel": False}),
    "tp2, whole logits": (2, ("tp",), {**TP, "tp.loss_parallel": False}),
    "pp2": (2, ("pp",), PP | PACKED),
    "pp2, tied": (2, ("pp",), PP | TIED),
    "pp2, split backward": (2, ("pp",), {**PP, "pp.schedule": "zbv", "decoder.layers": 3}),
    "pp2, fsdp2": (4, ("pp", "fsdp2"), {**PP, "train.global_batch": 8}),
    "pp2, fsdp2, tied, two under way": (
        4,
        ("pp", "fsdp2"),
        {**PP, **TIED, "train.global_batch": 8, "pp.schedule": "gpipe"},
    ),
    "pp2, tp2, mla": (4, ("pp", "tp", "mla"), PP | TP | LATENT),
    "pp2, ep2 over tp2": (4, ("pp", "tp", "moe", "ep"), PP | TP | EXPERTS),
    "ep2": (2, ("moe", "ep", "fsdp2"), EXPERTS),
    "cp2 gather": (2, ("cp", "fsdp2"), {**CP, "cp.method": "gather", **PACKED}),
    "cp2 ring": (2, ("cp", "fsdp2", "eager"), {**CP, "cp.method": "ring"}),
    "cp2, pp2": (4, ("cp", "pp"), CP | PP),
}
EXTENDED = (
    *("tp2", "tp2, tied, not along the sequence", "cp2 gather", "pp2", "pp2, tied", "zero1"),
    *("fsdp2, tied, accumulation", "ep2"),
    *("tp2, whole logits", "pp2, fsdp2", "pp2, fsdp2, tied, two under way", "pp2, ep2 over tp2", "cp2, pp2"),
)
"""CI has pp2 beside tp2, and each of these axes alone, or with more options."""


@pytest.mark.parametrize("layout", marked(LAYOUTS, EXTENDED))
def test_agrees_with_one_process(layout: str, verify: Verifier, composition_file: Path) -> None:
    world, plugins, settings = LAYOUTS[layout]
    verdict = verify(compositions._request(composition_file, ("mtp", *plugins), MODEL | settings), world, steps=2)
    assert verdict.agree, verdict
