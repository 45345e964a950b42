"""A loader that sees the current model between steps, by an outside plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_train_tools.testing import Pool
from forge_train_tools.testing.conformance import check

pytestmark = [pytest.mark.dist]

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {"one": (1, ()), "fsdp2": (2, ("fsdp2",))}


def train(ranks: Pool, folder: Path, layout: str, **more: Any) -> list[dict[str, Any]]:
    world, plugins = LAYOUTS[layout]
    folder.mkdir(exist_ok=True)
    replies: list[dict[str, Any]] = ranks.run(
        "rollout_cases:rolled", world, folder=str(folder), plugins=plugins, **more
    )
    return replies


@pytest.fixture(scope="module")
def alone(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(ranks, tmp_path_factory.mktemp("one"), "one")[0]


def test_batches_follow_the_model(ranks: Pool, tmp_path: Path, alone: dict[str, Any]) -> None:
    """Another learning rate leaves the first two steps' batches, made with the same weights, and changes the others."""
    other = train(ranks, tmp_path, "one", config={"adamw.lr": 0.2, "train.evaluate_every": 0})[0]
    plain = train(ranks, tmp_path / "plain", "one", config={"train.evaluate_every": 0})[0]
    assert other["batches"][:8] == plain["batches"][:8]
    assert other["batches"][8:] != plain["batches"][8:]
    assert not any(alone["modes"]), "in evaluation mode, and without gradients"
    assert plain["losses"] == alone["losses"], "an evaluation makes its own"


def test_two_data_ranks_equal_one_process(ranks: Pool, tmp_path: Path, alone: dict[str, Any]) -> None:
    replies = train(ranks, tmp_path, "fsdp2")
    assert replies[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert replies[0]["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    assert replies[0]["evaluations"] == pytest.approx(alone["evaluations"], rel=1e-5)
    assert sorted(batch for reply in replies for batch in reply["batches"]) == sorted(alone["batches"])


@pytest.mark.parametrize(("before", "after"), [("one", "one"), ("fsdp2", "fsdp2"), ("fsdp2", "one")])
def test_goes_on_in_the_middle_of_a_rollout(
    ranks: Pool, tmp_path: Path, alone: dict[str, Any], before: str, after: str
) -> None:
    train(ranks, tmp_path / "stopped", before, name="run", stop_at=3)
    resumed = train(ranks, tmp_path / "stopped", after, name="run")
    if before == after:
        whole = train(ranks, tmp_path / "whole", after, name="run")
        for one, other in zip(resumed, whole, strict=True):
            assert one["losses"] == other["losses"]
            assert one["weights"] == other["weights"]
            assert one["evaluations"] == other["evaluations"]
    else:
        assert resumed[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)


def test_it_conforms_as_far_as_one_process_shows() -> None:
    report = check("rollout_cases:Rollouts")
    assert [one.name for one in report.of("fail")] == ["imports nothing slow"], "as every toy does"
    assert any("made with the model" in one.detail for one in report.of("skip"))
