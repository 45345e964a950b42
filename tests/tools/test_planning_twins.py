"""Stages of a pipeline that do the same are composed and rehearsed once, and the plan is that of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from crossed import marked
from forge_train_tools.planning import Plan, fewer, plan, stages
from forge_train_tools.testing.runs import prepared

pytestmark = [pytest.mark.slow, pytest.mark.unit]

FOUR = {
    "text.baseline": False,
    "run.device": "cpu",
    "train.evaluate_every": 0,
    "train.micro_batch": 1,
    "train.global_batch": 4,
    "decoder.layers": 4,
    "decoder.dim": 32,
    "parallel.pp": 4,
    "pp.cuts": ["layers.1", "layers.2", "layers.3"],
}
GROUPS = [{"match": "embedding.*", "lr": 0.5}, {"match": "layers.1.*", "lr": 0.3}]
CASES: dict[str, tuple[int, tuple[str, ...], Mapping[str, Any], int, int]] = {
    "tied, sharded": (16, ("tp", "cp", "fsdp2"), {"parallel.tp": 2, "parallel.cp": 2, "decoder.tied": True}, 7, 3),
    "a group for one": (4, (), {"adamw.groups": GROUPS}, 8, 4),
    "a group for the first": (4, (), {"adamw.groups": GROUPS[:1]}, 7, 3),
}
"""Ranks, plugins and configuration; how often a stage is composed and rehearsed where two of four may be alike."""


@pytest.mark.parametrize("case", marked(CASES, ["tied, sharded"]))
def test_is_the_plan_of_all_stages(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    case: str,
) -> None:
    world, plugins, config, composed, rehearsed = CASES[case]
    monkeypatch.setattr(fewer, "AFFORDABLE", 0)
    calls: list[str] = []
    for name in ("compose", "rehearse"):
        original = getattr(stages, name)

        def counted(*args: Any, _name: str = name, _original: Any = original, **options: Any) -> Any:
            calls.append(_name)
            return _original(*args, **options)

        monkeypatch.setattr(stages, name, counted)
    launched = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    for variable, value in {**launched, "MASTER_ADDR": "here", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(variable, str(value))

    def made() -> Plan:
        calls.clear()
        own = {**FOUR, "text.path": str(tmp_path / ".testing" / "text"), **config}
        with prepared(("pp", *plugins), own, without=(), preset="quickstart", folder=tmp_path) as setup:
            return plan(setup, world=world, device="h100", folder=tmp_path / "none")

    few = made()
    assert (calls.count("compose"), calls.count("rehearse")) == (composed, rehearsed)
    monkeypatch.setattr(stages, "_twin", lambda *_: None)
    every = made()
    assert (calls.count("compose"), calls.count("rehearse")) == (8, 4)
    assert few.memory.notes == ()
    assert few == every


def test_a_stage_whose_composition_depends_on_the_others_is_no_twin() -> None:
    def look(form: str) -> stages.Look:
        found = stages.Look([], (), None, [], 0, [], {}, form=form)  # type: ignore[arg-type]
        found.pipeline = object()  # type: ignore[assignment]
        return found

    before = [(look("a"), look("a")), (look("b"), look("c"))]
    assert stages._twin(look("a"), before) is before[0][1]
    assert stages._twin(look("b"), before) is None
    assert stages._twin(look("c"), before) is None
