"""Detection of the rank that others wait for, from each rank's share of working time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, Protocol

import torch

from forge_train.mesh.layout import Layout
from forge_train_kit.ranks import named
from forge_train_tools.health import Finding, mark
from forge_train_tools.stacks import place, recorded_collectives

interval = 0.1
"""Seconds between two looks at the main thread, which must let go of Python for each."""
LEAST = 50
"""Looks below which a share says little."""
STEPS, FEWEST = 32, 3
"""Steps on a device of which the last are measured, and below which they say little."""


class Share(Protocol):
    """The share of its steps in which this rank works, and is not in a collective."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step: evaluations and saves are left out, where one rank works alone by design."""
        ...

    def take(self) -> float | None:
        """The share since the last time; None where too little is known."""
        ...

    def stop(self) -> None:
        """Look no more."""
        ...


def share_of(device: torch.device) -> Share:
    """On a CUDA device, the host's time says nothing: it only launches what the device does."""
    return DeviceShare() if device.type == "cuda" else HostShare()


class DeviceShare:
    """By the device's clock: events at the borders of steps, and those of torch's flight recorder around collectives.

    A collective takes until the last rank has come, so that those of a rank that the others wait for are short. Where
    they run beside each other or beside other work, the share is less than what it says, on all ranks alike.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int, Any, Any]] = deque(maxlen=STEPS)
        _time_collectives()

    @contextmanager
    def step(self) -> Iterator[None]:
        began, begin = time.time_ns(), mark()
        yield
        self._steps.append((began, time.time_ns(), begin, mark()))

    def take(self) -> float | None:
        _time_collectives()  # of groups that came later
        steps = [one for one in self._steps if one[3].query()]
        self._steps.clear()
        entries = recorded_collectives()
        known, whole, inside = 0, 0.0, 0.0
        for began, ended, begin, end in steps:
            mine = [entry for entry in entries if began <= entry["time_created_ns"] <= ended]
            complete = entries and entries[0]["time_created_ns"] < began
            if complete and all(entry["retired"] for entry in mine):
                known += 1
                whole += begin.elapsed_time(end)
                inside += sum(entry.get("duration_ms", 0.0) for entry in mine)
        return 1 - inside / whole if known >= FEWEST and whole else None

    def stop(self) -> None:
        self._steps.clear()


def _time_collectives() -> None:
    """NCCL records when each begins and ends only where it is asked to."""
    for group in torch.distributed.distributed_c10d._world.pg_map:
        group._enable_collectives_timing()  # type: ignore[attr-defined]


class HostShare:
    """By the main thread's stack, at which another thread looks from time to time."""

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._looks, self._busy, self._inside = 0, 0, False
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="forge-health", daemon=True).start()

    @contextmanager
    def step(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def take(self) -> float | None:
        looks, busy = self._looks, self._busy
        self._looks = self._busy = 0
        return busy / looks if looks >= LEAST else None

    def stop(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(interval):
            if self._inside:
                self._looks += 1
                self._busy += not place(self._main).awaits


def compare(shares: Sequence[float | None], layout: Layout, waited: float) -> Iterator[Finding]:
    """Ranks that the others of their pipeline stage wait for.

    Args:
        shares: of each rank, as `Share.take` gives it.
        layout: of the ranks.
        waited: the part of their steps in which others may wait for one.
    """
    ranks = len(shares) // layout.pp
    for first in range(0, len(shares), ranks):
        stage = {rank: share for rank in range(first, first + ranks) if (share := shares[rank]) is not None}
        if len(stage) < 2 or len(stage) < ranks:
            continue
        for rank, share in stage.items():
            usual = median(other for number, other in stage.items() if number != rank)
            if share - usual > waited:
                text = f"{named([rank], layout)} works in {_shown(share)} of a step, and the others in {_shown(usual)}"
                yield Finding("straggler", "warn", f"{text}: they wait for it")
        least, most = min(stage.values()), max(stage.values())
        yield Finding("steps", "ok", f"ranks work in {_shown(least)} to {_shown(most)} of a step")


def _shown(share: float) -> str:
    return f"{max(share, 0):.0%}"
