"""What the tests of the pool have its ranks do."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def total(value: float) -> float:
    """Sum of `value` × (rank + 1) over all ranks."""
    tensor = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return float(tensor)


def gather() -> dict[str, object]:
    everybody: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, dist.get_rank())
    return {"ranks": everybody, "process": os.getpid(), "world": os.environ["WORLD_SIZE"]}


def fail_on(rank: int) -> None:
    """One rank fails, the others wait for it in a collective."""
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} can't go on")
    dist.all_reduce(torch.ones(1))


def hang_on(rank: int) -> int:
    """One rank hangs, once both have come here."""
    dist.barrier()
    if dist.get_rank() == rank:
        time.sleep(6000)
    return dist.get_rank()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("about to die", flush=True)
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def not_json() -> object:
    return torch.ones(1)
