"""Texts with items, of which some ranks' micro-batches have none: two ranks of each kind equal one process.

Rows are spread over ranks by what their items cost, and dropout follows them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compositions
import items_data
from forge_train_tools.testing import Verifier

pytestmark = [pytest.mark.dist]

LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "fsdp2": (("fsdp2",), {}),
    "fsdp2, accumulated": (("fsdp2",), {"train.micro_batch": 1}),
    "cp2": (("cp", "fsdp2"), {"parallel.cp": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_agrees_with_one_process(layout: str, verify: Verifier, tmp_path: Path) -> None:
    plugins, settings = LAYOUTS[layout]
    names = items_data.write_scans(tmp_path, (1, 3, 2, 4))
    given = [{"text": "<scan>" * (at % 3) + f"ab {at}", "scans": names[: at % 3]} for at in range(12)]
    values = {
        "multimodal.path": str(items_data.write_records(tmp_path / "data.jsonl", given)),
        "multimodal.cache": str(tmp_path / "cache"),
        "multimodal.packing": "pad",
        "multimodal.held_out": 0.2,
        "multimodal.shuffle": False,
    }
    train = {
        "steps": 2,
        "global_batch": 4,
        "micro_batch": 2,
        "sequence": 24,
        "evaluate_every": 2,
        "evaluate_batches": 1,
    }
    file = tmp_path / "run.toml"
    compositions.write_config(
        file, ("decoder",), run={"seed": 3}, train=train, decoder={"layers": 2, "dropout": 0.2}, adamw={"lr": 1e-2}
    )
    data = ("items_data:Scans", "multimodal")
    request = compositions._request(file, (*data, *plugins), values | settings)
    reference = compositions._request(file, data, values)
    verdict = verify(request, 2, steps=2, reference=reference)
    assert verdict.agree, "\n".join(map(str, (*verdict.checks, *verdict.advice)))
