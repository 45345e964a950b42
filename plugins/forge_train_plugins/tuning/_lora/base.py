"""The base in codes."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from forge_train import ConfigError
from forge_train.mesh.tensors import local
from forge_train_kit.model.block_codes import BlockTensor
from forge_train_kit.model.block_format import BlockFormat

from .factors import split_axis
from .targets import Target


def encode(target: Target, format: BlockFormat) -> None:
    """Have a weight hold codes, on the meta device.

    Raises:
        ConfigError: if a rank's rows do not consist of whole blocks, or double ones are not whole.
    """
    weight: Any = target.weight
    own = local(weight)
    columns = own.shape[-1]
    if columns % format.block:
        raise ConfigError(
            f"lora.base_block: {format.block} does not divide the {columns} columns that a rank has of "
            f"{target.name!r}. Set a smaller one, or leave it out of lora.modules.",
            key="lora.base_block",
        )
    if format.double and split_axis(weight) == weight.ndim - 1:
        raise ConfigError(
            f"lora.base_double: tp splits the rows of {target.name!r}, whose scales are of whole ones. Set "
            "lora.base_double = false.",
            key="lora.base_double",
        )
    codes: Any = BlockTensor.of(own.detach(), format)
    if isinstance(weight, DTensor):
        mesh, places = weight.device_mesh, weight.placements
        codes = DTensor.from_local(codes, mesh, places, run_check=False, shape=weight.shape, stride=weight.stride())
    target.module._parameters[target.key] = nn.Parameter(codes, requires_grad=False)
