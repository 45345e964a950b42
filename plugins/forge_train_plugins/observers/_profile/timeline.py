"""Split the time of profiled steps into computing, communicating, and communicating while nothing computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Spans = list[tuple[float, float]]
"""Disjoint, ascending."""
STEP = "forge step"
WAITS = ("c10d::", "_c10d_functional::")
"""Prefixes of host operations that queue collectives or wait for them."""


class Activity(NamedTuple):
    """Something that a profiler saw, in microseconds."""

    name: str
    thread: int
    start: float
    end: float
    device: bool = False
    """True if it ran on an accelerator."""
    annotation: bool = False
    """True if it only marks a range of other activities."""


@dataclass(frozen=True)
class Split:
    """Seconds of all profiled steps together."""

    whole: float
    computing: float
    communication: float
    exposed: float
    """Communication while nothing computes."""

    def line(self, steps: int) -> str:
        """For a step."""
        idle = self.whole - self.computing - self.exposed
        parts = {
            "whole": self.whole,
            "computing": self.computing,
            "communication": self.communication,
            "exposed communication": self.exposed,
            "neither": idle,
        }
        return "Milliseconds of a step: " + ", ".join(f"{name} {1e3 * one / steps:.3f}" for name, one in parts.items())


def split(activities: Sequence[Activity]) -> Split | None:
    """Split the time from the first to the last profiled step; None if there is no step.

    On an accelerator its kernels count: NCCL's communicate, all others compute. On a CPU, gloo's collectives
    communicate; operations on all other threads compute, except while they wait for a collective.
    """
    steps = [one for one in activities if one.name == STEP and not one.device]
    if not steps:
        return None
    device = [one for one in activities if one.device and not one.annotation]
    if device:
        communicating = _union(one for one in device if "nccl" in one.name.lower())
        computing = _union(one for one in device if "nccl" not in one.name.lower())
    else:
        gloo = [one for one in activities if one.name.startswith("gloo:")]
        communicating = _union(gloo)
        computing = _computing(activities, {one.thread for one in gloo})
    whole = max(one.end for one in (*steps, *device)) - min(one.start for one in steps)
    exposed = _minus(communicating, computing)
    return Split(*(1e-6 * one for one in (whole, *map(_length, (computing, communicating, exposed)))))


def _computing(activities: Iterable[Activity], apart: set[int]) -> Spans:
    """Return the spans in which any host thread computes, leaving out the threads in `apart`."""
    threads: dict[int, list[Activity]] = {}
    for one in activities:
        if (
            "::" in one.name
            and not one.annotation
            and not one.name.startswith("autograd::")
            and one.thread not in apart
        ):
            threads.setdefault(one.thread, []).append(one)
    found: Spans = []
    for own in threads.values():
        waits = _union(one for one in own if one.name.startswith(WAITS))
        found += _minus(_union(one for one in own if not one.name.startswith(WAITS)), waits)
    return _merged(found)


def _union(activities: Iterable[Activity]) -> Spans:
    return _merged([(one.start, one.end) for one in activities])


def _merged(spans: Spans) -> Spans:
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _minus(spans: Spans, others: Spans) -> Spans:
    """Return the parts of `spans` that `others` do not cover."""
    left, at = [], 0
    for start, end in spans:
        while at < len(others) and others[at][1] <= start:
            at += 1
        for low, high in others[at:]:
            if low >= end:
                break
            if low > start:
                left.append((start, low))
            start = max(start, high)
        if start < end:
            left.append((start, end))
    return left


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)
