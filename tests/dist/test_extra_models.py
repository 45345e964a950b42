"""A second model by an outside plugin: a frozen teacher, or one that is trained beside the first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import toys
from forge_train import ConfigError
from forge_train.checkpoint.checkpoint import found, shapes
from forge_train_tools.planning import plan
from forge_train_tools.testing import Pool, PoolError
from forge_train_tools.testing.runs import prepared

pytestmark = [pytest.mark.dist]

LAYOUTS: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "one": (1, (), {}),
    "fsdp2": (2, ("fsdp2",), {}),
    "ddp": (2, ("ddp",), {"parallel.dp_replicate": 2}),
}
QUIET = {"noise.scale": 0.0}


def train(ranks: Pool, folder: Path, layout: str = "one", **more: Any) -> list[dict[str, Any]]:
    world, plugins, config = LAYOUTS[layout]
    folder.mkdir(exist_ok=True)
    plugins, config = (*plugins, *more.pop("plugins", ())), {**config, **more.pop("config", {})}
    arguments = {"folder": str(folder), "plugins": plugins, "config": config, **more}
    replies: list[dict[str, Any]] = ranks.run("distill_cases:distilled", world, keep=True, **arguments)
    return replies


def newest(reply: dict[str, Any]) -> Path:
    return found(Path(reply["run"]) / "checkpoints")[0].path


@pytest.fixture(scope="module")
def taught(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tower of three blocks, which is larger than the student."""
    config = {**QUIET, "toy_model.layers": 3}
    return train(ranks, tmp_path_factory.mktemp("teacher"), task=False, config=config)[0]


def settings(taught: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"distill.weights": str(newest(taught)), "distill.teacher": {"toy_model": {"layers": 3}}, **more}


