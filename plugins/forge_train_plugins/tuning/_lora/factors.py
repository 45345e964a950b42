"""Factors on the meta device, split as the weights that they update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from .targets import Target


def factors(target: Target, rank: int) -> tuple[Tensor, Tensor]:
    """Both factors of an update, `A` and `B`."""
    weight = target.weight
    *experts, rows, columns = weight.shape
    if target.is_embedding:
        return empty((rank, rows), weight, {0: 1}), empty((columns, rank), weight, {1: 0})
    own, at = {0: 0} if experts else {}, len(experts)
    a = empty((*experts, rank, columns), weight, {**own, at + 1: at + 1})
    return a, empty((*experts, rows, rank), weight, {**own, at: at})


def mesh_of(weight: Any) -> Any:
    return weight.device_mesh


def split_axis(weight: Tensor) -> int | None:
    """The axis along which tensor parallelism has split a weight."""
    places = weight.placements if isinstance(weight, DTensor) else ()
    return next((place.dim for place in places if isinstance(place, Shard)), None)


def empty(shape: tuple[int, ...], weight: Any, shared: Mapping[int, int]) -> Tensor:
    """A factor on the meta device.

    Args:
        shape: of the whole factor.
        weight: what it updates.
        shared: axis of the weight → the factor's axis of the same meaning.
    """
    whole = torch.empty(shape, device="meta")
    if not isinstance(weight, DTensor):
        return whole
    places = [
        Shard(shared[one.dim]) if isinstance(one, Shard) and one.dim in shared else Replicate()
        for one in weight.placements
    ]
    if weight.ndim == 2 and all(isinstance(one, Replicate) for one in places):
        return whole  # whole parameters are for tensor parallelism to look after
    return distribute_tensor(whole, weight.device_mesh, places, src_data_rank=None)
