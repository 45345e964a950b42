"""The weights that a run starts from: a checkpoint's, or those of another format."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import ConfigError
from ..base.failure import during
from ..checkpoint import checkpoint
from ..contract.model import Model
from ..plugin.job import Job
from ..registry.setup import Fill
from .run import is_checkpoint, is_run
from .weights import Base, load_weights, new_head_patterns

log = logging.getLogger("forge_train")


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
def load_initial(model: Model, job: Job, fill: Fill) -> Initial | None:
    """Take the weights that `train.init_from` names, if it names any.

    A head that gives anything but token logits may be new: a language model's weights then start all but the head.

    Args:
        model: the model to fill.
        job: its job.
        fill: fills it with weights that are no checkpoint's, or changed.

    Raises:
        ConfigError: if there are no weights there, or those of another model.
    """
    if not job.config.train.init_from:
        return None
    path = Path(job.config.train.init_from)
    taken = _filled(model, job, path, fill) or _from_checkpoint(model, job, path)
    for what, names in (("keep their initial values", taken.missing), ("were left out", taken.unexpected)):
        if names and job.dist.main:
            log.info("train.init_from: %d tensors %s: %s", len(names), what, ", ".join(names))
    return taken


def _filled(model: Model, job: Job, path: Path, fill: Fill) -> Initial | None:
    """Weights in another format than Forge's, or changed by `train.init_map`; None for a checkpoint as it is."""
    changed = job.config.train.init_map
    if not changed and (is_run(path) or is_checkpoint(path)):
        return None
    found = fill(path, model, job)
    if found is None:
        if changed:
            raise ConfigError("train.init_map: no enabled plugin changes weights (initial_weights).")
        return None
    if job.config.checkpoint.only:
        raise ConfigError(f"checkpoint.only needs a checkpoint that holds the other weights, and {path} is none.")
    return Initial(found.source or str(path.absolute()), None, found.missing, found.unexpected)


def _from_checkpoint(model: Model, job: Job, path: Path) -> Initial:
    path = checkpoint.resolve(path, job.dist)
    train = job.config.train
    fit = load_weights(
        model, job, path, missing=train.init_missing, unexpected=train.init_unexpected, free=new_head_patterns(job)
    )
    return Initial(str(path.absolute()), Base.of(path), fit.missing, fit.unexpected)
