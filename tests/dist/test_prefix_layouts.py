"""Documents whose prefixes see all of themselves: two ranks of each kind equal one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compositions
from crossed import marked
from forge_train_tools.testing import Verifier

pytestmark = [pytest.mark.dist]

MODEL = {"decoder.prefix": True, "train.global_batch": 4, "train.micro_batch": 2}
WINDOW = {"decoder.window": 5, "decoder.window_layers": [True, False]}
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    "fsdp2, ac": (("fsdp2", "ac"), {}, {}),
    "tp2": (("tp",), {"parallel.tp": 2}, WINDOW),
    "pp2, items": (("pp", "scans:Scans"), {"parallel.pp": 2, "train.micro_batch": 1}, {}),
    "tp2, items": (("tp", "scans:Scans"), {"parallel.tp": 2}, {}),
    "cp2, items": (("cp", "scans:Scans"), {"parallel.cp": 2, "cp.method": "gather"}, {}),
    "cp2, gathered": (("cp",), {"parallel.cp": 2, "cp.method": "gather"}, {}),
    "cp2, by heads, flex": (("cp", "flex"), {"parallel.cp": 2, "cp.method": "ulysses"}, WINDOW),
    "cp2, eager, gathered": (("cp", "eager"), {"parallel.cp": 2, "cp.method": "gather"}, WINDOW),
}
EXTENDED = ("fsdp2, ac", "tp2, items", "cp2, items", "cp2, eager, gathered")


@pytest.mark.parametrize("case", marked(CASES, EXTENDED))
def test_agrees_with_one_process(case: str, verify: Verifier, composition_file: Path) -> None:
    plugins, layout, options = CASES[case]
    request = compositions._request(composition_file, ("prompted:Prompts", *plugins), MODEL | layout | options)
    same = [one for one in plugins if one in ("eager", "flex", "scans:Scans")]
    reference = compositions._request(composition_file, ("prompted:Prompts", *same), MODEL | options)
    verdict = verify(request, 2, steps=2, reference=reference)
    assert verdict.agree, verdict


def test_blocks_that_go_round_are_refused(verify: Verifier, composition_file: Path) -> None:
    settings = MODEL | {"parallel.cp": 2, "cp.method": "ring"}
    request = compositions._request(composition_file, ("prompted:Prompts", "cp", "flex"), settings)
    reference = compositions._request(composition_file, ("prompted:Prompts", "flex"), MODEL)
    with pytest.raises(Exception, match="see each other in layers.0.attention.*take 'gather' or 'ulysses'"):
        verify(request, 2, steps=1, reference=reference)
