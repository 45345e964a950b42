"""The initial value of one tensor, without memory for the others."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor

from forge_train.compose.initialise import declared_init, fill, resetting
from forge_train.contract.model import Model


def initial(model: Model, name: str, out: Tensor, seed: int) -> None:
    """Write the initial value of one parameter or buffer of a composed model, without memory for the others.

    Args:
        model: the model, which may be on the meta device.
        name: name of the parameter or buffer.
        out: a tensor of its shape, on the CPU, to write to.
        seed: seed of the run.
    """
    part = next(part for part in model.parts if name in part.state_dict())
    owner, _, attribute = name.rpartition(".")
    with torch.no_grad():
        if attribute in part.get_submodule(owner)._parameters:
            fill(out, name, declared_init(part, name), seed)
            return
        path = resetting(part, owner)
        module = copy.deepcopy(part.get_submodule(path)).to_empty(device=out.device)
        cast(Any, module).reset_buffers()
        out.copy_(module.get_buffer(name.removeprefix(f"{path}." if path else "")))
