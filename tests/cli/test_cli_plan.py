"""`forge plan`: what it finds without allocating agrees with what a run has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_command import Forge

TRANSFORMS = '''
from forge_train import Applied, Phase, Plugin, Transform, hookimpl

class Mark(Plugin):
    """Marks attention modules."""
    api = (1, 0)

    @hookimpl
    def parallelize(self, job):
        def apply(part):
            names = tuple(name for name, _ in part.named_modules() if name.endswith("attention"))
            return Applied(part, names, "marked")
        return Transform(Phase.RECOMPUTE, "mark", apply)

class Idle(Plugin):
    """Has nothing to do."""
    api = (1, 0)

    @hookimpl
    def parallelize(self, job):
        return None

class Reader(Plugin):
    """An optimizer that reads values, as no fake tensor can."""
    api = (1, 0)

    @hookimpl
    def optimizer(self, model, job):
        import torch

        class Sum(torch.optim.SGD):
            def step(self, closure=None):
                float(next(iter(model.parameters())).sum())

        return Sum(model.parameters(), lr=1e-3)
'''


@pytest.fixture
def plugins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "plan_plugins.py").write_text(TRANSFORMS)
    monkeypatch.syspath_prepend(str(folder))


def planned(forge: Forge, *arguments: str) -> Any:
    return forge("plan", "tiny.toml", "--json", *arguments).json


def test_nothing_is_written(forge: Forge, folder: Path) -> None:
    before = set(folder.iterdir())
    forge("plan", "tiny.toml")
    assert set(folder.iterdir()) == before


def test_the_keys(forge: Forge) -> None:
    plan = planned(forge)
    assert {"phases", "meshes", "parameters", "memory", "communication", "flops_per_token"} <= plan.keys()
    assert plan["phases"] == plan["communication"] == []
    assert plan["meshes"] == {"dense": {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}}
    assert plan["slots"]["optimizer"] == ["adamw"]
    assert plan["flops_per_token"] > 0


def test_the_parameters_are_those_of_the_run(forge: Forge, folder: Path) -> None:
    import torch

    from forge_train import checkpoint

    counts = planned(forge)["parameters"]
    forge("train", "tiny.toml", "--name", "mine", "-q")
    saved = checkpoint.shapes(checkpoint.whole(folder / "runs" / "mine"))
    names = [name for name in saved if name.startswith("model.")]
    assert counts["total"] == counts["trainable"] == sum(torch.Size(saved[name][0]).numel() for name in names)
    assert sum(counts["by_module"].values()) == counts["total"]
    assert counts["tied"] == []


def test_tied_parameters_count_once(forge: Forge) -> None:
    loose, tied = planned(forge)["parameters"], planned(forge, "-s", "decoder.tied=true")["parameters"]
    assert tied["tied"] == [["embedding.weight", "head.weight"]]
    assert loose["total"] - tied["total"] == loose["by_module"]["head"]


@pytest.mark.parametrize(("optimizer", "per_parameter"), [("adamw", 8), ("lion", 4)])
def test_memory(forge: Forge, optimizer: str, per_parameter: int) -> None:
    plan = planned(forge, "-p", optimizer)
    memory, count = plan["memory"], plan["parameters"]["total"]
    assert memory["parameters"] == memory["gradients"] == 4 * count
    assert memory["optimizer"] == pytest.approx(per_parameter * count, rel=0.02)  # and a step count here and there
    assert memory["total"] == sum(memory[key] for key in ("parameters", "gradients", "optimizer", "activations"))
    assert memory["notes"] == []


def test_activations_grow_with_the_micro_batch(forge: Forge) -> None:
    one, two = (planned(forge, "-s", f"train.micro_batch={size}")["memory"]["activations"] for size in (1, 2))
    assert one > 0
    assert two == pytest.approx(2 * one, rel=0.1)


def test_what_can_t_be_known_is_said(forge: Forge, plugins: None) -> None:
    memory = planned(forge, "-p", "plan_plugins:Reader")["memory"]
    assert memory["optimizer"] is None
    assert "not known before it is allocated" in memory["notes"][0]
    assert "not known" in forge("plan", "tiny.toml", "-p", "plan_plugins:Reader").out


def test_phases_idle_plugins_and_slots(forge: Forge, plugins: None) -> None:
    options = ("-p", "plan_plugins:Mark,plan_plugins:Idle,lion")
    plan = planned(forge, *options)
    entry = {
        "phase": "RECOMPUTE",
        "slot": "mark",
        "plugin": "mark",
        "matched": ["layers.0.attention"],
        "note": "marked",
    }
    assert plan["phases"] == [entry]
    assert plan["idle"] == ["idle"]
    text = forge("plan", "tiny.toml", *options).out
    assert "1: layers.0.attention" in text
    assert "idle at this size: idle" in text
    assert "in place of adamw" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--world", "2", "-s", "parallel.tp=2"], "parallel.tp is 2, but no enabled plugin covers the axis 'tp'"),
        (["--world", "2", "-s", "parallel.dp_shard=1"], "there are 2 processes"),
        (["--world", "0"], "--world"),
        (["-s", "decoder.heads=3"], "decoder.heads"),
    ],
)
def test_mistakes(forge: Forge, arguments: list[str], says: str) -> None:
    assert says in forge("plan", "tiny.toml", *arguments, fails=2).err
