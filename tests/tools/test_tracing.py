"""Analysis of traces of two and three ranks, clocks, and Chrome's format, without a run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forge_train_tools.tracing.analysis import Analysis
from forge_train_tools.tracing.chrome import events
from forge_train_tools.tracing.clocks import settled
from forge_train_tools.tracing.record import Call, RankTrace, Segment, Trace

pytestmark = [pytest.mark.unit]


def call(start: float, end: float, *, number: int = 0, **more: Any) -> Call:
    about: dict[str, Any] = {
        "kind": "all_reduce", "axis": "dp", "ranks": [0, 1], "group": "0", "bytes": 8, "sent": 8.0, "dtype": "float32",
        "shape": [2], "module": "a", "phase": "forward", "plugin": "ddp", "places": ["model.py:1, in forward"],
        "waits": [(start, end)],
    }  # fmt: skip
    return Call(**{**about, "number": number, "start": start, "end": end, **more})


def rank(number: int, segments: list[Segment], *calls: Call, end: float = 10.0) -> RankTrace:
    return RankTrace(number, f"rank {number}", 0.0, end, 1.0, 0.0, [], segments, list(calls))


def planted() -> Analysis:
    """Rank 1 calls at 2 and gets its answer at 7, for rank 0 calls at 6, after 3.5 seconds in `slow`."""
    stretches = [(0, 1, "forward", "a"), (1, 4.5, "forward", "slow"), (4.5, 10, "forward", "b")]
    first = rank(0, [Segment(*one) for one in stretches], call(6, 7))
    return Analysis(Trace(3, [first, rank(1, [Segment(0, 10, "forward", "a")], call(2, 7))]))


def test_who_is_waited_for() -> None:
    found = planted()
    (straggler,) = found.stragglers
    assert (straggler.rank, straggler.behind, straggler.seconds, straggler.module) == (1, 0, 4.0, "slow")
    assert straggler.sentence == "Rank 1 waited 40% of the step for rank 0, in slow (forward)."
    assert [(one.compute, one.communication, one.waiting) for one in found.shares] == [(9, 1, 0), (5, 1, 4)]


def test_the_critical_path_goes_through_the_last_to_call() -> None:
    found = planted()
    assert [(one.rank, one.start, one.end, one.kind) for one in found.path] == [
        (0, 0.0, 6, "compute"),
        (0, 6, 7, "communication"),
        (0, 7, 10.0, "compute"),
    ]
    assert sum(one.end - one.start for one in found.path) == found.trace.seconds


def test_the_cause_of_a_chain_is_its_first() -> None:
    """Rank 2 waits for rank 1 from 1 to 6, which waits for rank 0 from 2 to 6."""
    ranks = [
        rank(0, [Segment(0, 10, "forward", "slow")], call(6, 6, waits=[])),
        rank(1, [Segment(0, 10, "forward", "a")], call(2, 6), call(6, 6, ranks=[1, 2], group="1", waits=[])),
        rank(2, [Segment(0, 10, "forward", "a")], call(1, 6, ranks=[1, 2], group="1")),
    ]
    found = {(one.rank, one.behind): (one.seconds, one.module) for one in Analysis(Trace(3, ranks)).stragglers}
    assert found == {(1, 0): (4.0, "slow"), (2, 0): (4.0, "slow"), (2, 1): (1.0, "a")}


def test_a_receiver_waits_for_the_sender() -> None:
    message = {"kind": "recv", "ranks": [0, 1]}
    ranks = [
        rank(0, [Segment(0, 10, "forward", "a")], call(5, 5, kind="send", waits=[]), end=8.0),
        rank(1, [Segment(0, 10, "forward", "b")], call(1, 6, **message)),
    ]
    found = Analysis(Trace(3, ranks))
    assert [(one.rank, one.behind, one.seconds) for one in found.stragglers] == [(1, 0, 4.0)]
    assert [(one.rank, one.end) for one in found.path] == [(0, 5), (1, 6), (1, 10.0)]


@pytest.mark.parametrize(("offset", "error", "expected"), [(0.5, 0.1, 0.5), (-0.5, 0.1, -0.5), (0.05, 0.1, 0.0)])
def test_an_offset_within_the_error_is_none(offset: float, error: float, expected: float) -> None:
    assert settled(offset, error) == (expected, error)


def test_chrome_gets_every_interval() -> None:
    found = json.loads(json.dumps(events(planted())))["traceEvents"]
    lanes = [(one["pid"], one["tid"], one["ts"], one["dur"]) for one in found if one["ph"] == "X"]
    assert {(0, 0, 1e6, 3.5e6), (0, 2, 6e6, 1e6), (1, 2, 2e6, 5e6)} <= {*lanes}
    begun = {one["id"]: one["ts"] for one in found if one["ph"] == "b"}
    assert begun == {"0.0": 6e6, "1.0": 2e6}
    assert {one["id"]: one["ts"] for one in found if one["ph"] == "e"} == {"0.0": 7e6, "1.0": 7e6}
    assert [(one["ph"], one["pid"]) for one in found if one["name"] == "is waited for"] == [("s", 0), ("f", 1)]
