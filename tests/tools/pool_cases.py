"""What the tests of the pool have its ranks do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import weakref

import torch
import torch.distributed as dist

from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Layout
from forge_train_tools.testing import joined


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


def wait_for(rank: int) -> None:
    """All ranks but one wait for that one, which never comes, in a collective."""
    dist.barrier()
    work = None if dist.get_rank() == rank else dist.all_reduce(torch.ones(1), async_op=True)
    print("waiting", flush=True)
    if work is None:
        time.sleep(6000)
    else:
        work.wait()


def compute_crowded(seconds: float, others: int) -> float:
    """Compute for so many seconds of one core that other processes want too; how long that took."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    crowd = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(others)]
    began, end = time.monotonic(), time.process_time() + seconds
    try:
        while time.process_time() < end:
            pass
        return time.monotonic() - began
    finally:
        for one in crowd:
            one.kill()
            one.wait()
        os.sched_setaffinity(0, before)


def leave_on(rank: int) -> dict[str, object]:
    """One rank leaves the group and says why, the others hang."""
    dist.barrier()
    if dist.get_rank() != rank:
        time.sleep(6000)
    joined.leave()
    return {"rank": rank, "code": 1, "kind": "own", "message": "ValueError: broken"}


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("about to die", flush=True)
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def not_json() -> object:
    return torch.ones(1)


_met: list[weakref.ref[object]] = []


def meets_again() -> bool:
    """Whether the mesh of a layout, and with it the process group, is that of the call before."""
    with DistributedContext.join(Layout(dp_shard=dist.get_world_size()), "cpu") as context:
        mesh = context.mesh("dense")
        context.all_reduce(torch.ones(1), axis="dp_shard")
    again = bool(_met) and _met[0]() is mesh
    _met[:] = [weakref.ref(mesh)]  # a group that somebody holds keeps its connections
    return again
