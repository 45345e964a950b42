"""A trace in Chrome's Trace Event Format, which Perfetto and chrome://tracing read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .analysis import Analysis
from .record import Call, RankTrace

LANES = ("compute", "communication", "waiting")


def events(found: Analysis) -> dict[str, Any]:
    """A process for each rank, a thread for each lane; an arrow for each message and for each rank waited for."""
    lines: list[dict[str, Any]] = []
    for rank in found.trace.ranks:
        lines += _names(rank)
        lines += (
            _event(rank, 0, one.module or one.phase, one.start, one.end, {"phase": one.phase}) for one in rank.segments
        )
        lines += _calls(rank)
        lines += (
            _event(rank, 2, f"waits in {call.kind}", a, b, {"axis": call.axis, "plugin": call.plugin})
            for a, b, call in rank.blocked
        )
    lines += _arrows(found)
    return {"traceEvents": lines, "displayTimeUnit": "ms"}


def _names(rank: RankTrace) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": rank.rank, "tid": 0, "args": {"name": rank.name}}
    for lane, name in enumerate(LANES):
        yield {"ph": "M", "name": "thread_name", "pid": rank.rank, "tid": lane, "args": {"name": name}}


def _event(rank: RankTrace, lane: int, name: str, start: float, end: float, about: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": start * 1e6, "dur": max(end - start, 0.0) * 1e6}
    return {"ph": "X", "pid": rank.rank, "tid": lane, "name": name, "args": about, **times}


def _calls(rank: RankTrace) -> Iterator[dict[str, Any]]:
    """Calls may overlap without nesting, so they are asynchronous events."""
    for at, call in enumerate(rank.calls):
        same = {"cat": "communication", "id": f"{rank.rank}.{at}", "pid": rank.rank, "tid": 1, "name": name(call)}
        yield {"ph": "b", "ts": call.start * 1e6, "args": about(call), **same}
        yield {"ph": "e", "ts": call.end * 1e6, **same}


def name(call: Call) -> str:
    """`all_gather dp_shard`"""
    return f"{call.kind} {call.axis}"


def about(call: Call) -> dict[str, Any]:
    """Facts of a call, without its times."""
    return {key: value for key, value in vars(call).items() if key not in ("start", "end", "waits", "group")}


def _arrows(found: Analysis) -> Iterator[dict[str, Any]]:
    for at, stall in enumerate(found.stalls):
        same = {"cat": "waiting", "id": at, "name": "is waited for", "ts": stall.end * 1e6}
        yield {"ph": "s", "pid": stall.behind, "tid": 0, **same}
        yield {"ph": "f", "bp": "e", "pid": stall.rank, "tid": 2, **same, "ts": stall.end * 1e6}
