"""Optimizers of single weights on several ranks: on every layout they end where one process does."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import compositions
from crossed import few, marked
from forge_train_tools.testing import Pool, Verifier
from test_matrix_optimizers import LAYOUTS, alone, farthest, resumed, same_bits, saved, train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]
GROUPS = [{"match": "*attention*", "lr": 0.5}, {"match": "embedding*", "weight_decay": 0.3}]
OPTIMIZERS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "adamw": ("adamw", {"adamw.lr": 0.01, "adamw.groups": GROUPS}),
    "lion": ("lion", {"lion.lr": 0.003, "lion.groups": GROUPS}),
    "schedule_free": (
        "schedule_free",
        {"schedule_free.lr": 0.01, "schedule_free.warmup": 3, "schedule_free.groups": GROUPS},
    ),
}


def differing(here: dict[str, Any], there: dict[str, Any], lr: float) -> float:
    """The share of elements that ended elsewhere; two signs that differ are a step of 2 lr."""
    pairs = [(end, there["ended"][name]) for name, end in here["ended"].items()]
    return sum(int(((a - b).abs() > 0.1 * lr).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)


IN_CI = [
    *(("adamw", "fsdp2 uneven"), ("lion", "hsdp"), ("schedule_free", "ddp")),
]
"""Every optimizer; test_matrix_optimizers.py and test_narrow_layouts.py have the other layouts."""


@pytest.mark.parametrize(("optimizer", "layout"), few([*itertools.product(OPTIMIZERS, LAYOUTS)], IN_CI))
def test_ends_where_one_process_does(
    ranks: Pool, tmp_path: Path, ends: Callable[..., dict[str, Any]], layout: str, optimizer: str
) -> None:
    world, plugins, config = LAYOUTS[layout]
    plugin, settings = OPTIMIZERS[optimizer]
    plugins, config = (plugin, *plugins), {**config, **settings}
    train(ranks, tmp_path, world, plugins, config)
    one, many = ends(*alone(plugins, config)), saved(tmp_path)
    assert one["state"].keys() == many["state"].keys()
    if optimizer == "lion":
        assert differing(many, one, settings["lion.lr"]) <= 1e-4
    else:
        distance, name = farthest(many, one)
        assert distance <= 1e-4, name


@pytest.mark.parametrize("optimizer", marked(OPTIMIZERS, ["adamw", "lion"]))
def test_resumed_it_repeats_to_the_bit_and_on_another_layout_within_rounding(
    ranks: Pool, tmp_path: Path, optimizer: str
) -> None:
    world, plugins, config = LAYOUTS["fsdp2 uneven"]
    plugin, settings = OPTIMIZERS[optimizer]
    plugins, config = (plugin, *plugins), {**config, **settings, "checkpoint.every": 2}
    here = {"steps": 4, "folder": tmp_path}
    whole = resumed(ranks, world, plugins, config, name="whole", **here)
    resumed(ranks, world, plugins, config, name="stopped", stop_at=2, **here)
    shutil.copytree(tmp_path / "stopped", tmp_path / "moved")
    again = resumed(ranks, world, plugins, config, name="stopped", **here)
    assert again["losses"] == whole["losses"]
    assert same_bits(saved(tmp_path, "stopped"), saved(tmp_path, "whole"))
    resumed(ranks, 4, (plugin, "tp", "fsdp2"), {**config, "parallel.tp": 2}, name="moved", **here)
    moved, there = saved(tmp_path, "moved"), saved(tmp_path, "whole")
    assert moved["state"].keys() == there["state"].keys()
    if optimizer == "lion":
        assert differing(moved, there, settings["lion.lr"]) <= 1e-4
    else:
        assert farthest(moved, there)[0] <= 1e-4
    assert len(resumed(ranks, 1, *alone(plugins, config), name="moved", folder=tmp_path, steps=5)["losses"]) == 5


@pytest.mark.parametrize(
    ("plugin", "failed"),
    [
        ("schedule_free", set()),
        ("schedule_free_cases:EqualShares", {"updates"}),
        ("schedule_free_cases:WrongAverage", {"evaluation"}),
    ],
)
def test_verify_agrees_and_sees_a_wrong_average(
    verify: Verifier, composition_file: Path, plugin: str, failed: set[str]
) -> None:
    own = plugin if not failed else {"updates": "equal_shares", "evaluation": "wrong_average"}[min(failed)]
    request = compositions._request(composition_file, (plugin, "fsdp2"), {f"{own}.lr": 0.01, f"{own}.warmup": 3})
    verdict = verify(request, 2, steps=3)
    print(verdict, verdict.advice)
    assert failed <= set(verdict.failed), verdict
    assert bool(verdict.failed) == bool(failed), verdict
