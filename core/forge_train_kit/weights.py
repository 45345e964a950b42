"""Fills a model with stored tensors: each rank reads only the ranges that its own shards need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from forge_train.base.errors import ConfigError
from forge_train.compose.initialise import local_window, tied_groups
from forge_train.contract.model import Model
from forge_train.plugin.job import Job
from forge_train.store.shards import Box

from .contract import InitialWeights
from .format import format_lines
from .state_map import Chain, Plan, StateMap, Step, View
from .state_map.named import named
from .state_map.views import Stored
from .stored import Patterns

__all__ = ["fill", "fill_model", "fill_views"]
KEY = "train.init_map"


class Ranges(Protocol):
    """Stored tensors that can be read in ranges."""

    def read(self, name: str, box: Box) -> Tensor: ...


def fill(weights: Mapping[str, Tensor], plan: Plan, source: Ranges) -> None:
    """Read weights in place, whatever their placement: each rank reads the ranges that its own shards need.

    Args:
        weights: by name; each is filled with the plan's tensor of that name, in its own dtype.
        plan: made from the stored tensors.
        source: reads the stored tensors.
    """
    with torch.no_grad():
        for name in (name for group in plan.groups for name in group.targets if name in weights):
            part, window = local_window(weights[name])
            whole = torch.empty(part.shape, dtype=part.dtype, device=part.device) if hasattr(part, "plain") else part
            plan.read_into(whole, name, source.read, tuple(window))
            if whole is not part:  # which encodes what is copied into it, and loses what is written through some views
                part.copy_(whole)


def fill_model(model: Model, job: Job, path: Path, tensors: Mapping[str, Tensor]) -> InitialWeights:
    """Fill a model with tensors of its parameters' names and shapes, or with those that `train.init_map` makes of them.

    All ranks call this with the same tensors, and each copies only the ranges that its own shards need, so tensors that
    are mapped from a file cost no memory. Patterns of `train.init_missing` and `train.init_unexpected` allow for
    differences.

    Args:
        model: the composed model, sharded or not.
        job: the run.
        path: the file or folder, for messages.
        tensors: by name, on the CPU.

    Raises:
        ConfigError: naming every tensor that does not fit, and for a pattern that fits nothing.
    """
    views = {name: Stored(tuple(one.shape), one.dtype, name) for name, one in tensors.items()}
    return fill_views(model, job, path, views, _Held(tensors))


@dataclass(frozen=True)
class _Held:
    tensors: Mapping[str, Tensor]

    def read(self, name: str, box: Box) -> Tensor:
        return self.tensors[name][tuple(slice(*bounds) for bounds in box)]


def fill_views(model: Model, job: Job, path: Path, views: Mapping[str, View], source: Ranges) -> InitialWeights:
    """Fill a model as `fill_model` does, with functions of tensors that `source` reads in ranges."""
    train = job.config.train
    given = _apply(named(train.init_map, KEY), views) if train.init_map else views
    weights = model.alone().state_dict()
    stages = job.dist.gather_stages({name: tuple(one.shape) for name, one in weights.items()})
    wanted = {name: shape for stage in stages for name, shape in stage.items()}
    ties = [group for stage in job.dist.gather_stages(tied_groups(*model.parts)) for group in stage]
    aliases = {name for group in ties for name in group if name not in wanted}
    may_lack = Patterns("train.init_missing", train.init_missing)
    may_exceed = Patterns("train.init_unexpected", train.init_unexpected)
    missing = may_lack.take(sorted(wanted.keys() - given.keys()))
    unexpected = may_exceed.take(sorted(given.keys() - wanted.keys() - aliases))
    lines = [f"{name}: missing ({words(wanted[name])})" for name in sorted(wanted.keys() - given.keys() - {*missing})]
    lines += [
        f"{name}: not in this model"
        for name in sorted(given.keys() - wanted.keys() - aliases)
        if name not in unexpected
    ]
    where = "by the map" if train.init_map else "stored"
    lines += [
        f"{name}: {words(given[name].shape)} {where}, {words(shape)} in this model"
        for name, shape in wanted.items()
        if name in given and given[name].shape != shape
    ]
    if lines:
        mapped = f"with {KEY}, " if train.init_map else ""
        raise ConfigError(f"{path}: {mapped}its tensors are not those of this model:{format_lines(lines)}")
    may_lack.check(f"{path} lacks")
    may_exceed.check(f"{path} holds beside the model")
    fill(weights, Plan({name: view for name, view in given.items() if name in weights}), source)
    return InitialWeights(tuple(missing), tuple(unexpected))


def _apply(found: object, views: Mapping[str, View]) -> dict[str, View]:
    """The tensors that a map gives, and those that it leaves as they are."""
    if not isinstance(found, StateMap):
        raise ConfigError(f"{KEY} names a {type(found).__name__}; expected a StateMap.")
    step = Step(views)
    Chain((found,)).apply(step)
    wrong = [*step.wrong, *(f"{name}: given, but there is one already" for name in step.left if name in step.given)]
    if wrong:
        raise ConfigError(f"{KEY}: the map does not fit the weights:{format_lines(wrong)}")
    return {**{name: views[name] for name in step.left}, **step.given}


def words(shape: tuple[int, ...]) -> str:
    """A shape in words: `4 × 8`."""
    return " × ".join(map(str, shape)) or "a single number"
