"""`forge verify` with multi-head latent attention on every axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compositions
import forge_cli
from crossed import marked
from forge_train_tools.testing import Pool, Verifier

pytestmark = [pytest.mark.dist]

MODEL: dict[str, Any] = {
    "mla.kv_rank": 16,
    "mla.q_rank": 24,
    "mla.rope_dim": 4,
    "train.global_batch": 4,
    "train.micro_batch": 2,
}
CP = {"parallel.cp": 2}
EXPERTS = {"moe.experts": 4, "moe.hidden": 16, "parallel.ep": 2}
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "fsdp2, ac": (("fsdp2", "ac"), {}),
    "tp2": (("tp",), {"parallel.tp": 2}),
    "tp2, whole queries, wide values, biases": (
        ("tp",),
        {"parallel.tp": 2, "mla.q_rank": 0, "mla.v_dim": 16, "decoder.qkv_bias": True, "decoder.o_bias": True},
    ),
    "tp2, not along the sequence": (("tp",), {"parallel.tp": 2, "tp.sequence_parallel": False}),
    "pp2": (("pp",), {"parallel.pp": 2}),
    "cp2 gather": (("cp", "fsdp2"), {**CP, "cp.method": "gather"}),
    "cp2 ulysses": (("cp", "fsdp2"), {**CP, "cp.method": "ulysses"}),
    "cp2 ring": (("cp", "fsdp2", "eager"), {**CP, "cp.method": "ring"}),
    "ep2": (("moe", "ep", "fsdp2"), EXPERTS),
}


EXTENDED = ("tp2", "tp2, not along the sequence", "cp2 gather", "cp2 ulysses")
"""CI has tp2 with more options, and cp2 with `ring`."""


@pytest.mark.parametrize("layout", marked(LAYOUTS, EXTENDED))
def test_agrees_with_one_process(layout: str, verify: Verifier, composition_file: Path) -> None:
    plugins, settings = LAYOUTS[layout]
    verdict = verify(compositions._request(composition_file, ("mla", *plugins), MODEL | settings), 2, steps=2)
    assert verdict.agree, verdict


def test_ranks_with_some_of_the_heads_generate_what_one_process_does(ranks: Pool, tmp_path: Path) -> None:
    model = {"decoder.kv_heads": 4, **{key: value for key, value in MODEL.items() if key.startswith("mla.")}}
    model |= {"decoder.std": 0.2, "adamw.lr": 0.01}
    texts = []
    for world, plugins, layout in ((1, ("mla",), {}), (2, ("mla", "tp"), {"parallel.tp": 2})):
        folder = str(tmp_path / str(world))
        texts += ranks.run("generating_cases:generated", world, folder=folder, plugins=plugins, config=model | layout)
    assert len(texts) == 3
    assert len(set(texts)) == 1, texts
    assert len(set(texts[0])) > 1


def test_heads_that_ranks_can_not_share_out_are_refused(composition_file: Path) -> None:
    arguments = ("verify", composition_file, "--nproc", 2, "-p", "mla,tp", "-s", "parallel.tp=2")
    heads = ("-s", "decoder.heads=3", "-s", "decoder.head_dim=8")
    message = forge_cli.one_message(forge_cli.forge(*arguments, *heads), 2)
    assert "'layers.0.attention.q_b': it has 3 heads of 72 features" in message
    assert "'layers.0.attention.kv_b': it has 3 heads of 16 features" in message
