"""The process group of a rank of the pool: of one case, or of several that keep it and what was made in it."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from forge_train.mesh import distributed, process_group

if TYPE_CHECKING:
    from torch.distributed import Store

MOST = 4
"""Layouts whose meshes a group keeps."""

_number: int | None = None


def share_device() -> None:
    """Let all of gloo's groups in this process have one device.

    By default (torch 2.13) each has its own, whose thread wakes up a hundred times a second, idle or not, and groups
    that torch's caches hold are never gone: two cores made 50,000 context switches a second.
    """
    from torch.distributed import ProcessGroupGloo as Gloo

    original, device = Gloo.__init__, Gloo.create_default_device()

    def init(self: Any, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        options: Any = Gloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = [device], timeout
        original(self, store, rank, size, options)

    Gloo.__init__ = init  # type: ignore[method-assign]


def here() -> bool:
    """Return True if this rank is in a group."""
    return _number is not None


def crowded() -> bool:
    """Return True if this group holds as many meshes as allowed; the result is the same on all its ranks."""
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
    _number, distributed.build_meshes = number, functools.cache(process_group.build_meshes)  # type: ignore[attr-defined]
    # A case without collectives may be over, and its connections closed, while another rank still connects.
    connected = dist.PrefixStore(f"connected-{number}", store)
    connected.set(str(rank), "")
    connected.wait([str(one) for one in range(world)], timeout)


def leave() -> None:
    """Closes the connections too: ranks that wait for one that failed fail at once."""
    global _number
    if _number is not None:
        _number, distributed.build_meshes = None, process_group.build_meshes  # type: ignore[attr-defined]
        process_group.leave()
