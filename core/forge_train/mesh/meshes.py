"""The meshes of the four domains (`mesh.axes` says which axes they have)."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .axes import FLATTENED_EXPERT, Domain
from .layout import Layout


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
