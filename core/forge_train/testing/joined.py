"""The process group of a rank of the pool: of one case, or of several that keep it and what was made in it."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import TYPE_CHECKING

from ..processes import distributed, meshes, process_group

if TYPE_CHECKING:
    from torch.distributed import Store

MOST = 4
"""Layouts whose meshes a group keeps. The threads of gloo's groups wake up a hundred times a second each, idle or not:
with 200 of them on each of 24 ranks, two cores made 100,000 context switches a second."""

_number: int | None = None


def here() -> bool:
    """Whether this rank is in a group."""
    return _number is not None


def crowded() -> bool:
    """Whether this group keeps as many meshes as it may; all its ranks find the same."""
    return _number is not None and distributed.build_meshes.cache_info().currsize >= MOST  # type: ignore[attr-defined]


def join(number: int, store: Store, rank: int, world: int, timeout: timedelta) -> None:
    """Be in the group of that number: the one that was kept, or a new one.

    In one that was kept, equal layouts have the same meshes: torch's caches, where equal meshes are one, stay true.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    global _number  # a process has one default group
    if _number == number:
        for group in list(c10d._world.pg_map):
            c10d._set_pg_timeout(timeout, group)
        return
    leave()
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(f"group-{number}", store), rank=rank, world_size=world, timeout=timeout
    )
    _number, distributed.build_meshes = number, functools.cache(meshes.build_meshes)  # type: ignore[attr-defined]
    # A case without collectives may be over, and its connections closed, while another rank still connects.
    connected = dist.PrefixStore(f"connected-{number}", store)
    connected.set(str(rank), "")
    connected.wait([str(one) for one in range(world)], timeout)


def leave() -> None:
    """Closes the connections too: ranks that wait for one that failed fail at once."""
    global _number
    if _number is not None:
        _number, distributed.build_meshes = None, meshes.build_meshes  # type: ignore[attr-defined]
        process_group.leave()
