"""Optimizers with a state of their own kind: resumed on the same layout to the bit, and on another within rounding."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from crossed import marked
from forge_train_tools.testing import Pool

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]
STEPS, STOP = 6, 3


def train(ranks: Pool, folder: Path, world: int, optimizer: str, **more: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    config = {"checkpoint.every": int("stop_at" in more)}
    arguments = {"plugins": [f"odd_optimizers:{optimizer}Plugin"], "steps": STEPS, "config": config, "name": "run"}
    first: dict[str, Any] = ranks.run("cases:train", world, timeout=200, folder=str(folder), **{**arguments, **more})[0]
    return first


@pytest.mark.parametrize("optimizer", marked(["PerParameter", "Elsewhere"], ["PerParameter"]))
def test_goes_on_on_the_same_layout_to_the_bit_and_on_another_within_rounding(
    ranks: Pool, tmp_path: Path, optimizer: str
) -> None:
    """A whole run saves nothing before its end, a stopped one at each step: checkpoints change no number."""
    whole = {world: train(ranks, tmp_path / f"whole{world}", world, optimizer) for world in (1, 2)}
    assert whole[2]["losses"] == pytest.approx(whole[1]["losses"], rel=1e-5)
    for before in (1, 2):
        train(ranks, tmp_path / f"stopped{before}", before, optimizer, stop_at=STOP)
        for after in (1, 2):
            name, folder = f"to{after}", tmp_path / f"stopped{before}"
            shutil.copytree(folder / "run", folder / name)
            resumed = train(ranks, folder, after, optimizer, name=name)
            assert 0 < len(resumed["grad_norms"]) <= STEPS - STOP, "it went on where it was"
            assert resumed["losses"] == pytest.approx(whole[1]["losses"], rel=1e-5), (before, after)
            assert resumed["norms"] == pytest.approx(whole[1]["norms"], rel=1e-4), (before, after)
            if before == after:
                for what in ("losses", "norms", "weights"):
                    assert resumed[what] == whole[after][what], what


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        ("Own", r"'optimizer\.state\..*\.mean' .* differs from rank to rank"),
        ("Apart", r"'optimizer\.state\..*\.norm' .* differs from rank to rank"),
    ],
)
def test_what_only_one_rank_knows_is_refused_when_it_would_be_lost(
    ranks: Pool, tmp_path: Path, optimizer: str, says: str
) -> None:
    assert train(ranks, tmp_path / "one", 1, optimizer)["losses"]
    with pytest.raises(Exception, match=says):
        train(ranks, tmp_path / "two", 2, optimizer)
    assert not (tmp_path / "two" / "run" / "metrics.jsonl").exists(), "it is told after the first step"


def test_where_state_of_any_shape_is_read_to(ranks: Pool) -> None:
    (placed, _) = ranks.run("odd_optimizers:placed", 2, timeout=60)
    assert placed == {
        "as the parameter": "S(0)",
        "nested": "S(0)",
        "a copy that was no shard": "plain",
        "one in a list": "plain",
        "rows": "R",
        "columns": "R",
        "another table that was sharded": "R",
        "a number": "plain",
        "a number that was sharded": "R",
        "a history": "plain",
        "of a plain parameter": "plain",
        "nobody's": "plain",
        "beside the state": "plain",
    }
