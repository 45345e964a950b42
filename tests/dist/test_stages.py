"""Stages of a pipeline in different processes, by an outside plugin: one process's numbers, nothing lost at resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crossed import marked
from forge_train.checkpoint.checkpoint import check, found, shapes
from forge_train_tools.testing import Pool, PoolError

pytestmark = [pytest.mark.dist]

LAYOUTS: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "one": (1, (), {}),
    "pp2": (2, (), {"parallel.pp": 2}),
    "pp2 × dp2": (4, (), {"parallel.pp": 2}),
    "pp2 × ddp2": (4, ("ddp",), {"parallel.pp": 2, "parallel.dp_replicate": 2}),
}


def train(ranks: Pool, folder: Path, layout: str, plugins: tuple[str, ...] = (), **more: Any) -> list[dict[str, Any]]:
    world, own, config = LAYOUTS[layout]
    folder.mkdir(exist_ok=True)
    config = {**config, **more.pop("config", {})}
    arguments = {"folder": str(folder), "plugins": (*own, *plugins), "config": config, "name": "run", **more}
    replies: list[dict[str, Any]] = ranks.run("pipeline_cases:staged", world, **arguments)
    return replies


@pytest.fixture(scope="module")
def alone(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(ranks, tmp_path_factory.mktemp("one"), "one", config={"noise.scale": 0.0})[0]


@pytest.mark.parametrize("layout", marked([name for name in LAYOUTS if name != "one"], ["pp2 × ddp2"]))
def test_equal_one_process(ranks: Pool, tmp_path: Path, alone: dict[str, Any], layout: str) -> None:
    replies = train(ranks, tmp_path, layout, config={"noise.scale": 0.0})
    first = replies[0]
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert first["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    assert min(first["norms"]) > 0.3, "the gradients are clipped"
    assert first["evaluations"] == pytest.approx(alone["evaluations"], rel=1e-5)
    assert len(first["evaluations"]) > 1
    weights = {name: norm for reply in replies for name, norm in reply["weights"].items()}
    assert weights == pytest.approx(alone["weights"], rel=1e-5)
    assert first["weights"].keys() & replies[-1]["weights"].keys() == set(), "each stage holds its own"
    for reply in replies:
        assert reply["mfu"] == pytest.approx(alone["mfu"] / LAYOUTS[layout][0], rel=1e-5), "the whole model's FLOPs"


def test_a_transform_hears_of_each_direction(ranks: Pool, tmp_path: Path) -> None:
    for reply in train(ranks, tmp_path, "pp2", steps=1, config={"train.evaluate_every": 0}):
        forward = [[last, 0, "forward"] for last in (False, False, False, True)]
        assert reply["told"] == forward + [[last, 0, "backward"] for last, *_ in forward]


@pytest.mark.parametrize("layout", marked(["pp2", "pp2 × dp2"], ["pp2 × dp2"]))
def test_goes_on_bit_for_bit(ranks: Pool, tmp_path: Path, layout: str) -> None:
    """State of every stage reaches the checkpoint: weights, optimizer, a plugin's tensors, random numbers."""
    whole = train(ranks, tmp_path / "whole", layout)
    train(ranks, tmp_path / "stopped", layout, stop_at=2)
    resumed = train(ranks, tmp_path / "stopped", layout)
    for one, other in zip(resumed, whole, strict=True):
        for key in ("losses", "norms", "digests", "state", "average"):
            assert one[key] == other[key], key
    path = found(Path(whole[0]["run"]) / "checkpoints")[0].path
    assert check(path, contents=True) == ""
    names = {name for reply in whole for name in reply["digests"]}
    held = shapes(path).keys()
    for name in names:
        assert {f"model.{name}", f"optimizer.state.{name}.exp_avg", f"plugins.average.average.{name}"} <= held
    groups = json.loads((path / "state.json").read_text())["optimizer"]["param_groups"]
    assert {name for group in groups for name in group["params"]} == names


@pytest.mark.parametrize(("before", "after"), [("one", "pp2"), ("pp2", "one"), ("pp2", "pp2 × dp2")])
def test_goes_on_on_another_layout(ranks: Pool, tmp_path: Path, alone: dict[str, Any], before: str, after: str) -> None:
    config = {"noise.scale": 0.0}
    train(ranks, tmp_path / "runs", before, stop_at=2, config=config)
    resumed = train(ranks, tmp_path / "runs", after, config=config)
    assert resumed[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert resumed[0]["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    weights = {name: norm for reply in resumed for name, norm in reply["weights"].items()}
    assert weights == pytest.approx(alone["weights"], rel=1e-5)


def test_starts_from_its_own_weights_only(ranks: Pool, tmp_path: Path) -> None:
    saved = train(ranks, tmp_path / "saved", "pp2", steps=2)
    path = found(Path(saved[0]["run"]) / "checkpoints")[0].path
    config = {"train.init_from": str(path), "adamw.lr": 1e-12, "adamw.weight_decay": 0.0, "noise.scale": 0.0}
    started = train(ranks, tmp_path / "started", "pp2", steps=1, config=config)
    for one, other in zip(started, saved, strict=True):
        assert one["weights"] == pytest.approx(other["weights"], rel=1e-6)


def test_another_model_is_refused_by_the_union_of_stages(ranks: Pool, tmp_path: Path) -> None:
    saved = train(ranks, tmp_path / "saved", "pp2", steps=1)
    path = found(Path(saved[0]["run"]) / "checkpoints")[0].path
    config = {"train.init_from": str(path), "toy_model.layers": 4}
    with pytest.raises(PoolError, match=r"holds another model:\s+layers\.3\.down\.weight: absent in the checkpoint"):
        train(ranks, tmp_path / "started", "pp2", steps=1, config=config)


def test_what_a_later_stage_adds_is_known_to_all(ranks: Pool, tmp_path: Path) -> None:
    replies = train(ranks, tmp_path, "pp2", ("pipeline_cases:Grows",), steps=2)
    assert "layers.2.up.up" in replies[1]["weights"]
    assert ["layers.2.up"] in replies[0]["matched"]
