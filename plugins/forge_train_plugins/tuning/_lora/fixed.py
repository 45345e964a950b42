"""Updates that are not trained: those of adapters beneath the run's own, and what the run's own began with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from forge_train.mesh.tensors import local
from forge_train_kit.model.block_codes import BlockTensor
from forge_train_kit.model.spans import is_imagined

from .targets import Target

if TYPE_CHECKING:
    from .sources import Source

START: Literal["start"] = "start"
BENEATH: Literal["beneath"] = "beneath"

Read = Callable[[str], Tensor]
"""Reads the first values of a factor, `A` or `B`, or of the `magnitude`."""


@dataclass(frozen=True)
class Fixed:
    """A fixed update of a weight.

    Args:
        kind: ends the names of its factors. A START belongs to the run's own update, and is switched off with it.
        rank: of it.
        scale: of it.
        read: reads its factors; None for a START, which `begin` makes.
    """

    kind: Literal["start", "beneath"]
    rank: int
    scale: float
    read: Read | None = None


def beneath(sources: Sequence[tuple[Source, float]]) -> Fixed:
    """The updates of several adapters as one.

    Args:
        sources: of one weight, and the scale of each.
    """

    def read(factor: str) -> Tensor:
        parts = [one.read(factor) * (scale if factor == "B" else 1.0) for one, scale in sources]
        return torch.cat(parts, -2 if factor == "A" else -1)

    return Fixed(BENEATH, sum(one.size[0] for one, _ in sources), 1.0, read)


@torch.no_grad()
def begin(target: Target, rank: int, scale: float, *, together: bool = False) -> None:
    """Begin an update as the largest singular directions of its linear's weight (PiSSA, arXiv:2404.02948, eq. 2 and 3),
    and take the same away from the weight. In a run that goes on, this was done before.

    All ranks that share a weight call this together.

    Args:
        target: the linear.
        rank: of its update.
        scale: of its update.
        together: whether all processes share it. They then take the vectors of the first one, as each may have found
            some of the other sign.
    """
    module = target.module
    a, b = (module._parameters[name] for name in target.factors)
    first = [module._parameters[f"{name}_{START}"] for name in target.factors]
    if is_imagined(local(first[0])) or _whole(first[0]).any():
        return
    u, s, v = torch.linalg.svd(_whole(target.weight).float(), full_matrices=False)
    roots = (s[:rank] / scale).sqrt()
    for made, both in ((roots.unsqueeze(1) * v[:rank], (a, first[0])), (u[:, :rank] * roots, (b, first[1]))):
        values = made.contiguous()
        if together:
            torch.distributed.broadcast(values, 0)
        for one in both:
            _fill(one, values.to(one.dtype))


def _whole(tensor: Any) -> Tensor:
    """All of a parameter, decoded."""
    held = local(tensor)
    plain = held.plain() if isinstance(held, BlockTensor) else held
    if not isinstance(tensor, DTensor):
        return plain
    mesh, places = tensor.device_mesh, tensor.placements
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(plain, mesh, places, run_check=False, shape=shape, stride=stride).full_tensor()


def _fill(tensor: Any, values: Tensor) -> None:
    """Fill a parameter with its part of whole values."""
    if isinstance(tensor, DTensor):
        values = distribute_tensor(values, tensor.device_mesh, tensor.placements)
    tensor.copy_(values)
