"""The weights that a run begins with, and those that its checkpoints hold."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from forge_train.base.errors import ConfigError, during
from forge_train.checkpoint import checkpoint
from forge_train.contract.model import Model
from forge_train.loop import weights
from forge_train.loop.resume import stateful
from forge_train.plugin.job import Job
from forge_train.run.run import is_checkpoint, is_run
from forge_train.store.tree import split

from .contract import EvaluatedWeights, InitialWeights
from .extra import told_of
from .foreign import resolve
from .hookspecs import initial_weights
from .stored import (
    Base,
    Patterns,
    base_beneath,
    check_evaluation,
    evaluated_weights,
    load_weights,
    new_head_patterns,
    places,
    read,
    same,
    weights_digest,
)

log = logging.getLogger("forge_train")


class Weights(weights.Weights):
    """Weights that `train.init_from` and extra models name, and those beneath checkpoints of `checkpoint.only`."""

    unknown = ""

    def __init__(self, job: Job, *, whole: bool = False) -> None:
        """
        Args:
            job: the run.
            whole: whether its checkpoints hold all weights, whatever `checkpoint.only` says.
        """
        super().__init__(job)
        self._whole = whole
        self._base: Base | None = None

    def start_extra(self, found: Path | None) -> None:
        load_extra(self._job, found)

    def start(self, model: Model) -> Mapping[str, Any] | None:
        if (taken := load_initial(model, self._job)) is None:
            return None
        self._base = taken.base
        return {"checkpoint": taken.path, "missing": [*taken.missing], "unexpected": [*taken.unexpected]}

    def check(self, model: Model) -> None:
        check_kept(model, self._job, self._base)

        _ = self._evaluated  # what can't be is told before the first step

    @cached_property
    def _evaluated(self) -> tuple[str, EvaluatedWeights] | None:
        return evaluated_weights(self._job)

    def check_state(self, model: Model, optimizer: Mapping[str, Tensor]) -> None:
        if self._evaluated:
            (name, declared), held = self._evaluated, dict(optimizer)
            split({name: plugin.state_dict() for name, plugin in stateful(self._job)}, "plugins", held)
            split(model.state_dict(), "model", held)
            check_evaluation(declared.terms, held, self._job.hooks.whose("around", name))

    def saved(self, model: Model) -> dict[str, Any]:
        base = self._base if self._job.config.checkpoint.only and not self._whole else None
        held = kept(model, self._job) if base else model.state_dict()
        terms = dict(self._evaluated[1].terms) if self._evaluated else {}
        return {"model": held, "base": dataclasses.asdict(base) if base else None, "evaluation": terms}

    def places(self, path: Path) -> dict[str, Path]:
        self._base = base_beneath(path, self._job.dist, self._job.config.train.init_from)
        return places(path, self._job.dist, self._base)

    def read(self, weights: Mapping[str, Tensor], fit: weights.Fit, *, but: Path) -> None:
        read(weights, fit, self._job.dist, but=but)


@dataclass(frozen=True)
class Initial:
    """Source of the initial weights, and how they fit the model."""

    path: str
    base: Base | None
    """None for weights that are not a checkpoint's own, and so can't lie beneath one."""
    missing: tuple[str, ...]
    """They keep the values they start with."""
    unexpected: tuple[str, ...]


@during("load")
def load_initial(model: Model, job: Job) -> Initial | None:
    """Take the weights that `train.init_from` names, if it names any.

    A head that gives anything but token logits may be new: a language model's weights then start all but the head.

    Args:
        model: the model to fill.
        job: its job.

    Raises:
        ConfigError: if there are no weights there, or those of another model.
    """
    if not job.config.train.init_from:
        return None
    path = Path(job.config.train.init_from)
    taken = _filled(model, job, path) or _from_checkpoint(model, job, resolve(path, job.dist))
    for what, names in (("keep their initial values", taken.missing), ("were left out", taken.unexpected)):
        if names and job.dist.main:
            log.info("train.init_from: %d tensors %s: %s", len(names), what, ", ".join(names))
    return taken


def _filled(model: Model, job: Job, path: Path) -> Initial | None:
    """Weights in another format than Forge's, or changed by `train.init_map`; None for a checkpoint as it is."""
    changed = job.config.train.init_map
    if not changed and (is_run(path) or is_checkpoint(path)):
        return None
    found = cast("InitialWeights | None", initial_weights(path, model, job))  # of a chain that is optional
    if found is None:
        if changed:
            raise ConfigError("train.init_map: no enabled plugin changes weights (initial_weights).")
        return None
    if job.config.checkpoint.only:
        raise ConfigError(f"checkpoint.only needs a checkpoint that holds the other weights, and {path} is none.")
    return Initial(found.source or str(path.absolute()), None, found.missing, found.unexpected)


