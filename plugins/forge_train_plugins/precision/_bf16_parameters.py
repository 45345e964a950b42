"""bf16 parameters applied to one part of the model."""

from __future__ import annotations

import torch
from torch import nn

from forge_train import Applied


def narrow(part: nn.Module) -> Applied:
    """Make every fp32 parameter bf16. Buffers stay: positions and running sums need their bits.

    Parameters are replaced, ties and all: `data` of a DTensor takes no other dtype (torch 2.13).
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    matched = []
    for name, module in part.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or parameter.dtype is not torch.float32:
                continue
            if parameter not in made:
                made[parameter] = nn.Parameter(parameter.detach().to(torch.bfloat16), parameter.requires_grad)
                matched.append(f"{name}.{key}" if name else key)
            module._parameters[key] = made[parameter]
    return Applied(part, matched=tuple(matched), note="bf16 at rest")
