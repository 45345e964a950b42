"""Extra models: composed with the first one, each by a job that has other values in some sections."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from forge_train.base.errors import ConfigError, nearest
from forge_train.config import Config
from forge_train.config.tree import Key, Origin, Value
from forge_train.config.validate import plain, validate
from forge_train.plugin.job import Hooks, Job
from forge_train.registry.setup import instance

from .contract import Extra, ExtraModel
from .hookspecs import extra_models

if TYPE_CHECKING:
    from forge_train.compose.compose import Composition

OWN = Origin("plugin", "its values")


def compose_extra(job: Job, composition: Composition) -> list[tuple[Job, Composition]]:
    """Compose the extra models that plugins ask for, and have them take part in the first one's steps.

    Args:
        job: of the first.
        composition: of the first.

    Raises:
        ConfigError: for what can't be composed.
    """
    return [(own, _composed(job, spec, own, composition)) for spec, own in _jobs(job)]


def _composed(job: Job, spec: ExtraModel, own: Job, composition: Composition) -> Composition:
    from forge_train.compose.compose import compose_one  # which imports torch

    if any(spec.name in dict(part.named_children()) for part in composition.model.parts):
        raise ConfigError(f"The extra model {spec.name!r} has the name of a module of the first; choose another.")
    for axis in job.dist.layout.dividing("layers"):
        raise ConfigError(f"The extra model {spec.name!r} runs whole in a step; set parallel.{axis} = 1.")
    with told_of(f"In {spec}"):
        made = compose_one(own, frozen=not spec.trained)
    job.extra[spec.name] = Extra(spec, made.model)
    composition.model.join(spec.name, made.model, trained=spec.trained)
    composition.report += [{**row, "model": spec.name} for row in made.report]
    return made


def _jobs(job: Job) -> Iterator[tuple[ExtraModel, Job]]:
    """A job for each extra model, whose hooks compose it.

    Raises:
        ConfigError: for a name that is taken, and for sections that are not valid.
    """
    taken: set[str] = set()
    for plugin, spec in ((name, one) for name, found in extra_models(job) for one in found):
        if not spec.name.isidentifier() or spec.name in taken:
            raise ConfigError(
                f"{job.hooks.whose('extra_models', plugin)}: {spec.name!r} is taken, or is no identifier."
            )
        taken.add(spec.name)
        with told_of(f"In {spec}"):
            yield spec, _job(job, spec)


def _job(job: Job, spec: ExtraModel) -> Job:
    """Observers and `without` are left out. The seed is the model's own: it does not start as the first does."""
    known = {**job.hooks.enabled, **spec.plugins}
    enabled = [one for name, one in sorted(known.items()) if not one.observer and name not in spec.without]
    for name in (*spec.sections, *spec.without):
        if name not in known:
            raise ConfigError(f"there is no plugin {name!r} in this run.{nearest(name, known)}")
    mistakes, sections = list[str](), dict[str, object]()
    for one in enabled:
        values = plain(job.config.sections[one.name]) if one.name in job.config.sections else {}
        values |= spec.sections.get(one.name, {})
        given: dict[Key, Value] = {(key,): Value(value, OWN) for key, value in values.items()}
        sections[one.name] = validate(one.name, one.cls.Config, given, mistakes)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    seed = int.from_bytes(hashlib.blake2b(f"{job.seed}/{spec.name}".encode(), digest_size=7).digest(), "little")
    run = dataclasses.replace(job.config.run, seed=seed)
    config: Config = dataclasses.replace(job.config, run=run, sections=sections, origins={})
    defaults = {slot: name for slot, name in job.hooks.defaults.items() if name in sections}
    hooks = Hooks(
        [(one, instance(one, sections[one.name])) for one in enabled], defaults, job.hooks.specs, job.hooks.inspection
    )
    hooks.at_stage = job.hooks.at_stage
    if problems := [one for one in hooks.check_config(config) if not one.data]:  # those of the run were checked
        raise ConfigError("\n".join(f"{problem.key}: {problem.message}" for problem in problems))
    hooks.bind(other := Job(config, hooks, job.run, job.dist, job.control, step=job.step))
    return other


@contextmanager
def told_of(what: str) -> Iterator[None]:
    """Mistakes in the block are told of this."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error
