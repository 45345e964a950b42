"""Setup and teardown of a process: its device, the group in which a launcher's processes meet, and the meshes."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..base.errors import ConfigError
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
    """Make the process group, by the environment variables of torchrun."""
    dist.init_process_group(backend_of(device), rank=place.rank, world_size=place.size, timeout=timeout)


def backend_of(device: torch.device) -> str:
    """The backends of a process group on this device."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


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


# -- garbage collections, in the same steps on every rank ------------------------------------------------------------

YOUNG = 50
"""Steps between collections of what was made lately."""
ALL = 1000
"""Steps between collections of everything."""


@contextmanager
def scheduled_collections(*, active: bool) -> Iterator[None]:
    """Leave collections to `collect` within the block, which makes them between steps of a fixed number.

    Python collects when a rank has made enough objects, which differs between ranks: one stops for a tenth of a second,
    and all others wait for it in the next collective.

    Args:
        active: whether to do so; else the block changes nothing.
    """
    before = gc.isenabled()
    if active:
        gc.collect()
        gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def collect(step: int) -> None:
    """Collect after this step, if it is its turn and Python itself collects nothing."""
    if gc.isenabled():
        return
    if step % ALL == 0:
        gc.collect()
    elif step % YOUNG == 0:
        gc.collect(1)