@pytest.fixture(scope="module", params=[False, True], ids=["frozen", "trained"])
def trained(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def alone(
    ranks: Pool, tmp_path_factory: pytest.TempPathFactory, taught: dict[str, Any], trained: bool
) -> dict[str, Any]:
    config = settings(taught, **QUIET, **{"distill.trained": trained})
    return train(ranks, tmp_path_factory.mktemp("one"), config=config)[0]


@pytest.mark.parametrize("layout", ["fsdp2", "ddp"])
def test_two_ranks_equal_one_process(
    ranks: Pool, tmp_path: Path, taught: dict[str, Any], alone: dict[str, Any], trained: bool, layout: str
) -> None:
    replies = train(ranks, tmp_path, layout, config=settings(taught, **QUIET, **{"distill.trained": trained}))
    for key in ("losses", "norms", "evaluations", "gradients"):
        assert replies[0][key] == pytest.approx(alone[key], rel=1e-5), key
    assert any(name.startswith("teacher.") for name in alone["gradients"]) == trained
    slots = {(row["slot"], row.get("model")) for row in replies[0]["report"]}
    assert {("data_parallel", None), ("data_parallel", "teacher")} <= slots
    if layout == "fsdp2":
        assert all("Shard(dim=0)" in one for one in replies[0]["placements"])
        assert sum(reply["extra_bytes"] for reply in replies) < 1.3 * alone["extra_bytes"]


def test_a_frozen_one_costs_its_weights_and_nothing_else(
    alone: dict[str, Any], taught: dict[str, Any], trained: bool
) -> None:
    own = {name: one for name, one in alone["weights"].items() if name.startswith("teacher:")}
    before = {f"teacher{name}": one for name, one in taught["weights"].items()}
    held = shapes(newest(alone))
    state = json.loads((newest(alone) / "state.json").read_text())["models"]["teacher"]
    assert (state["path"], state["trained"]) == (str(newest(taught)), trained)
    assert alone["training"] == [trained]
    if trained:
        assert own.keys() == before.keys()
        assert not set(own.items()) & set(before.items())
        assert alone["states"] == len(own) + len(alone["weights"]) - 2 * len(own)
        assert alone["extra_gradient_bytes"] == alone["extra_bytes"]
        assert {f"model.teacher.{name.partition(':')[2]}" for name in own} <= held.keys()
    else:
        assert own == before
        assert alone["states"] == len(alone["gradients"]) == len(alone["weights"]) - len(own)
        assert alone["extra_gradient_bytes"] == 0
        assert not any("teacher" in name for name in held)


@pytest.mark.parametrize("layout", ["one", "fsdp2"])
def test_goes_on_bit_for_bit(ranks: Pool, tmp_path: Path, taught: dict[str, Any], trained: bool, layout: str) -> None:
    config = settings(taught, **{"distill.trained": trained})
    whole = train(ranks, tmp_path / "whole", layout, config=config, name="run")
    train(ranks, tmp_path / "stopped", layout, config=config, name="run", stop_at=2)
    resumed = train(ranks, tmp_path / "stopped", layout, config=config, name="run")
    for one, other in zip(resumed, whole, strict=True):
        for key in ("losses", "norms", "evaluations", "weights"):
            assert one[key] == other[key], key


def test_a_plan_counts_it(tmp_path: Path) -> None:
    config = {**toys.SMALL, "train.micro_batch": 1, "distill.teacher": {"toy_model": {"layers": 3}}}
    with prepared([*toys.TOYS, "distill_cases:Distill", "fsdp2"], config, preset="", folder=tmp_path) as setup:
        planned = plan(setup, world=2)
    assert [(row["slot"], row.get("model")) for row in planned.phases] == [
        ("data_parallel", None),
        ("data_parallel", "teacher"),
    ]
    assert planned.memory.parameters > 2 * planned.memory.gradients > 0
    assert planned.memory.activations is not None


def test_starts_with_weights_of_its_own(ranks: Pool, tmp_path: Path) -> None:
    config = {"distill.trained": True, **QUIET}
    reply = train(ranks, tmp_path, steps=1, config={**config, "adamw.lr": 1e-12, "adamw.weight_decay": 0.0})[0]
    assert reply["weights"][":embedding.weight"] != reply["weights"]["teacher:embedding.weight"]


def test_a_run_starts_from_the_first_model_alone(ranks: Pool, tmp_path: Path, taught: dict[str, Any]) -> None:
    first = train(ranks, tmp_path / "a", steps=1, config=settings(taught, **{"distill.trained": True}))[0]
    config = {"train.init_from": str(newest(first)), "adamw.lr": 1e-12, "adamw.weight_decay": 0.0, **QUIET}
    assert len(train(ranks, tmp_path / "b", steps=1, task=False, config=config)[0]["weights"]) == len(
        [name for name in first["weights"] if not name.startswith("teacher")]
    ) - len(taught["weights"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"distill.teacher": {}}, r"holds another model:\s+layers\.2\.down\.weight: .* in the checkpoint, absent"),
        (
            {"distill.teacher": {"toy_model": {"layers": 0}}},
            r"In the extra model 'teacher': its values: toy_model\.layers: .* greater",
        ),
        ({"distill.teacher": {"toy_mode": {"layers": 1}}}, r"there is no plugin 'toy_mode' in this run\. Did you mean"),
        ({"distill.without": ["nobody"]}, r"there is no plugin 'nobody' in this run"),
        ({"distill.weights": "nowhere"}, r"nowhere: there is no such run or checkpoint"),
    ],
)
def test_mistakes_are_told(
    ranks: Pool, tmp_path: Path, taught: dict[str, Any], change: dict[str, Any], says: str
) -> None:
    with pytest.raises(PoolError, match=says):
        train(ranks, tmp_path, steps=1, config=settings(taught, **change))


def test_a_model_that_can_not_be_composed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}
    for name, value in {**launched, "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, str(value))
    config = {**toys.SMALL, "parallel.dp_shard": 2, "distill.without": ["fsdp2"]}
    with (
        prepared([*toys.TOYS, "distill_cases:Distill", "fsdp2"], config, preset="", folder=tmp_path) as setup,
        pytest.raises(
            ConfigError, match="In the extra model 'teacher': parallel.dp_shard is 2, but no enabled plugin covers"
        ),
    ):
        plan(setup, world=2)


def test_other_weights_are_refused_at_resume(ranks: Pool, tmp_path: Path, taught: dict[str, Any]) -> None:
    other = train(ranks, tmp_path / "other", task=False, steps=1, config={"toy_model.layers": 3})[0]
    train(ranks, tmp_path / "run", config=settings(taught), name="run", stop_at=2)
    allowed = {"distill.weights": str(newest(other)), "checkpoint.allow_changes": ["distill"]}
    with pytest.raises(PoolError, match="the model 'teacher' had the weights of .*; .* gives others"):
        train(ranks, tmp_path / "run", config=settings(taught, **allowed), name="run")
