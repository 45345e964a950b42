"""Starts a run from a folder in Hugging Face layout, or from weights that `train.init_map` changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from forge_train.base.errors import ConfigError, ForgeError, describe
from forge_train.checkpoint import checkpoint
from forge_train.compose.initialise import tied_groups
from forge_train.contract.model import Model
from forge_train.plugin.job import Hooks, Job

from .. import foreign, hookspecs
from ..contract import InitialWeights
from ..format import format_lines
from ..state_map import Step, View
from ..state_map.views import Stored
from ..stored import Patterns, new_head_patterns, places
from ..weights import fill, fill_views
from . import fit
from .folder import CONFIG, Folder, is_hugging_face
from .model import HFModel
from .ranges import Weights

log = logging.getLogger("forge_train")


def initial_weights(path: Path, model: Model, job: Job) -> InitialWeights | None:
    """Fill a model as `train.init_from` and `train.init_map` say; None for a checkpoint that is taken as it is.

    Raises:
        ConfigError: for weights of another model, and for a map that does not fit.
    """
    if is_hugging_face(path):
        return _from_folder(model, job, path.absolute())
    return _from_checkpoint(model, job, path) if job.config.train.init_map else None


def _from_checkpoint(model: Model, job: Job, path: Path) -> InitialWeights:
    if job.config.checkpoint.only:
        raise ConfigError(
            "checkpoint.only needs a checkpoint that holds the other weights as they are, and train.init_map changes "
            "them. Start from a checkpoint that has this model's weights already, or save all weights."
        )
    path = foreign.resolve(path, job.dist)
    beside = tuple(f"{name}." for name in checkpoint.read_state(path).get("models", {}))
    weights = Weights({name: at for name, at in places(path, job.dist).items() if not name.startswith(beside)})
    filled = fill_views(model, job, path, weights.views, weights)
    return InitialWeights(filled.missing, filled.unexpected, str(path.absolute()))


def _mapped(model: Model, job: Job, folder: Folder, layout: HFModel) -> InitialWeights:
    """Fill a model from a folder, as `train.init_map` says, which works on Forge's names."""
    stored = {name: one for name, one in folder.described().items() if not layout.is_leftover(name)}
    step = max((one.trace(stored) for one in (layout.map, *layout.others)), key=lambda one: len(one.taken))
    if step.wrong:
        raise ConfigError(f"{folder.path}: the tensors are not those of its model:{format_lines(step.wrong)}")
    left = {name: step.tensors[name] for name in step.left}
    return fill_views(model, job, folder.path, {**step.given, **left}, folder)


def _from_folder(model: Model, job: Job, path: Path) -> InitialWeights:
    """Each rank reads only what its shards are made of."""
    if job.config.checkpoint.only:
        raise ConfigError(
            f"checkpoint.only needs a checkpoint that holds the other weights, and {path} is in Hugging Face layout. "
            f"Make a checkpoint of it first: forge checkpoint import {path} NEW"
        )
    folder = Folder.open(path)
    layout = described(folder, job.hooks)
    if layout is None:
        raise ConfigError(f"{path / CONFIG}: no enabled plugin knows this model (import_hf); see --from {path}.")
    if job.config.train.init_map:
        return _mapped(model, job, folder, layout)
    if job.dist.main:
        _warn_of_differences(layout, job, path)
    weights = model.alone().state_dict()
    stages = job.dist.gather_stages({name: (tuple(one.shape), one.dtype) for name, one in weights.items()})
    ties = job.dist.gather_stages(tied_groups(*model.parts))
    head = new_head(job, layout)
    may_lack = Patterns("train.init_missing", job.config.train.init_missing, head)
    may_exceed = Patterns("train.init_unexpected", job.config.train.init_unexpected)
    unexpected = list[str]()
    whose, way_out = _described_by(job, path, layout)
    plan = fit.plan(
        folder,
        layout,
        {name: one for stage in stages for name, one in stage.items()},
        whose=whose,
        way_out=way_out,
        tied=[group for stage in ties for group in stage],
        missing=may_lack.take,
        unexpected=noting(may_exceed, unexpected),
        ignored=noting(Patterns("", (), head), unexpected),
    )
    may_lack.check(f"{path} lacks")
    may_exceed.check(f"{path} holds beside the model")
    fill(weights, plan, folder)
    missing = [name for stage in stages for name in stage if name not in plan.targets]
    return InitialWeights(tuple(missing), tuple(unexpected), str(path))


