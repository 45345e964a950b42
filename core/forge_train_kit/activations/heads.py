"""Layers by number, and the heads of their attention."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from forge_train.contract.model import Model
from forge_train.plugin.job import Job


@dataclass(frozen=True)
class HeadColumns:
    """The columns of a layer's output projection, by heads."""

    projection: str
    """Global name of the module that mixes the heads' results."""
    heads: int
    size: int
    """Columns of each head."""


def layers_of(part: nn.Module) -> tuple[str, ...]:
    """The layers that a text passes through, by name; not those that draft in training, nor those of encoders."""
    beside = [one for name in ("tail", "fusion") if isinstance(one := getattr(part, name, None), nn.Module)]
    inside = {id(one) for module in beside for one in module.modules()}
    units: tuple[str, ...] = tuple(getattr(part, "units", ()))
    return tuple(name for name in units if id(part.get_submodule(name)) not in inside)


def layer_names(model: Model, job: Job) -> list[str]:
    """The layers of the whole model, in order. Every rank must call it."""
    mine = [name for part in model.parts for name in layers_of(part)]
    return sorted({name for names in job.dist.gather_stages(mine) for name in names}, key=_by_number)


def kernel_of(layer: nn.Module) -> nn.Module | None:
    """The module of a layer that shows its attention kernel; None if there is none."""
    return next((one for one in layer.modules() if callable(getattr(one, "kernel", None))), None)


def head_columns(layer: nn.Module, name: str) -> HeadColumns | None:
    """The columns by which a layer's heads reach the residual stream; None for a layer without heads.

    Args:
        layer: whole, or split by tensor parallelism.
        name: global name of it.
    """
    for path, module in layer.named_modules():
        mixer: Any = module
        if not (callable(getattr(mixer, "kernel", None)) or callable(getattr(mixer, "recurrence", None))):
            continue
        found = _projection(mixer)
        if found is None:
            return None
        own, projection = found
        weight = projection.weight
        width = int(weight.shape[1] if isinstance(projection, nn.Linear) else weight.shape[0])
        size = getattr(projection, "head_dim", getattr(mixer, "head_dim", 0)) or width // mixer.heads
        return HeadColumns(".".join(filter(None, (name, path, own))), width // size, size)
    return None


def _projection(mixer: Any) -> tuple[str, Any] | None:
    """The child that mixes heads: the one that the mixer's plan splits by its inputs, or the last that is a matrix."""
    plan = mixer.tensor_plan() if hasattr(mixer, "tensor_plan") else {}
    planned = [name for name, style in plan.items() if style == "rowwise"]
    matrices = [name for name, one in mixer.named_children() if getattr(getattr(one, "weight", None), "ndim", 0) == 2]
    names = planned or matrices
    return (names[-1], mixer.get_submodule(names[-1])) if names else None


def _by_number(name: str) -> list[Any]:
    return [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", name)]
