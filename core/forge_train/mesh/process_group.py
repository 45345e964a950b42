"""Setup and teardown of a process: its device, the group in which a launcher's processes meet, and the meshes."""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import time
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..base.errors import CommunicationError, ConfigError
from .axes import FLATTENED_EXPERT, Domain
from .layout import Device, Layout
from .world import World

ALONE = World()


def choose_device(wanted: Device, world: World = ALONE) -> torch.device:
    """The device of this process.

    Raises:
        ConfigError: if the wanted one is not there.
    """
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device = 'cuda', but torch finds no CUDA device here; use 'auto' or 'cpu'.")
    if wanted == "cuda" and world.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"Local rank {world.local_rank} has no CUDA device of its own: there are {torch.cuda.device_count()}. "
            "Start fewer processes, or say run.device = 'cpu'."
        )
    if wanted == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("run.device = 'mps', but torch finds no Metal device here; use 'auto' or 'cpu'.")
    if wanted == "mps" and world.size > 1:
        raise ConfigError("run.device = 'mps' works in one process only; use 'cpu' for several.")
    return torch.device(wanted, world.local_rank) if wanted == "cuda" else torch.device(wanted)


def start_cuda(device: torch.device) -> None:
    """Make a CUDA device the current one, before anything is allocated on it.

    Its allocator may grow segments, which avoids fragments between tensors of many sizes, unless the environment
    configures the allocator.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    torch.cuda.set_device(device)


def join(place: World, device: torch.device, timeout: timedelta) -> None:
    """Make the process group.

    Raises:
        CommunicationError: if a process does not come, or rank 0 can't listen.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = place.rank == 0 and not agent_has_store
    at = f"{place.address}:{place.port}"
    try:
        store = dist.TCPStore(
            place.address, place.port, place.size, is_master=serves, timeout=timeout, wait_for_workers=False
        )
        # In a store that outlives them, gloo would find the addresses of the dead after a restart.
        own = dist.PrefixStore(_agree(place, store, timeout, at), store) if agent_has_store else store
        _await_all(place, own, timeout, at)
        dist.init_process_group(backend, store=own, rank=place.rank, world_size=place.size, timeout=timeout)
    except RuntimeError as error:
        if serves and "EADDRINUSE" in str(error):
            raise CommunicationError(
                f"Rank 0 can't listen at {at}: the port is in use. Set MASTER_PORT to a free one, on all nodes."
            ) from error
        reason = str(error).strip().splitlines()[0]
        raise CommunicationError(
            f"Rank {place.rank} can't join the other {place.size - 1} at {at}: {reason}"
        ) from error


def _await_all(place: World, store: dist.Store, timeout: timedelta, at: str) -> None:
    """Have rank 0 name those that do not come; the others hear of it from whoever started them."""
    store.set(f"here-{place.rank}", "")
    if place.rank:
        return
    try:
        store.wait([f"here-{rank}" for rank in range(place.size)], timeout)
    except RuntimeError as error:
        missing = [rank for rank in range(place.size) if not store.check([f"here-{rank}"])]
        raise _absent(missing, place, timeout, at) from error


def _absent(missing: list[int], place: World, timeout: timedelta, at: str) -> CommunicationError:
    ranks = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} have"
    return CommunicationError(
        f"After {timeout.total_seconds():g} s {ranks} not joined the other {place.size - len(missing)} of "
        f"{place.size} processes at {at}. Look whether they were started, and at their logs."
    )


def _agree(place: World, store: dist.Store, timeout: timedelta, at: str) -> str:
    """A prefix that the processes of this start share, and no other ones.

    Agents of torchrun count their restarts each for itself, so one that joined later has another count, and the store
    stays when their number changes. So every process draws a name, rank 0 proposes all of them until each process has
    found its own there, and the processes of an earlier start find no name of theirs.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    ranks = range(place.size)
    awaited = names = [f"name-{rank}" for rank in ranks]
    store.set(names[place.rank], mine)
    while time.monotonic() < deadline:
        if place.rank == 0 and store.check(names):
            store.set("proposal", ",".join(store.get(name).decode() for name in names))
        proposal = store.get("proposal").decode() if store.check(["proposal"]) else ""
        if mine in proposal.split(","):
            prefix = hashlib.sha256(proposal.encode()).hexdigest()
            awaited = [f"{prefix}-{rank}" for rank in ranks]
            store.set(awaited[place.rank], "")
            if store.check(awaited):
                return prefix
        time.sleep(0.05)
    raise _absent([rank for rank in ranks if not store.check([awaited[rank]])], place, timeout, at)


def leave() -> None:
    """Destroy the process group, and empty torch's caches of placements.

    A mesh equals every other mesh of the same shape, so that a later one would be given results with the groups of this
    one, which are gone. Until then a cached mesh keeps its groups, whose threads wake up all the time.
    """
    dist.destroy_process_group()
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _collective_utils, _redistribute, debug

    dispatch: Any = DTensor._op_dispatcher
    shapes = getattr(dispatch.sharding_propagator, "_propagate_tensor_meta_cached", None)
    clear: list[Any] = [
        getattr(debug, "_clear_sharding_prop_cache", None),
        getattr(shapes, "cache_clear", None),
        getattr(_redistribute, "clear_redistribute_planner_cache", None),
        getattr(_redistribute._gen_transform_infos, "cache_clear", None),
        getattr(_collective_utils.MeshTopoInfo.build_from_mesh, "cache_clear", None),
    ]
    for function in clear:  # of torch 2.13; other versions have some of them
        if function is not None:
            function()
    gc.collect()


def build_meshes(layout: Layout, device: torch.device) -> dict[str, DeviceMesh]:
    """All meshes, on every rank in the same order, unflattened from one root."""
    root = init_device_mesh(device.type, (layout.world,), mesh_dim_names=("world",))

    def view(domain: Domain) -> DeviceMesh:
        sizes = layout.domain(domain)
        return root._unflatten(0, tuple(sizes.values()), tuple(sizes))

    dense = view("dense")
    meshes = {"flat": root, "dense": dense}
    made: dict[tuple[str, ...], DeviceMesh] = {}
    for name, axes in layout.table.flattened.items():
        if axes not in made:  # one process group for `data` and `dp_cp` where they are the same ranks
            made[axes] = dense[axes]._flatten(name)
        meshes[f"dense.{name}"] = made[axes]
    meshes["dense.dp_replicate,fsdp"] = DeviceMesh._concatenate([dense["dp_replicate"], meshes["dense.fsdp"]])
    expert = view("expert")
    if layout.ep * layout.etp > 1:
        meshes |= {f"expert.{name}": expert[axes]._flatten(name) for name, axes in FLATTENED_EXPERT.items()}
    return meshes | {"batch": view("batch"), "expert": expert}
