"""The loss of each source of a mixture while it trains: what a run on that source alone has, on any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import source_cases
from forge_train_plugins.tasks.next_token import NextTokenTask
from forge_train_tools.testing import Pool, run_forge
from hot_path import Watch, counting, waits

pytestmark = [pytest.mark.dist]

LAYOUTS: dict[str, tuple[int, list[str], dict[str, Any]]] = {
    "one micro-batch": (1, [], {"train.micro_batch": 8}),
    "dp2": (2, ["fsdp2"], {"parallel.dp_shard": 2, "train.micro_batch": 1}),
    "tp2": (2, ["tp"], {"parallel.tp": 2}),
    "chunks": (1, [], {"cross_entropy.chunk": 8}),
}
BASE: dict[str, Any] = {"train.global_batch": 8, "log.every": 2}


def source_numbers(lines: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [{key: value for key, value in line.items() if key.startswith("mixture.")} for line in lines]


def test_on_any_layout(ranks: Pool, tmp_path: Path) -> None:
    sources = source_cases.write(tmp_path / "data")
    sources[0]["weight"] = 3
    config = {**BASE, "mixture.sources": sources}

    def lines(name: str) -> list[dict[str, Any]]:
        world, plugins, more = LAYOUTS.get(name, (1, [], {}))
        folder = str(tmp_path / (name or "alone"))
        first, *others = ranks.run(
            source_cases.train, world, folder=folder, plugins=plugins, config={**config, **more}, steps=4
        )
        assert all(other == first for other in others)
        return first

    alone = lines("")
    for line in source_numbers(alone):
        assert {key: round(value) for key, value in line.items() if ".tokens." in key} == {
            "mixture.tokens.low": pytest.approx(12 * 31, abs=24),
            "mixture.tokens.high": pytest.approx(4 * 31, abs=8),
        }
        assert line["mixture.loss.low"] != pytest.approx(line["mixture.loss.high"], abs=1e-4)
    for name in LAYOUTS:
        for right, found in zip(alone, lines(name), strict=True):
            assert source_numbers([found]) == [pytest.approx(source_numbers([right])[0], rel=2e-5)], name


def test_they_are_those_of_a_run_on_the_source_alone(tmp_path: Path) -> None:
    """With weights that hardly move, and whole epochs: 8 rows of each source, 4 of each a step."""
    sources = source_cases.write(tmp_path / "data", documents=8)
    config = {**BASE, "adamw.lr": 1e-12, "mixture.held_out": 0.0, "train.sequence": 33, "mixture.isolate": False}
    both = run_forge(["mixture"], {**config, "mixture.sources": sources}, without=["text"], steps=2, folder=tmp_path)
    for source in sources:
        one = {**config, "mixture.sources": [source], "log.every": 1}
        alone = run_forge(["mixture"], one, without=["text"], steps=1, folder=tmp_path, name=source["name"])
        expected = pytest.approx(alone.losses[0], rel=1e-5)
        assert both.metrics[0][f"mixture.loss.{source['name']}"] == expected


def test_they_change_no_number_and_wait_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**BASE, "mixture.sources": source_cases.write(tmp_path / "data"), "log.every": 4}
    config |= {"cross_entropy.z_loss": 0.01, "cross_entropy.label_smoothing": 0.1, "cross_entropy.chunk": 16}
    with counting(4) as found:
        told = run_forge(["mixture", Watch], config, without=["text"], steps=8, folder=tmp_path)
    assert not waits(found)

    def quiet(self: NextTokenTask, part: Any, hidden: Any, batch: Any) -> Any:
        return self.loss_function(hidden, part.get_submodule("head"), batch.labels)

    monkeypatch.setattr(NextTokenTask, "loss", quiet)
    silent = run_forge(["mixture", Watch], config, without=["text"], steps=8, folder=tmp_path, name="silent")
    assert [line["loss"] for line in silent.metrics] == told.losses
    for line, whole in zip(source_numbers(told.metrics), told.metrics, strict=True):
        assert len(line) == 4
        assert whole["loss"] > 0
    assert source_numbers(silent.metrics) == [{}, {}]


def test_a_step_of_them_is_the_steps_loss(tmp_path: Path) -> None:
    config = {**BASE, "mixture.sources": source_cases.write(tmp_path / "data"), "log.every": 1}
    config |= {"cross_entropy.z_loss": 0.01, "cross_entropy.label_smoothing": 0.1}
    run = run_forge(["mixture"], config, without=["text"], steps=3, folder=tmp_path)
    for line in run.metrics:
        parts = [(line[f"mixture.loss.{name}"], line[f"mixture.tokens.{name}"]) for name in source_cases.IDS]
        mean = sum(loss * tokens for loss, tokens in parts) / sum(tokens for _, tokens in parts)
        assert mean == pytest.approx(line["loss"], rel=1e-6)
