"""Weights of messages on layouts: the mean is over the sum of the weights of all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import weight_cases
from forge_train_tools.testing import Pool

pytestmark = [pytest.mark.dist]


def record(number: int, *, weighted: bool = True) -> dict[str, Any]:
    weights = (0.1 * (1 + number % 5), 0.5, 2.5) if weighted else (1, 1, 1)
    turns = [
        ({"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "x" * at, "weight": weight})
        for at, weight in enumerate(weights, start=1 + number % 3)
    ]
    return {"messages": [message for turn in turns for message in turn]}


Alone = tuple[dict[str, Any], list[list[float]]]


@pytest.fixture(scope="module")
def alone(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The configuration, and the losses and norms of one process, which are not those of messages without weights."""
    folder = tmp_path_factory.mktemp("weights")
    file, unweighted = folder / "chats.jsonl", folder / "unweighted.jsonl"
    for path in (file, unweighted):
        records = [record(number, weighted=path == file) for number in range(17)]
        path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    config: dict[str, Any] = {
        "sft": {"path": str(file), "cache": str(folder / "cache"), "template": "plain", "held_out": 0.0},
        "train.sequence": 128,
        "decoder.max_sequence": 128,
        "train.evaluate_every": 0,
    }
    ((*one,),) = ranks.run(weight_cases.trained, 1, plugins=(), config=config, folder=str(folder))
    ignored = {**config, "sft": {**config["sft"], "path": str(unweighted)}}
    ((*plain,),) = ranks.run(weight_cases.trained, 1, plugins=(), config=ignored, folder=str(folder))
    for step, other in zip(one, plain, strict=True):
        assert all(abs(a / b - 1) > 1e-4 for a, b in zip(step, other, strict=True)), "the weights show"
    return config, one


@pytest.mark.parametrize(
    ("world", "plugins", "layout"),
    [
        (2, ("fsdp2",), {}),
        pytest.param(2, ("ddp",), {}, marks=pytest.mark.extended),
        (2, ("cp",), {"parallel.cp": 2}),
        (2, ("tp",), {"parallel.tp": 2}),
        (2, ("pp",), {"parallel.pp": 2}),
        pytest.param(4, ("fsdp2", "cp"), {"parallel.cp": 2}, marks=pytest.mark.extended),
    ],
)
def test_every_layout_weighs_alike(
    ranks: Pool, tmp_path: Path, alone: Alone, world: int, plugins: tuple[str, ...], layout: dict[str, Any]
) -> None:
    config, one = alone
    config = {**config, **layout}
    for found in ranks.run(weight_cases.trained, world, plugins=plugins, config=config, folder=str(tmp_path)):
        for step, expected in zip(found, one, strict=True):
            assert step == pytest.approx(expected, rel=1e-5)
