"""A run put together: from its job to a stepper that can begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..base.errors import ConfigError, during
from ..checkpoint import state
from ..compose.compose import Composition, compose
from ..contract.model import Model
from ..mesh.distributed import DistributedContext
from ..mesh.layout import Layout
from ..mesh.world import World
from ..plugin import hookspecs
from ..plugin.job import Job
from ..registry.setup import Setup
from ..step.step import Stepper, Watcher
from .describe import plugin_list


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
