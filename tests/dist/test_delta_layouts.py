"""`forge verify` with gated delta-rule layers on every axis."""

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
    "decoder.layers": 4,
    "delta_net.heads": 4,
    "delta_net.k_heads": 2,
    "delta_net.k_dim": 6,
    "delta_net.chunk": 5,
    "train.global_batch": 4,
    "train.micro_batch": 2,
}
PACKED = {"text.isolate": True}
CP = {"parallel.cp": 2}
EXPERTS = {"moe.experts": 4, "moe.hidden": 16, "parallel.ep": 2}
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "fsdp2, ac, packed": (("fsdp2", "ac"), PACKED),
    "tp2, packed": (("tp",), {"parallel.tp": 2, **PACKED}),
    "tp2, not along the sequence": (("tp",), {"parallel.tp": 2, "tp.sequence_parallel": False}),
    "pp2": (("pp",), {"parallel.pp": 2}),
    "cp2, packed, gather": (("cp", "fsdp2"), {**CP, **PACKED, "cp.method": "gather"}),
    "cp2, all layers": (("cp", "fsdp2"), {**CP, "delta_net.layers": []}),
    "tp2 × cp2, packed": (("tp", "cp", "fsdp2"), {**CP, **PACKED, "parallel.tp": 2, "delta_net.k_heads": 4}),
    "ep2": (("moe", "ep", "fsdp2"), EXPERTS),
    "compiled": (("fsdp2", "compile"), {"compile.backend": "aot_eager", **PACKED, "decoder.layers": 2}),
}
EXTENDED = ("ep2", "tp2 × cp2, packed", "compiled", "tp2, not along the sequence", "cp2, all layers")
"""CI has cp2 with `gather`; none of its tests compiles such layers, which takes as long as all the others."""


@pytest.mark.parametrize("layout", marked(LAYOUTS, EXTENDED))
def test_agrees_with_one_process(layout: str, verify: Verifier, composition_file: Path) -> None:
    plugins, settings = LAYOUTS[layout]
    request = compositions._request(composition_file, ("delta_net", *plugins), MODEL | settings)
    verdict = verify(request, 4 if "×" in layout else 2, steps=2)
    assert verdict.agree, verdict


def test_ranks_with_some_of_the_heads_generate_what_one_process_does(ranks: Pool, tmp_path: Path) -> None:
    model = {key: value for key, value in MODEL.items() if key.startswith("delta_net.")}
    model |= {"decoder.std": 0.2, "adamw.lr": 0.01}
    texts = []
    for world, plugins, layout in ((1, ("delta_net",), {}), (2, ("delta_net", "tp"), {"parallel.tp": 2})):
        folder = str(tmp_path / str(world))
        texts += ranks.run("generating_cases:generated", world, folder=folder, plugins=plugins, config=model | layout)
    assert len(texts) == 3
    assert len(set(texts)) == 1, texts
    assert len(set(texts[0])) > 1


@pytest.mark.parametrize(
    ("axis", "says"),
    [
        ("tp", "'layers.0.attention.k_conv': it has 3 heads of 6 features, and every rank needs whole ones"),
        ("cp", "2 ranks can't divide the 3 value heads and 3 key heads of layers.0.attention (GatedDeltaNet)"),
    ],
)
def test_heads_that_ranks_can_not_share_out_are_refused(composition_file: Path, axis: str, says: str) -> None:
    plugins = "delta_net,tp" if axis == "tp" else "delta_net,cp,fsdp2"
    arguments = ("verify", composition_file, "--nproc", 2, "-p", plugins, "-s", f"parallel.{axis}=2")
    heads = ("-s", "delta_net.heads=3", "-s", "delta_net.k_dim=6")
    assert says in forge_cli.one_message(forge_cli.forge(*arguments, *heads), 2)
