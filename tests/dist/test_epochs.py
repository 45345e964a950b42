"""`train.epochs`: every layout reads each record once an epoch, and a resumed run ends at the same step."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import epoch_cases
from crossed import few
from forge_train_tools.testing import Pool

pytestmark = [pytest.mark.dist]

RECORDS = 13


def chats(folder: Path) -> dict[str, Any]:
    """Thirteen records: three steps of 4 sequences, and one of which a single record counts."""
    file = folder / "chats.jsonl"
    lines = (json.dumps({"prompt": f"{number}?", "completion": f"{number}!"}) for number in range(RECORDS))
    file.write_text("\n".join(lines), encoding="utf-8")
    return {"sft.path": str(file), "sft.cache": str(folder / "cache"), "train.evaluate_every": 0}


def read(found: list[tuple[int, int, list[str]]], steps: int) -> Counter[str]:
    """How often each record was read by all data ranks together; ranks that share their data read alike."""
    by_rank: dict[int, list[str]] = {}
    for data_rank, step, records in found:
        assert step == steps
        assert by_rank.setdefault(data_rank, records) == records
    return Counter(record for records in by_rank.values() for record in records)


LAYOUTS: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "one": (1, (), {}),
    "fsdp2": (2, ("fsdp2",), {}),
    "pp2": (2, ("pp",), {"parallel.pp": 2}),
    "cp2": (2, ("cp",), {"parallel.cp": 2}),
    "cp2 × dp2": (4, ("fsdp2", "cp"), {"parallel.cp": 2}),
}
STEPS = {1: 4, 2: 7, 0.5: 2}
"""By epochs."""


@pytest.mark.parametrize(
    ("layout", "epochs"),
    few(
        [*itertools.product(LAYOUTS, STEPS)],
        [*itertools.product(("one", "fsdp2"), STEPS), ("pp2", 2), ("cp2", 2)],
    ),
)
def test_each_record_is_read_once_an_epoch(ranks: Pool, tmp_path: Path, layout: str, epochs: float) -> None:
    world, plugins, settings = LAYOUTS[layout]
    config = {**chats(tmp_path), **settings, "train.epochs": epochs}
    counts = read(
        ranks.run(epoch_cases.trained, world, folder=str(tmp_path), plugins=plugins, config=config), STEPS[epochs]
    )
    if epochs == 0.5:
        assert set(counts.values()) == {1}
        assert len(counts) == round(RECORDS / 2)
    else:
        assert len(counts) == RECORDS
        assert set(counts.values()) == {epochs}


def test_a_resumed_run_ends_at_the_same_step_on_another_layout(ranks: Pool, tmp_path: Path) -> None:
    config = {**chats(tmp_path), "train.epochs": 2}
    arguments = {"folder": str(tmp_path), "config": config, "name": "r"}
    first = ranks.run(epoch_cases.trained, 2, plugins=("fsdp2",), stop_at=3, **arguments)
    counts = read(first, first[0][1]) + read(ranks.run(epoch_cases.trained, 1, plugins=(), **arguments), 7)
    assert len(counts) == RECORDS
    assert set(counts.values()) == {2}
