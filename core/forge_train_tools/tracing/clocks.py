"""Clocks of ranks, compared by round trips."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

ROUNDS = 8


def offset_to_first() -> tuple[float, float]:
    """Seconds that this process's clock is ahead of rank 0's, and how far that may be off; every rank calls it.

    A message goes to each rank and back, and its clock is compared with the middle of the fastest round trip (as NTP
    does, RFC 5905). An offset that the round trip can't tell from none is none: clocks of one machine are one clock.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    found = torch.zeros(2, dtype=torch.float64)
    for other in range(1, world):
        if rank == 0:
            best = (float("inf"), 0.0)
            for _ in range(ROUNDS):
                answer = torch.zeros(1, dtype=torch.float64)
                before = time.perf_counter()
                dist.send(answer, other)
                dist.recv(answer, other)
                after = time.perf_counter()
                best = min(best, (after - before, float(answer) - (before + after) / 2))
            dist.send(torch.tensor([best[1], best[0] / 2], dtype=torch.float64), other)
        elif rank == other:
            for _ in range(ROUNDS):
                dist.recv(torch.zeros(1, dtype=torch.float64), 0)
                dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64), 0)
            dist.recv(found, 0)
    return settled(*found.tolist())


def settled(offset: float, error: float) -> tuple[float, float]:
    """The offset, unless it may as well be none."""
    return (offset if abs(offset) > error else 0.0), error
