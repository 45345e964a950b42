"""`forge verify` with dropout of attention's weights: the same weights are dropped on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compositions
from crossed import marked
from forge_train_tools.testing import Verifier

pytestmark = [pytest.mark.dist]

MODEL: dict[str, Any] = {
    "decoder.attention_dropout": 0.3,
    "decoder.dropout": 0.0,
    "decoder.kv_heads": 2,
    "text.isolate": True,
    "train.global_batch": 4,
    "train.micro_batch": 2,
}
ONE = {"train.micro_batch": 1}
RING = {"parallel.cp": 2, "cp.method": "ring"}
LATENT = {"mla.kv_rank": 8, "mla.q_rank": 8, "mla.rope_dim": 4, "decoder.kv_heads": 0}
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "fsdp2, two micro-batches, ac": (("fsdp2", "ac"), ONE),
    "tp2": (("tp",), {"parallel.tp": 2}),
    "pp2, ac": (("pp", "ac"), {"parallel.pp": 2, **ONE}),
    "cp2, ring": (("cp", "fsdp2"), {**RING, "decoder.sinks": True}),
    "cp2, ring, whole rows": (("cp", "fsdp2", "ac"), {**RING, "text.isolate": False}),
    "cp2, gather": (("cp", "fsdp2"), {"parallel.cp": 2, "cp.method": "gather"}),
    "cp2, ulysses": (("cp", "fsdp2"), {"parallel.cp": 2, "cp.method": "ulysses"}),
    "mla, tp2": (("mla", "tp"), {**LATENT, "parallel.tp": 2}),
    "tp2 × cp2": (("tp", "cp", "fsdp2"), {**RING, "parallel.tp": 2}),
}
OF_MODEL = ("decoder.", "mla.", "text.")


EXTENDED = ("cp2, ring, whole rows", "cp2, ulysses", "tp2 × cp2")
"""CI has tp2 and cp2 apart, and cp2 with two other methods."""


@pytest.mark.parametrize("layout", marked(LAYOUTS, EXTENDED))
def test_agrees_with_one_process(layout: str, verify: Verifier, composition_file: Path) -> None:
    plugins, settings = LAYOUTS[layout]
    request = compositions._request(composition_file, ("eager", *plugins), MODEL | settings)
    own = {key: value for key, value in settings.items() if key.startswith(OF_MODEL)}
    models = tuple(one for one in plugins if one == "mla")
    reference = compositions._request(composition_file, ("eager", *models), {**MODEL, **own, "train.micro_batch": 4})
    verdict = verify(request, 4 if "×" in layout else 2, steps=2, reference=reference)
    assert verdict.agree, verdict


def test_masks_by_the_positions_in_a_block_are_found(verify: Verifier, composition_file: Path) -> None:
    settings = {**MODEL, "parallel.cp": 2, "local_dropout.method": "ring"}
    request = compositions._request(composition_file, ("eager", "context_sabotage:LocalDropout", "fsdp2"), settings)
    verdict = verify(request, 2, steps=2, reference=compositions._request(composition_file, ("eager",), MODEL))
    assert not verdict.agree
