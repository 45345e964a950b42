"""The formulas of docs/scale.md are what is counted in small worlds, and nothing grows with the square of the ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import scale

from forge_train_tools.testing import Pool, run_forge

pytestmark = [pytest.mark.unit]


def finished(folder: str, size: int) -> int:
    """Train four steps with two checkpoints, and count files."""
    config = {"checkpoint.every": 2, "train.global_batch": 4 * size}
    made = run_forge(("fsdp2",) if size > 1 else (), config, steps=4, folder=Path(folder))
    return sum(file.is_file() for file in made.run.rglob("*"))


def test_files_of_a_run(tmp_path: Path) -> None:
    assert finished(str(tmp_path), 1) == scale.files_of_run(1, 2)


@pytest.mark.dist
@pytest.mark.extended
def test_files_of_a_run_of_two(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(finished, 2, folder=str(tmp_path), size=2)[0] == scale.files_of_run(2, 2)


def test_files_that_are_read_in_a_stall() -> None:
    """Of 100 ranks that are all late, the lowest hears all, twice, and the others ask it alone."""
    size, files, reads = scale.heartbeats(100)
    assert files == 100
    assert reads == 2 * 100 + 99
    assert size < 100 * 300


def test_an_index_and_its_manifest() -> None:
    """Each rank of eight holds a part of each of 2,169 tensors; the manifest lists a file of each, and two more."""
    found = scale.checkpoint(8)
    assert found["shards"] == 8 * 2169
    assert found["files"] == 8 + 3
    assert found["index"] / found["shards"] < 80
    assert found["manifest"] / (8 + 2) < 120


@pytest.mark.slow
def test_a_line_of_metrics_is_one_message() -> None:
    assert scale.metrics(4) == scale.metrics(16) == (1, 160)
