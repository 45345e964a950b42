"""A run put together: from its job to a stepper that can begin."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ..base.errors import ConfigError, during
from ..checkpoint import checkpoint, state
from ..compose.compose import Composition, compose
from ..contract.model import Model
from ..mesh.distributed import DistributedContext
from ..mesh.layout import Layout
from ..mesh.world import World
from ..plugin import hookspecs
from ..plugin.job import Job
from ..registry.setup import Fill, Setup
from ..run.run import Run, is_checkpoint, is_run
from ..step.step import Stepper, Watcher
from .describe import plugin_list
from .weights import Base, load_weights, new_head_patterns


@contextmanager
def joined(setup: Setup) -> Iterator[DistributedContext]:
    """The processes of a run, which have the same configuration and plugins.

    Raises:
        ConfigError: naming what some of them have otherwise.
    """
    config = setup.config
    layout = Layout.of(config.parallel, World.here().size)
    with DistributedContext.join(layout, config.run.device, timeout=config.run.start_timeout, meet=setup.meet) as dist:
        dist.agree({**config.values(), **{f"plugin {entry['name']}": entry for entry in plugin_list(setup.hooks)}})
        yield dist


@contextmanager
def prepared(setup: Setup, run: Run) -> Iterator[Job]:
    """A job on the processes of a run, prepared: for whoever does not train."""
    with joined(setup) as dist:
        job = Job.of(setup.config, setup.hooks, run, dist)
        prepare_process(job)
        yield job


def prepare_process(job: Job) -> None:
    """Seed this process, and make it deterministic if asked.

    Raises:
        ConfigError: if a plugin does not run on the device.
    """
    for name, enabled in job.hooks.enabled.items():
        if enabled.cls.devices and job.device.type not in enabled.cls.devices:
            only = ", ".join(enabled.cls.devices)
            raise ConfigError(f"Plugin {name!r} runs on {only} only; this run's device is {job.device.type}.")
    state.seed_everything(job.seed, job.dist.rank)
    if job.config.run.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def assemble(
    job: Job, watcher: Watcher | None = None, allocate: Callable[[Composition, Job], None] = Composition.allocate
) -> Stepper:
    """Compose the model, give it memory and initial weights, and make all that a step needs.

    Args:
        job: the run, on a prepared process.
        watcher: who looks at it from inside.
        allocate: gives the composed model its memory.
    """
    composition = compose(job, allocate=False)
    allocate(composition, job)
    return build_stepper(job, composition.model, watcher)


@during("build")
def build_stepper(job: Job, model: Model, watcher: Watcher | None = None) -> Stepper:
    """Optimizer, schedule and data for a composed model, and a stepper over them."""
    watcher = watcher or Watcher()
    optimizer = hookspecs.optimizer(model, job)
    schedule = job.hooks.lr_schedule(optimizer)
    stepper = Stepper(job, model, optimizer, schedule, watcher.data(job, "train"), watcher)
    if job.config.train.evaluate_every:
        stepper.held_out = watcher.data(job, "validation")
    watcher.on_assembled(stepper)
    return stepper


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
def load_initial(model: Model, job: Job, fill: Fill, locate: checkpoint.Locate = checkpoint.resolve) -> Initial | None:
    """Take the weights that `train.init_from` names, if it names any.

    A head that gives anything but token logits may be new: a language model's weights then start all but the head.

    Args:
        model: the model to fill.
        job: its job.
        fill: fills it with weights that are no checkpoint's, or changed.
        locate: gives the checkpoint that a path means.

    Raises:
        ConfigError: if there are no weights there, or those of another model.
    """
    if not job.config.train.init_from:
        return None
    path = Path(job.config.train.init_from)
    taken = _filled(model, job, path, fill) or _from_checkpoint(model, job, locate(path, job.dist))
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
    train = job.config.train
    fit = load_weights(
        model, job, path, missing=train.init_missing, unexpected=train.init_unexpected, free=new_head_patterns(job)
    )
    return Initial(str(path.absolute()), Base.of(path), fit.missing, fit.unexpected)
