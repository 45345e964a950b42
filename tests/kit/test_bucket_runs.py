"""Runs on buckets: micro-batches of other shapes and weights on each rank, and the numbers of one process."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from forge_train_kit.data.prepare import Preparation, Report, prepare
from forge_train_tools.testing import Pool, run_forge

SEQUENCE = 192


def train(folder: str, tokens: str, name: str, stop_at: int = 0, workers: int = 0) -> list[list[float]]:
    """Loss, norm and held-out loss of four steps on the ranks there are."""
    settings = {
        "tokens.path": tokens,
        "tokens.packing": "buckets",
        "tokens.prefetch.workers": workers,
        "train.micro_batch": 1,
        "train.global_batch": 6,
        "train.sequence": SEQUENCE,
        "decoder.max_sequence": SEQUENCE,
        "train.evaluate_every": 4,
        "train.evaluate_batches": 1,
    }
    more = {"stop_at": stop_at} if stop_at else {}
    found = run_forge(("tokens",), settings, steps=4, folder=Path(folder), name=name, **more)  # type: ignore[arg-type]
    held_out = [event["loss"] for event in found.events if event["event"] == "evaluation"]
    return [[line["loss"], line["grad_norm"]] for line in found.metrics] + [held_out]


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_agree_with_one_and_go_on_as_one(ranks: Pool, tmp_path: Path) -> None:
    """Most labels are masked, and each bucket has another number of those that are not."""
    draw = random.Random(0)
    chats = [
        [
            {"role": "user", "content": "ask " * draw.randint(1, 12)},
            {"role": "assistant", "content": f"say {number} " * draw.randint(1, 9)},
        ]
        for number in range(120)
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"messages": turns}) for turns in chats))
    prepare(Preparation((str(file),), tmp_path / "tokens", held_out=0.2, chat=True, template="plain"), Report())
    common = {"folder": str(tmp_path / "runs"), "tokens": str(tmp_path / "tokens")}
    (alone,) = ranks.run(train, 1, name="alone", **common)
    for found in ranks.run(train, 2, name="two", workers=2, **common):
        assert len(found) == 5
        for mine, expected in zip(found, alone, strict=True):
            assert mine == pytest.approx(expected, rel=1e-5)
    ranks.run(train, 2, name="parts", stop_at=2, workers=3, **common)
    (resumed,) = ranks.run(train, 1, name="parts", **common)
    assert [value for line in resumed for value in line] == pytest.approx(
        [value for line in alone for value in line], rel=1e-5
    )
