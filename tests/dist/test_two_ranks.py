"""A layout of two ranks of each kind against one process: what `make test` has of all that `make test-dist` tries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import compositions
from forge_train_tools.testing import Verifier

pytestmark = [pytest.mark.dist]

EXPERTS = {"moe.experts": 4, "moe.hidden": 16, "moe.bias_speed": 0.01, "moe.shared": 1, "moe.balance": 0}
LAYOUTS: dict[str, tuple[tuple[str, ...], Mapping[str, Any]]] = {
    "fsdp2, recomputed": (("fsdp2", "ac"), {"ac.mode": "selective"}),
    "ddp": (("ddp",), {"decoder.tied": True}),
    "zero1, one text": (("zero1",), {"text.isolate": False}),
    "tp": (("tp",), {"parallel.tp": 2, "decoder.tied": True}),
    "ep": (("moe", "ep"), {"parallel.ep": 2, **EXPERTS}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_agrees_with_one_process(verify: Verifier, composition_file: Path, name: str) -> None:
    plugins, settings = LAYOUTS[name]
    batch = {"train.global_batch": 8, "train.micro_batch": 2}
    verdict = verify(compositions._request(composition_file, plugins, {**batch, **settings}), 2, steps=3)
    assert verdict.agree, verdict
    assert {"gradients", "later gradients", "updates", "optimizer", "evaluation", "checkpoint"} <= {
        check.name for check in verdict.checks
    }