def described(folder: Folder, hooks: Hooks) -> HFModel | None:
    """Describe how a folder's model is built and named; None for an architecture that no plugin knows.

    Raises:
        ConfigError: naming the keys that have no counterpart, or another type.
    """
    try:
        return imported(folder.config, hooks, folder.beside)
    except ForgeError as error:
        raise ConfigError(f"{folder.path}: {error}") from error
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"{folder.path / CONFIG}: a value has the wrong type: {describe(error)}") from error


def imported(config: Mapping[str, Any], hooks: Hooks, beside: Mapping[str, Any] | None = None) -> HFModel | None:
    """Describe the model of a `config.json`, a language model or one with others around it; None if no plugin does."""
    around = hooks.only(hookspecs.import_hf_around, {"config": config, "beside": beside or {}})
    found = hooks.only(hookspecs.import_hf, {"config": config if around is None else around.config})
    if found is None:
        return None
    found = found if around is None else around.whole(found)
    further = {name: one for name, one in found.further.items() if name in hooks.enabled}
    return replace(found, sections={**found.sections, **further})


def exported(job: Job) -> HFModel | None:
    """Describe this job's model in Hugging Face layout; None if no plugin does."""
    inner = job.hooks.only(hookspecs.export_hf, {"job": job})
    if inner is None:
        return None
    return job.hooks.only(hookspecs.export_hf_around, {"layout": inner, "job": job}) or inner


def merged(job: Job, stored: Mapping[str, View]) -> Mapping[str, View]:
    """The weights of this job's model, with what plugins added to it merged into them (`merge_weights`).

    Raises:
        ConfigError: naming what can't be merged.
    """
    for name, one in job.hooks.call(hookspecs.merge_weights, {"job": job}):
        step = Step(stored)
        one.apply(step)
        if step.wrong:
            raise ConfigError(f"Plugin {name!r} can't merge its parameters into the weights:{format_lines(step.wrong)}")
        stored = {**{key: stored[key] for key in step.left}, **step.given}
    return stored


def same_modules(layout: HFModel, stored: Mapping[str, View]) -> dict[str, str]:
    """Module of the model → module in Hugging Face layout, for modules whose weight is the same tensor in both."""
    step = Step(stored)
    layout.map.inverse().apply(step)
    end = ".weight"
    return {
        view.name.removesuffix(end): name.removesuffix(end)
        for name, view in step.given.items()
        if isinstance(view, Stored) and view.name.endswith(end) and name.endswith(end)
    }


def _described_by(job: Job, path: Path, layout: HFModel) -> tuple[str, str]:
    """Return what describes this job's model, and what to do if the folder holds another one, for error messages."""
    file, origins = path / CONFIG, job.config.origins
    theirs = {key for key, origin in origins.items() if origin.where and Path(origin.where).absolute() == file}
    if ("train", "init_from") not in theirs:
        return "this run's configuration", f"Use --from {path} to train that model."
    changed = sorted(".".join(key) for key in origins.keys() - theirs if key[0] in layout.sections)
    if changed:
        return "this run's configuration", f"It changes {', '.join(changed)} of {CONFIG}."
    return CONFIG, ""


def new_head(job: Job, layout: HFModel) -> tuple[str, ...]:
    """Patterns of parameters that a folder's weights don't give, because the head of this run is another.

    Args:
        job: of the run.
        layout: how the folder's model is named; it has a section of the plugin that makes the folder's own head.
    """
    return () if job.hooks.provider("head") in layout.sections else new_head_patterns(job)


def _warn_of_differences(layout: HFModel, job: Job, path: Path) -> None:
    """Some values change what the weights compute, but no shape. A value that this run has from the folder is not one,
    even if an export with a new head would change it."""
    try:
        ours = exported(job)
    except ConfigError as error:  # a model that no file could describe may still begin with these weights
        log.warning("%s describes another model: %s", path / CONFIG, error)
        return
    again = imported(dict(ours.config), job.hooks) if ours is not None else None
    if again is not None:
        here, given = dict(_flat(again.sections, "")), dict(_flat(job.config.values(), ""))
        for key, there in _flat(layout.sections, ""):
            if key in here and there not in (here[key], given.get(key)):
                log.warning("%s: %s is %s there, and %s in this run", path / CONFIG, key, there, here[key])


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def noting(patterns: Patterns, into: list[str]) -> Callable[[Iterable[str]], list[str]]:
    """A choice of names, which are noted."""

    def choose(names: Iterable[str]) -> list[str]:
        into.extend(taken := patterns.take(names))
        return taken

    return choose
