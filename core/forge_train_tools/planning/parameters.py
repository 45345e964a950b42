"""The parameters of a composition: how many there are, and how many of them a rank holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from forge_train.compose.initialise import tied_groups
from forge_train.contract.model import Model
from forge_train.mesh.tensors import held_bytes, local
from forge_train_kit.model import elements_trained

from .communication import Names

LARGE, SHARE = 2**26, 0.05
"""Bytes of a parameter, and its share of all that a rank holds, from which it should be split."""
_DIMS = ("rows", "columns")


@dataclass(frozen=True)
class Group:
    """Parameters of one top-level module that lie alike."""

    module: str
    total: int
    held: int
    """Of these, what a rank holds."""
    placement: str
    """`whole`, or what is split over which axes: `rows over dp_shard 4`."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters, a tied one counted once."""

    total: int
    trainable: int
    """Those that a step trains: of rows, those alone that are trained, although gradients and the optimizer's state are
    those of whole matrices."""
    held: int
    """Parameters that one rank holds."""
    by_module: Mapping[str, int]
    """By top-level module."""
    groups: tuple[Group, ...]
    """The same by module and placement, and what a rank holds."""
    tied: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Giant:
    """A parameter that every rank holds whole."""

    name: str
    bytes: int


def count(model: Model, names: Names) -> Parameters:
    """Count a composed model's parameters.

    Args:
        model: composed, on the meta device.
        names: how axes are called.
    """
    by_module: dict[str, int] = {}
    groups: dict[tuple[str, str], list[int]] = {}
    for name, parameter in model.named_parameters():
        top = name.partition(".")[0]
        by_module[top] = by_module.get(top, 0) + parameter.numel()
        group = groups.setdefault((top, _placement(parameter, names)), [0, 0])
        group[0] += parameter.numel()
        group[1] += local(parameter).numel()
    return Parameters(
        total=sum(by_module.values()),
        trainable=elements_trained(model, later=True),
        held=sum(own for _, own in groups.values()),
        by_module=by_module,
        groups=tuple(Group(top, total, own, placement) for (top, placement), (total, own) in groups.items()),
        tied=tuple(tied_groups(*model.parts)),
    )


def total(stages: Sequence[Parameters]) -> Parameters:
    """All stages of a pipeline together; what a rank holds is of the stage that holds most.

    Args:
        stages: in the order of the model.
    """
    if len(stages) == 1:
        return stages[0]
    by_module: Counter[str] = Counter()
    groups: dict[tuple[str, str], Group] = {}
    fullest = max(stages, key=lambda stage: stage.held)
    for stage in stages:
        by_module.update(stage.by_module)
        for one in stage.groups:
            before = groups.get((one.module, one.placement), replace(one, total=0, held=0))
            held = one.held if stage is fullest else before.held
            groups[one.module, one.placement] = replace(before, total=before.total + one.total, held=held)
    return Parameters(
        total=sum(stage.total for stage in stages),
        trainable=sum(stage.trainable for stage in stages),
        held=fullest.held,
        by_module=dict(by_module),
        groups=tuple(groups.values()),
        tied=tuple(dict.fromkeys(tie for stage in stages for tie in stage.tied)),
    )


def giants(model: Model) -> list[Giant]:
    """Parameters that are not split, though they are large; largest first."""
    everything = held_bytes(model.parameters())
    found = [
        Giant(name, held_bytes([parameter]))
        for name, parameter in model.named_parameters()
        if local(parameter).numel() == parameter.numel()
    ]
    large = [giant for giant in found if giant.bytes >= max(LARGE, SHARE * everything)]
    return sorted(large, key=lambda giant: -giant.bytes)


def _placement(parameter: nn.Parameter, names: Names) -> str:
    mesh: Any = getattr(parameter, "device_mesh", None)  # a DTensor's; where there is none, torch need not load them
    split: dict[int, list[str]] = {}
    for axis, placement in enumerate(getattr(parameter, "placements", ())):
        if not placement.is_replicate() and mesh.size(axis) > 1:
            over = f"{names.of(mesh.get_group(axis).group_name)} {mesh.size(axis)}"
            split.setdefault(placement.dim, []).append(over)
    parts = [f"{_dim(dim)} over {' × '.join(axes)}" for dim, axes in sorted(split.items())]
    return "; ".join(parts) or "whole"


def _dim(dim: int) -> str:
    return _DIMS[dim] if dim < len(_DIMS) else f"axis {dim}"
