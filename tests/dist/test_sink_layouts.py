"""Sinks, learned positions and length-dependent rotations on two ranks of each kind, against one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import compositions
from crossed import marked
from forge_train import ConfigError
from forge_train_tools.configuration.request import Request
from forge_train_tools.testing import Verifier
from test_family_layouts import ALONE, BASE, LAYOUTS, PACKED, WINDOWS

pytestmark = [pytest.mark.dist]

Settings = Mapping[str, Any]
SINKS: Settings = {**WINDOWS, "decoder.sinks": True, "decoder.std": 0.3}
EXPERTS: Settings = {**SINKS, "moe.experts": 4, "moe.bias": True, "moe.activation": "clamped_swiglu", "moe.limit": 0.5}
LEARNED: Settings = {
    "decoder.positions": "learned",
    "decoder.norm": "layer",
    "decoder.bias": True,
    "decoder.qkv_bias": True,
    "decoder.o_bias": True,
    "decoder.tied": True,
    "decoder.embedding_dropout": 0.1,
    "swiglu.activation": "gelu_tanh",
}
PARALLEL: Settings = {"decoder.parallel": True, "decoder.norm": "layer", "decoder.bias": True}
LONG: Settings = {
    "decoder.rope.scaling": "longrope",
    "decoder.rope.original_sequence": 8,
    "decoder.rope.short": [1.0, 1.0, 1.5, 2.0],
    "decoder.rope.long": [1.0, 2.0, 4.0, 8.0],
}
DYNAMIC: Settings = {
    "decoder.rope.scaling": "dynamic",
    "decoder.rope.original_sequence": 8,
    "decoder.rope.factor": 2.0,
}
CASES: dict[str, tuple[str, str, Settings]] = {
    "sinks, packed, tp2": ("tp2", "flex", {**SINKS, **PACKED}),
    "sinks, packed, fsdp2": ("fsdp2", "flex", {**SINKS, **PACKED}),
    "sinks, pp2": ("pp2", "eager", {**SINKS, **ALONE}),
    "sinks, packed, cp2": ("cp2", "flex", {**SINKS, **PACKED}),
    "sinks, ring": ("cp2, ring", "eager", {**SINKS, **ALONE}),
    "sinks, packed, ulysses": ("cp2, ulysses", "flex", {**SINKS, **PACKED}),
    "sinks, experts, ep2": ("ep2", "eager", {**EXPERTS, **ALONE}),
    "sinks, experts, tp2": ("tp2", "eager", {**EXPERTS, **ALONE}),
    "learned, packed, tp2": ("tp2", "sdpa", {**LEARNED, **PACKED}),
    "learned, packed, fsdp2": ("fsdp2", "sdpa", {**LEARNED, **PACKED}),
    "learned, pp2": ("pp2", "sdpa", {**LEARNED, **PACKED}),
    "learned, cp2": ("cp2", "sdpa", {**LEARNED, **PACKED}),
    "parallel, tp2": ("tp2", "sdpa", {**PARALLEL, **ALONE}),
    "longrope, packed, tp2": ("tp2", "sdpa", {**LONG, **PACKED}),
    "longrope, packed, fsdp2": ("fsdp2", "sdpa", {**LONG, **PACKED}),
    "dynamic, pp2": ("pp2", "sdpa", {**DYNAMIC, **PACKED}),
}
EP2: tuple[tuple[str, ...], Settings] = (("ep", "fsdp2"), {"parallel.ep": 2, "train.micro_batch": 6})


def requests(file: Path, layout: str, kernel: str, model: Settings) -> tuple[Request, Request]:
    """What `forge verify` is asked, and the same model in one process."""
    plugins, settings = EP2 if layout == "ep2" else LAYOUTS[layout]
    own, needed = {**BASE, **model}, (kernel, *(("moe",) if "moe.experts" in model else ()))
    request = compositions._request(file, (*plugins, *needed), {**own, **settings})
    return request, compositions._request(file, needed, own)


EXTENDED = (
    *("sinks, packed, fsdp2", "sinks, packed, ulysses", "sinks, experts, tp2", "learned, packed, tp2"),
    *("learned, pp2", "learned, cp2", "longrope, packed, tp2"),
)
"""CI has every kind of sinks and positions, and every layout."""


@pytest.mark.parametrize("case", marked(CASES, EXTENDED))
def test_sinks_and_positions_agree_with_one_process(verify: Verifier, composition_file: Path, case: str) -> None:
    request, reference = requests(composition_file, *CASES[case])
    verdict = verify(request, 2, steps=2, reference=reference)
    assert verdict.agree, verdict


def test_what_slices_of_a_sequence_or_of_an_expert_can_not_do_is_refused(
    verify: Verifier, composition_file: Path
) -> None:
    request, _ = requests(composition_file, "cp2", "sdpa", {**LONG, **ALONE})
    with pytest.raises(ConfigError, match=r"parallel\.cp: decoder\.rope\.scaling = 'longrope' depends on the length"):
        verify(request, 2, steps=1)
    request, _ = requests(composition_file, "tp2", "sdpa", {**SINKS, **ALONE})
    with pytest.raises(ConfigError, match="sinks"):
        verify(request, 2, steps=1)


def test_slices_of_a_sequence_within_the_original_context_are_all_short(
    verify: Verifier, composition_file: Path
) -> None:
    within = {**LONG, "decoder.rope.original_sequence": 16, "decoder.max_sequence": 64, **PACKED}
    request, reference = requests(composition_file, "cp2", "sdpa", within)
    assert verify(request, 2, steps=1, reference=reference).agree
