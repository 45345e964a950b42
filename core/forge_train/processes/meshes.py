"""The meshes of the four domains (`DistributedContext` says which axes they have)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config.rules import Layout


def build_meshes(layout: Layout, device: torch.device) -> dict[str, DeviceMesh]:
    """All meshes, on every rank in the same order, unflattened from one root."""
    size = dist.get_world_size()
    root = init_device_mesh(device.type, (size,), mesh_dim_names=("world",))
    inner = layout.dp_shard * layout.cp * layout.tp

    def view(**axes: int) -> DeviceMesh:
        return root._unflatten(0, tuple(axes.values()), tuple(axes))

    dense = view(pp=layout.pp, dp_replicate=layout.dp_replicate, dp_shard=layout.dp_shard, cp=layout.cp, tp=layout.tp)
    fsdp = dense["dp_shard", "cp"]._flatten("fsdp")
    meshes = {
        "flat": root,
        "dense": dense,
        "dense.fsdp": fsdp,
        "dense.dp_replicate,fsdp": DeviceMesh._concatenate([dense["dp_replicate"], fsdp]),
        "dense.data": dense["dp_replicate", "dp_shard", "cp"]._flatten("data"),
        "dense.loss": dense["pp", "dp_replicate", "dp_shard", "cp"]._flatten("loss"),
        "batch": view(pp=layout.pp, dp=layout.data_ranks, cp=layout.cp, tp=layout.tp),
    }
    if layout.etp == 1:
        meshes["expert"] = view(
            pp=layout.pp, dp_replicate=layout.dp_replicate, efsdp=inner // layout.ep, ep=layout.ep, etp=1
        )
    else:
        efsdp = inner // layout.tp // layout.ep
        meshes["expert"] = view(
            pp=layout.pp, dp_replicate=layout.dp_replicate, efsdp=efsdp, ep=layout.ep, etp=layout.etp
        )
    return meshes
