"""Metrics over ranks: equal to one process on any topology, uneven ranks and replicas; resumed, also elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import metric_cases
from crossed import few, marked
from forge_train_tools.testing import Pool

pytestmark = [pytest.mark.dist]

BASE: dict[str, Any] = {
    "train.global_batch": 12,
    "train.micro_batch": 2,
    "train.evaluate_every": 4,
    "train.evaluate_batches": 2,
    "log.every": 2,
}
LAYOUTS: dict[str, tuple[int, list[str], dict[str, Any]]] = {
    "dp2": (2, ["fsdp2"], {"parallel.dp_shard": 2}),
    "dp3": (3, ["fsdp2"], {"parallel.dp_shard": 3}),
    "tp2": (2, ["tp"], {"parallel.tp": 2}),
    "hsdp": (4, ["fsdp2"], {"parallel.dp_shard": 2, "parallel.dp_replicate": 2}),
    "tp2dp2": (4, ["fsdp2", "tp"], {"parallel.dp_shard": 2, "parallel.tp": 2}),
    "ep2": (2, ["fsdp2", "moe", "ep"], {"parallel.dp_shard": 2, "parallel.ep": 2}),
}


def trained(ranks: Pool, folder: Path, layout: str = "", **more: Any) -> list[dict[str, Any]]:
    world, plugins, config = LAYOUTS.get(layout, (1, [], {}))
    arguments = {"folder": str(folder), "plugins": plugins, "config": {**BASE, **config, **more.pop("config", {})}}
    return ranks.run(metric_cases.train, world, **arguments, **{"steps": 4, **more})


@pytest.mark.parametrize("layout", marked(LAYOUTS, ["dp2", "tp2", "hsdp", "tp2dp2"]))
def test_one_process_on_any_layout(ranks: Pool, tmp_path: Path, layout: str) -> None:
    (alone,) = trained(ranks, tmp_path / "one")
    assert len(alone["lines"]) == 2
    assert {"observing.mean", "observing.spread.p99", "observing.least", "observing.auroc"} <= {*alone["lines"][0]}
    assert not [key for key in alone["lines"][0] if "unused" in key or "histogram" in key]
    (evaluation,) = alone["evaluations"]
    assert evaluation["observing.mean"] != alone["lines"][1]["observing.mean"]
    for rank in trained(ranks, tmp_path / layout, layout):
        for one, other in ((alone["lines"], rank["lines"]), (alone["evaluations"], rank["evaluations"])):
            for right, found in zip(one, other, strict=True):
                right, found = ({k: v for k, v in each.items() if "observing" in k} for each in (right, found))
                assert found == pytest.approx(right, rel=1e-12)
        assert rank["histograms"] == alone["histograms"]


SELDOM: dict[str, Any] = {"config": {"log.every": 4}}


@pytest.mark.parametrize(
    ("layout", "stop"),
    few([("", 1), ("", 3), ("dp2", 1), ("dp2", 3), ("tp2dp2", 1), ("tp2dp2", 3)], [("", 3), ("dp2", 1)]),
)
def test_a_resume_between_logged_steps(ranks: Pool, tmp_path: Path, layout: str, stop: int) -> None:
    """On the same layout bit for bit."""
    whole = trained(ranks, tmp_path / "whole", layout, **SELDOM)
    trained(ranks, tmp_path, layout, stop_at=stop, name="stopped", **SELDOM)
    for one, other in zip(whole, trained(ranks, tmp_path, layout, name="stopped", **SELDOM), strict=True):
        assert other["numbers"] == one["numbers"]


@pytest.mark.parametrize(
    ("before", "after"),
    few([("", "dp3"), ("dp3", "tp2dp2"), ("dp2", "tp2"), ("tp2", "dp2"), ("tp2dp2", "")], [("dp3", "tp2dp2")]),
)
def test_a_resume_between_logged_steps_on_another_layout(ranks: Pool, tmp_path: Path, before: str, after: str) -> None:
    """To rounding."""
    (alone,) = trained(ranks, tmp_path / "alone", **SELDOM)
    trained(ranks, tmp_path, before, stop_at=3, name="moved", **SELDOM)
    for rank in trained(ranks, tmp_path, after, name="moved", **SELDOM):
        assert rank["lines"] == [pytest.approx(alone["lines"][0], rel=1e-12)]


def test_two_messages_for_all_metrics_at_a_logged_step_and_one_for_sums_of_each_rank(
    ranks: Pool, tmp_path: Path
) -> None:
    plugins, config = LAYOUTS["dp2"][1:]
    config = {**BASE, **config, "train.evaluate_every": 0}
    for rank in ranks.run(metric_cases.count_messages, 2, folder=str(tmp_path), plugins=plugins, config=config):
        without, with_metrics = rank["counts"]
        assert with_metrics - without == 3 * 3  # three logged steps of six
