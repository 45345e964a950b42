"""Initial weights through a state map, for a model with other layers, experts or token ids than the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..base.errors import ConfigError
from ..checkpoint.hf_folder import Folder, fill, indented
from ..checkpoint.ranges import Weights
from ..compose.initialise import tied_groups
from ..contract.model import Model
from ..contract.protocols import HFModel
from ..plugin.job import Job
from ..state_map import Chain, Plan, StateMap, Step, View
from ..state_map.named import named
from .weights import Patterns, places

KEY = "train.init_map"


def from_folder(model: Model, job: Job, folder: Folder, layout: HFModel) -> tuple[list[str], list[str]]:
    """Fill a model from a folder in Hugging Face layout, as `train.init_map` says; see `_take`."""
    stored = {name: one for name, one in folder.described().items() if not layout.is_leftover(name)}
    step = max((one.trace(stored) for one in (layout.map, *layout.others)), key=lambda one: len(one.taken))
    if step.wrong:
        raise ConfigError(f"{folder.path}: the tensors are not those of its model:{indented(step.wrong)}")
    left = {name: step.tensors[name] for name in step.left}
    return _take(model, job, folder.path, folder, {**step.given, **left})


def from_checkpoint(model: Model, job: Job, path: Path, beside: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Fill a model from a checkpoint, as `train.init_map` says; see `_take`.

    Args:
        model: which gets the weights.
        job: whose processes read.
        path: the checkpoint.
        beside: what the names of its other models begin with.
    """
    weights = Weights({n: at for n, at in places(path, job.dist).items() if not n.startswith(beside)})
    return _take(model, job, path, weights, weights.views)


def _take(
    model: Model, job: Job, path: Path, source: Folder | Weights, views: Mapping[str, View]
) -> tuple[list[str], list[str]]:
    """Fill weights in place; each rank reads what its shards are made of.

    Returns:
        Weights that keep their initial values, and tensors that are left out, as the patterns of `train.init_missing`
        and `train.init_unexpected` allow.

    Raises:
        ConfigError: naming every tensor that does not fit, and for a pattern that fits nothing.
    """
    train = job.config.train
    given = _apply(named(train.init_map, KEY), views)
    weights = model.alone().state_dict()
    stages = job.dist.gather_stages({name: tuple(one.shape) for name, one in weights.items()})
    wanted = {name: shape for stage in stages for name, shape in stage.items()}
    ties = [group for stage in job.dist.gather_stages(tied_groups(*model.parts)) for group in stage]
    aliases = {name for group in ties for name in group if name not in wanted}
    may_lack = Patterns("train.init_missing", train.init_missing)
    may_exceed = Patterns("train.init_unexpected", train.init_unexpected)
    missing = may_lack.take(sorted(wanted.keys() - given.keys()))
    unexpected = may_exceed.take(sorted(given.keys() - wanted.keys() - aliases))
    lines = [f"{name}: missing ({_words(wanted[name])})" for name in sorted(wanted.keys() - given.keys())]
    lines = [line for line in lines if line.partition(":")[0] not in missing]
    lines += [
        f"{name}: not in this model"
        for name in sorted(given.keys() - wanted.keys() - aliases)
        if name not in unexpected
    ]
    lines += [
        f"{name}: {_words(given[name].shape)} by the map, {_words(shape)} in this model"
        for name, shape in wanted.items()
        if name in given and given[name].shape != shape
    ]
    if lines:
        raise ConfigError(f"{path}: with {KEY}, its tensors are not those of this model:{indented(lines)}")
    may_lack.check(f"{path} lacks")
    may_exceed.check(f"{path} holds beside the model")
    fill(weights, Plan({name: view for name, view in given.items() if name in weights}), source)
    return missing, unexpected


def _apply(found: object, views: Mapping[str, View]) -> dict[str, View]:
    """The tensors that a map gives, and those that it leaves as they are."""
    if not isinstance(found, StateMap):
        raise ConfigError(f"{KEY} names a {type(found).__name__}; expected a StateMap.")
    step = Step(views)
    Chain((found,)).apply(step)
    wrong = [*step.wrong, *(f"{name}: given, but there is one already" for name in step.left if name in step.given)]
    if wrong:
        raise ConfigError(f"{KEY}: the map does not fit the weights:{indented(wrong)}")
    return {**{name: views[name] for name in step.left}, **step.given}


def _words(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "a single number"
