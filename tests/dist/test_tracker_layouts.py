"""Trackers on several ranks: only the main one tracks, and no collective of a tracker's can make the others wait."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracker_cases
from crossed import marked
from forge_train_tools.testing import Pool

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


@pytest.mark.parametrize("fault", marked(["Barrier", "Gathers", "Reduces"], ["Barrier", "Reduces"]))
def test_a_collective_on_one_rank_is_caught(ranks: Pool, tmp_path: Path, fault: str) -> None:
    right = ranks.run(tracker_cases.train, 2, folder=str(tmp_path / "right"), plugins=[])
    found = ranks.run(tracker_cases.train, 2, folder=str(tmp_path / "wrong"), plugins=[f"tracker_cases:{fault}"])
    assert [one["numbers"] for one in found] == [one["numbers"] for one in right]
    told = [line for line in found[0]["warnings"] if "which waits for all ranks, on the main rank alone" in line]
    assert [line.startswith(f"Plugin '{fault.lower()}' failed in log and is left out") for line in told] == [True]
    assert not [line for line in found[1]["warnings"] if fault.lower() in line]


def test_only_the_main_rank_tracks(ranks: Pool, tmp_path: Path) -> None:
    found = ranks.run(tracker_cases.train, 2, folder=str(tmp_path), plugins=["csv"])
    assert found[0]["files"] == ["evaluations.csv", "metrics.csv"] or found[0]["files"] == ["metrics.csv"]
    text = next(tmp_path.rglob("csv/metrics.csv")).read_text()
    assert [line.split(",")[0] for line in text.split()] == ["step", "1", "2", "3", "4", "5", "6"]
