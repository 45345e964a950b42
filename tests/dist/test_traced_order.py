"""`forge plan --check-collectives` sees what ranks do: its sequences are those that `forge trace` records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import trace_cases
from forge_train.mesh.layout import Layout
from forge_train.mesh.world import World
from forge_train_tools.ordering.classes import Places
from forge_train_tools.ordering.record import MESSAGES, WAIT
from forge_train_tools.ordering.rehearsal import Ranks
from forge_train_tools.testing import Pool
from forge_train_tools.testing.runs import prepared
from forge_train_tools.tracing import Trace

pytestmark = [pytest.mark.dist]

WORLD = 4
LAYOUTS = {
    "stages, tp": (("pp", "tp"), {"parallel.pp": 2, "parallel.tp": 2}),
    "shards, tp": (("fsdp2", "tp"), {"parallel.tp": 2}),
}


@pytest.mark.parametrize("layout", ["stages, tp", pytest.param("shards, tp", marks=pytest.mark.extended)])
def test_sequences_are_those_of_a_trace(
    ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    plugins, config = LAYOUTS[layout]
    ranks.run(trace_cases.traced, WORLD, folder=str(tmp_path), plugins=plugins, config=config)
    trace = Trace.read(tmp_path, trace_cases.TRACED, WORLD, "cpu")
    launched: Mapping[str, Any] = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    for variable, value in {**launched, "MASTER_ADDR": "here", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(variable, str(value))
    with prepared(plugins, config, folder=tmp_path) as setup:
        made = Layout.of(setup.config.parallel, WORLD)
        rehearsal, places = Ranks(setup, made, World(size=WORLD, local_size=WORLD), tmp_path / "none"), Places(made)
        for rank in range(WORLD):
            found = []
            for one in rehearsal.rehearse(rank).calls:
                if one.part in ("composition", "checkpoint") or one.kind == WAIT:
                    continue
                members = sorted(places.members(rank, one.group))
                if one.kind in MESSAGES:
                    ends = [rank, places.peer(rank, one.peer)]
                    members = ends if one.kind == "send" else ends[::-1]
                found.append((one.kind, members, list(one.shape), one.dtype, one.plugin))
            expected = [(one.kind, one.ranks, one.shape, one.dtype, one.plugin) for one in trace.ranks[rank].calls]
            asked = expected.pop()  # between steps: whether any rank was asked to stop
            assert asked == ("all_reduce", [0, 1, 2, 3], [], "int64", "forge")
            assert found == expected
            assert len(found) > 20
