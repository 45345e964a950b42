"""The weights that a run starts from: those of a checkpoint, or of a folder in Hugging Face layout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, ForgeError, describe
from ..base.failure import during
from ..checkpoint import checkpoint, hf_fit
from ..checkpoint.hf_folder import CONFIG, Folder, fill, is_hugging_face
from ..compose.initialise import tied_groups
from ..contract.model import Model
from ..contract.protocols import HFModel
from ..plugin.hooks import Hooks
from ..plugin.job import Job
from . import mapped
from .weights import Base, Patterns, load_weights

log = logging.getLogger("forge_train")


@dataclass(frozen=True)
class Initial:
    """Source of the initial weights, and how they fit the model."""

    path: str
    base: Base | None
    """None for a folder in Hugging Face layout, which can't lie beneath a checkpoint."""
    missing: tuple[str, ...]
    """They keep the values they start with."""
    unexpected: tuple[str, ...]


@during("load")
def load_initial(model: Model, job: Job) -> Initial | None:
    """Take the weights that `train.init_from` names, if it names any.

    A head that gives anything but token logits may be new: a language model's weights then start all but the head.

    Raises:
        ConfigError: if there are no weights there, or those of another model.
    """
    train = job.config.train
    if not train.init_from:
        return None
    if is_hugging_face(Path(train.init_from)):
        taken = _from_hugging_face(model, job, Path(train.init_from).absolute())
    elif train.init_map:
        _check_only(job)
        path = checkpoint.resolve(Path(train.init_from), job.dist)
        beside = tuple(f"{name}." for name in checkpoint.read_state(path).get("models", {}))
        missing, unexpected = mapped.from_checkpoint(model, job, path, beside)
        taken = Initial(str(path.absolute()), None, tuple(missing), tuple(unexpected))
    else:
        path = checkpoint.resolve(Path(train.init_from), job.dist)
        fit = load_weights(
            model, job, path, missing=train.init_missing, unexpected=train.init_unexpected, free=_head(job)
        )
        taken = Initial(str(path.absolute()), Base.of(path), fit.missing, fit.unexpected)
    for what, names in (("keep their initial values", taken.missing), ("were left out", taken.unexpected)):
        if names and job.dist.main:
            log.info("train.init_from: %d tensors %s: %s", len(names), what, ", ".join(names))
    return taken


def _from_hugging_face(model: Model, job: Job, path: Path) -> Initial:
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
        return Initial(str(path), None, *map(tuple, mapped.from_folder(model, job, folder, layout)))
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
    plan = hf_fit.plan(
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
    return Initial(str(path), None, tuple(missing), tuple(unexpected))


def described(folder: Folder, hooks: Hooks) -> HFModel | None:
    """Describe how a folder's model is built and named; None for an architecture that no plugin knows.

    Raises:
        ConfigError: naming the keys that have no counterpart, or another type.
    """
    try:
        return hooks.import_hf(folder.config)
    except ForgeError as error:
        raise ConfigError(f"{folder.path}: {error}") from error
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"{folder.path / CONFIG}: a value has the wrong type: {describe(error)}") from error


def _head(job: Job) -> tuple[str, ...]:
    """Patterns of parameters that a language model may lack, or have in addition to the model's."""
    spec = job.hooks.specs.get("head")
    return () if spec is None or job.hooks.gives("head") in ("", spec.gives) else ("head.*",)


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
    return () if job.hooks.provider("head") in layout.sections else _head(job)


def _check_only(job: Job) -> None:
    if job.config.checkpoint.only:
        raise ConfigError(
            "checkpoint.only needs a checkpoint that holds the other weights as they are, and train.init_map changes "
            "them. Start from a checkpoint that has this model's weights already, or save all weights."
        )


def _warn_of_differences(layout: HFModel, job: Job, path: Path) -> None:
    """Some values change what the weights compute, but no shape. A value that this run has from the folder is not one,
    even if an export with a new head would change it."""
    try:
        ours = job.hooks.export_hf()
    except ConfigError as error:  # a model that no file could describe may still begin with these weights
        log.warning("%s describes another model: %s", path / CONFIG, error)
        return
    again = job.hooks.import_hf(dict(ours.config)) if ours is not None else None
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
