"""`forge plan` of pipelines against ranks that really train: bytes held, at the peak, and sent, on every stage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import plan_cases
from crossed import marked
from forge_train_tools.planning import Plan, plan
from forge_train_tools.testing import Pool
from forge_train_tools.testing.runs import prepared

pytestmark = [pytest.mark.dist]

QUICK = {"text.baseline": False, "run.device": "cpu", "train.evaluate_every": 0, "decoder.layers": 5}
EIGHT = {"train.micro_batch": 1}
CASES: dict[str, tuple[int, tuple[str, ...], Mapping[str, Any]]] = {
    "1f1b, two micro-batches, fsdp2": (4, ("fsdp2",), {"parallel.pp": 2, "train.micro_batch": 2}),
    "gpipe, eight": (2, (), {"parallel.pp": 2, "pp.schedule": "gpipe", **EIGHT}),
    "1f1b, eight": (4, (), {"parallel.pp": 4, **EIGHT}),
    "1f1b, eight, ac": (2, ("ac",), {"parallel.pp": 2, **EIGHT}),
    "interleaved, eight": (2, (), {"parallel.pp": 2, "pp.schedule": "interleaved_1f1b", **EIGHT}),
    "zbv, eight": (2, (), {"parallel.pp": 2, "pp.schedule": "zbv", **EIGHT}),
    "dualpipe_v, eight": (2, (), {"parallel.pp": 2, "pp.schedule": "dualpipe_v", **EIGHT}),
}  # fmt: skip


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def make(world: int, plugins: tuple[str, ...], config: Mapping[str, Any]) -> Plan:
        launched = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        for name, value in {**launched, "MASTER_ADDR": "here", "MASTER_PORT": 1}.items():
            monkeypatch.setenv(name, str(value))
        without = plan_cases.without("quickstart")
        with prepared(plugins, config, without=without, preset="quickstart", folder=tmp_path) as setup:
            return plan(setup, world=world, folder=tmp_path / "none")

    return make


EXTENDED = [case for case in CASES if case != "zbv, eight"]
"""CI has the schedule with two halves of a backward pass; fsdp2 and recomputation are in test_plan.py."""


@pytest.mark.parametrize("case", marked(CASES, EXTENDED))
def test_is_what_each_stage_holds_and_sends(ranks: Pool, planned: Any, tmp_path: Path, case: str) -> None:
    world, plugins, config = CASES[case]
    config = {**QUICK, "text.path": str(tmp_path / ".testing" / "text"), **config}
    made: Plan = planned(world, ("pp", *plugins), config)
    assert made.pipeline is not None
    measured = ranks.run(
        plan_cases.measure, world, folder=str(tmp_path), plugins=("pp", *plugins), config=config, preset="quickstart"
    )
    off = {}
    for rank, stage in enumerate(made.pipeline.stages):
        real, memory = measured[rank * world // len(made.pipeline.stages)], stage.memory
        assert memory.notes == ()
        for what in ("parameters", "buffers", "gradients", "optimizer"):
            assert getattr(memory, what) == real[what], (rank, what)
        counted = {f"{one.kind} {one.axis}": [one.count, one.bytes] for one in stage.communication}
        assert counted == {what: pytest.approx(numbers) for what, numbers in real["sent"].items()}
        assert memory.peak is not None
        resident = memory.parameters + memory.buffers + (memory.optimizer or 0)
        off[rank] = (memory.peak - resident) / real["peak"]
    print("of the bytes that come and go, by stage:", off)
    assert all(ratio == pytest.approx(1, rel=0.15) for ratio in off.values()), off
