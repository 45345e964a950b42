"""Parts of a model that is cut into the stages of a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from .cuts import Cost

Stages = Sequence[tuple[str, ...]]
"""The modules of each entry of a model's `stages`."""


def part_of(model: nn.Module, stages: Stages, kept: range) -> nn.Module:
    """The model with holes where the other stages are; the modules in between are shared with it."""
    return _without(model, {name for at, entry in enumerate(stages) if at not in kept for name in entry})


def _without(module: nn.Module, gone: set[str]) -> nn.Module:
    inner: dict[str, set[str]] = {}
    for path in gone:
        first, _, rest = path.partition(".")
        inner.setdefault(first, set()).add(rest)
    new = copy.copy(module)
    new.__dict__ = {
        key: copy.copy(value) if key.startswith("_") and isinstance(value, (dict, set)) else value
        for key, value in vars(module).items()
    }
    for name, rests in inner.items():
        child = module._modules[name]
        if "" not in rests and child is not None:
            new._modules[name] = _without(child, rests)
        elif isinstance(module, (nn.ModuleDict, nn.ModuleList, nn.Sequential)):
            del new._modules[name]
        else:
            new._modules[name] = None
    return new


def cost_of(part: Any, sequence: int) -> Cost:
    """Return what a part costs: FLOPs as the model declares them, and bytes of parameters."""
    flops = float(part.flops_per_token(sequence)) if hasattr(part, "flops_per_token") else 0.0
    return Cost(flops, float(sum(p.numel() * p.element_size() for p in part.parameters())))
