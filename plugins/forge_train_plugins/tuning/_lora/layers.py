"""A linear layer with a low-rank update."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from forge_train import Init
from forge_train.mesh.tensors import local
from forge_train_kit.model import Dropout
from forge_train_kit.specialisation import Specialisation


class LowRank(nn.Module):
    """`W x + scale · B A x`, over the class of a linear: hooks, names and the linear's own product stay."""

    in_features: int
    lora_A: nn.Parameter  # noqa: N815  # as in the paper, and in PEFT's files
    lora_B: nn.Parameter  # noqa: N815
    lora_scale: float
    lora_dropout: Dropout | None
    lr_factors: dict[str, float]
    lora_read: Callable[[str], Tensor] | None = None
    """Reads a factor's first values, where the run begins with an adapter."""

    def initial(self, name: str) -> Init | None:
        if self.lora_read is not None and name in ("lora_A", "lora_B"):
            read = self.lora_read
            return Init("given", values=lambda _: read(name))
        if name == "lora_A":  # uniform within ± 1/√in, as PEFT draws it
            return Init("uniform", 1 / math.sqrt(3 * self.in_features))
        if name == "lora_B":
            return Init("zeros")
        found: Init | None = getattr(super(), "initial", lambda _: None)(name)
        return found

    def forward(self, x: Tensor) -> Tensor:
        taken = x if self.lora_dropout is None else self.lora_dropout(x)
        narrow = F.linear(taken, local(self.lora_A)) * self.lora_scale
        out: Tensor = super().forward(x)
        return out + F.linear(narrow, local(self.lora_B))


class Replaceable(nn.Linear):
    """A linear whose product another plugin may replace, as in tensor parallelism."""

    product = staticmethod(F.linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


_replaceable = Specialisation(lambda _: Replaceable)
_low_rank = Specialisation(lambda _: LowRank)


def adapt(module: Any, rank: int, scale: float, dropout: Dropout | None, lr_ratio: float) -> None:
    """Give a linear its update, on the meta device. The factor that shares the weight's split axis is split like it."""
    weight, split = module.weight, _split_axis(module.weight)
    rows, columns = weight.shape
    module.lora_A = nn.Parameter(_empty(rank, columns, like=weight if split == 1 else None))
    module.lora_B = nn.Parameter(_empty(rows, rank, like=weight if split == 0 else None))
    module.lora_scale, module.lora_dropout = scale, dropout
    module.lr_factors = {"lora_B": lr_ratio}
    if dropout is not None and split == 1:
        mesh = weight.device_mesh
        dropout.features_piece = (mesh.get_local_rank(), mesh.size())
    if type(module).forward is nn.Linear.forward:
        _replaceable(module)
    _low_rank(module)


def _split_axis(weight: Tensor) -> int | None:
    """The axis along which tensor parallelism has split a weight."""
    places = weight.placements if isinstance(weight, DTensor) else ()
    return next((place.dim for place in places if isinstance(place, Shard)), None)


def _empty(*shape: int, like: Any = None) -> Tensor:
    whole = torch.empty(shape, device="meta")
    return whole if like is None else distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