def _from_checkpoint(model: Model, job: Job, path: Path) -> Initial:
    train = job.config.train
    fit = load_weights(
        model,
        job,
        path,
        missing=train.init_missing,
        unexpected=train.init_unexpected,
        free=new_head_patterns(job),
        starts=True,
    )
    return Initial(str(path.absolute()), Base.of(path), fit.missing, fit.unexpected)


@during("load")
def load_extra(job: Job, found: Path | None = None) -> None:
    """Give extra models the weights that they name; a trained one only where the run begins.

    Args:
        job: whose extra models are composed.
        found: the checkpoint that the run continues from.

    Raises:
        ConfigError: if they are of another model, or are not those that the run began with.
    """
    before = checkpoint.read_state(found).get("models", {}) if found else {}
    for name, extra in job.extra.items():
        saved = before.get(name, {"path": "", "digest": "", "trained": extra.spec.trained})
        if found and extra.spec.trained:
            extra.path, extra.digest = saved["path"], saved["digest"]
            continue
        if extra.spec.weights:
            with told_of(f"The weights of {extra.spec}"):
                path = resolve(Path(same(extra.spec.weights, saved["path"])), job.dist)
                load_weights(extra.model, job, path)
            extra.path, extra.digest = str(path.absolute()), weights_digest(path)
        if name in before and extra.digest != saved["digest"]:
            raise ConfigError(
                f"{found}: the model {name!r} had the weights of {saved['path'] or 'no checkpoint'}; "
                f"{extra.path or 'no checkpoint'} gives others."
            )


# -- checkpoints that hold a part -------------------------------------------------------------------------------------


def kept(model: Model, job: Job) -> dict[str, Tensor]:
    """The weights that go into this rank's checkpoints: buffers, and the parameters that `checkpoint.only` names."""
    weights, only = model.state_dict(), job.config.checkpoint.only
    parameters = {name for name, _ in model.named_parameters()}
    chosen = {*Patterns("checkpoint.only", only).take(parameters)} if only else parameters
    return {name: tensor for name, tensor in weights.items() if name not in parameters or name in chosen}


def check_kept(model: Model, job: Job, base: Base | None) -> None:
    """Check that a run can resume from the checkpoints that `checkpoint.only` leaves.

    Raises:
        ConfigError: for a pattern that matches nothing, and for parameters that would be lost.
    """
    if not (only := job.config.checkpoint.only):
        return
    if base is None:
        raise ConfigError(
            "checkpoint.only: this run continues from checkpoints that hold all weights; start a new run."
        )
    stages = job.dist.gather_stages([(name, one.requires_grad) for name, one in model.named_parameters()])
    patterns = Patterns("checkpoint.only", only)
    chosen = {*patterns.take(name for stage in stages for name, _ in stage)}
    patterns.check("is a parameter of this model")
    if lost := sorted({name for stage in stages for name, trained in stage if trained} - chosen):
        raise ConfigError(
            f"checkpoint.only leaves out {lost[0]!r}{f' and {len(lost) - 1} more' if lost[1:] else ''}, which this run "
            "trains: it would be lost. Add a pattern for it, or freeze it."
        )
    beneath = places(Path(base.path), job.dist)
    if lost := sorted({name for stage in stages for name, _ in stage} - chosen - beneath.keys()):
        raise ConfigError(
            f"checkpoint.only leaves out {lost[0]!r}, and {base.path} does not hold it either. Add a pattern for it."
        )
