"""The options of dense families on two ranks of each kind, against one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import compositions
from crossed import marked
from forge_train import ForgeError
from forge_train_tools.configuration.request import Request
from forge_train_tools.testing import Verifier

pytestmark = [pytest.mark.dist]

Settings = Mapping[str, Any]
BASE: Settings = {"decoder.kv_heads": 2, "train.global_batch": 12, "train.micro_batch": 12}
WINDOWS: Settings = {"decoder.window": 5, "decoder.window_layers": [True, False]}
GEMMA: Settings = {
    **WINDOWS,
    "decoder.norm_at": "both",
    "decoder.unit_offset": True,
    "decoder.qk_norm": True,
    "decoder.soft_cap": 0.5,
    "decoder.scale": 0.3,
    "decoder.logit_soft_cap": 2.0,
    "decoder.embedding_multiplier": 5.5,
    "decoder.rope.window_theta": 100,
    "decoder.tied": True,
    "swiglu.activation": "geglu_tanh",
}
OTHERS: Settings = {
    **WINDOWS,
    "decoder.norm_at": "post",
    "decoder.qkv_bias": True,
    "decoder.o_bias": True,
    "decoder.rope.layers": [False, True],
    "decoder.rope.fraction": 0.5,
    "decoder.residual_multiplier": 0.5,
    "decoder.logit_divisor": 4.0,
    "decoder.embedding_multiplier": 3.0,
}
WIDTH: Settings = {"decoder.norm_at": "post", "decoder.qk_norm": True, "decoder.qk_norm_over": "width"}
PACKED: Settings = {"text.isolate": True}
ALONE: Settings = {"text.isolate": False}
LAYOUTS: dict[str, tuple[tuple[str, ...], Settings]] = {
    "tp2": (("tp",), {"parallel.tp": 2}),
    "fsdp2": (("fsdp2",), {"train.micro_batch": 6}),
    "pp2": (("pp",), {"parallel.pp": 2, "train.micro_batch": 3}),
    "cp2": (("cp", "fsdp2"), {"parallel.cp": 2, "cp.method": "gather"}),
    "cp2, ring": (("cp", "fsdp2"), {"parallel.cp": 2, "cp.method": "ring"}),
    "cp2, ulysses": (("cp", "fsdp2"), {"parallel.cp": 2, "cp.method": "ulysses"}),
}
CASES: dict[str, tuple[str, str, Settings]] = {
    "gemma, packed, tp2": ("tp2", "flex", {**GEMMA, **PACKED}),
    "gemma, packed, fsdp2": ("fsdp2", "flex", {**GEMMA, **PACKED}),
    "gemma, pp2": ("pp2", "eager", {**GEMMA, **ALONE}),
    "gemma, packed, cp2": ("cp2", "flex", {**GEMMA, **PACKED}),
    "gemma, packed, ring": ("cp2, ring", "flex", {**GEMMA, **PACKED}),
    "gemma, ulysses": ("cp2, ulysses", "eager", {**GEMMA, **ALONE}),
    "others, tp2": ("tp2", "sdpa", {**OTHERS, **ALONE}),
    "others, packed, fsdp2": ("fsdp2", "varlen", {**OTHERS, **PACKED}),
    "others, packed, pp2": ("pp2", "sdpa", {**OTHERS, **PACKED}),
    "others, packed, cp2": ("cp2", "sdpa", {**OTHERS, **PACKED}),
    "width, tp2": ("tp2", "sdpa", {**WIDTH, **ALONE}),
    "width, fsdp2": ("fsdp2", "sdpa", {**WIDTH, **PACKED}),
}


def requests(file: Path, layout: str, kernel: str, model: Settings) -> tuple[Request, Request]:
    """What `forge verify` is asked, and the same model in one process."""
    plugins, settings = LAYOUTS[layout]
    own = {**BASE, **model}
    request = compositions._request(file, (*plugins, kernel), {**own, **settings})
    return request, compositions._request(file, (kernel,), own)


EXTENDED = ("gemma, packed, tp2", "gemma, packed, cp2", "gemma, ulysses", "others, packed, fsdp2", "width, fsdp2")
"""CI has every option, and every layout."""


@pytest.mark.parametrize("case", marked(CASES, EXTENDED))
def test_options_of_families_agree_with_one_process(verify: Verifier, composition_file: Path, case: str) -> None:
    request, reference = requests(composition_file, *CASES[case])
    verdict = verify(request, 2, steps=2, reference=reference)
    assert verdict.agree, verdict


def test_a_ring_needs_a_kernel_that_computes_blocks(verify: Verifier, composition_file: Path) -> None:
    request, reference = requests(composition_file, "cp2, ring", "eager", {**OTHERS, **ALONE})
    assert verify(request, 2, steps=1, reference=reference).agree
    request, _ = requests(composition_file, "cp2, ring", "sdpa", {**OTHERS, **ALONE})
    with pytest.raises(ForgeError, match="sdpa"):
        verify(request, 2, steps=1)
