"""The mesh axes that distributions add, read from metadata; a run imports those that its configuration names."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from forge_train.base.errors import ConfigError, describe
from forge_train.base.names import import_module, split
from forge_train.config.schema import Gt, section
from forge_train.config.sections import ParallelSection
from forge_train.config.tree import DEFAULT
from forge_train.mesh.axes import AXES, CONFIGURED, Axis
from forge_train.registry.discovery import entry_points, identity

if TYPE_CHECKING:
    from forge_train.plugin.job import Job

log = logging.getLogger("forge_train")

GROUP = "forge_train.axes"


def section_of(names: Collection[str]) -> type[ParallelSection]:
    """Return the section `[parallel]` with those axes of other packages that the configuration names.

    Raises:
        ConfigError: for one that can't be used.
    """
    if not (wanted := {*names} - {*CONFIGURED}):
        return ParallelSection
    points = entry_points(GROUP)
    axes = tuple(_load_axis([*points.select(name=name)]) for name in sorted(wanted & points.names))
    return parallel_section(axes, () if wanted <= points.names else tuple(sorted(points.names)))


@cache
def parallel_section(axes: tuple[Axis, ...], suggested: tuple[str, ...] = ()) -> type[ParallelSection]:
    """The section with axes of other packages, each a key."""
    if not axes and not suggested:
        return ParallelSection
    keys = {axis.name: Annotated[int, Gt(0)] for axis in axes}
    body: dict[str, Any] = {"__annotations__": keys, **dict.fromkeys(keys, 1), "__doc__": ParallelSection.__doc__}
    body["__reduce__"] = _reduce  # pickle finds no class that was made at run time
    made: type[ParallelSection] = section(type("ParallelSection", (ParallelSection,), body))
    made.__axes__, made.__suggested__ = axes, suggested
    made.__field_docs__ = {axis.name: axis.meaning for axis in axes}
    return made


def _reduce(sizes: ParallelSection) -> tuple[Any, ...]:
    return _parallel, (sizes.__axes__, dataclasses.asdict(sizes))


def _parallel(axes: tuple[Axis, ...], sizes: Mapping[str, int]) -> ParallelSection:
    return parallel_section(axes)(**sizes)


def of_distribution(name: str) -> tuple[Axis, ...]:
    """Return the axes that a distribution adds."""
    points = entry_points(GROUP)
    names = {point.name for point in points if identity(point.dist)[0] == name}
    return tuple(_load_axis([*points.select(name=one)]) for one in sorted(names))


def installed() -> set[str]:
    """Return the names of the axes that other packages add."""
    return entry_points(GROUP).names


def _load_axis(points: list[importlib.metadata.EntryPoint]) -> Axis:
    point = points[0]
    owners = [" ".join(identity(one.dist)).strip() for one in points]
    if len(points) > 1:
        raise ConfigError(f"The axis {point.name!r} is declared by {' and by '.join(sorted(owners))}: uninstall one.")
    where = f"Axis {point.name!r} of {owners[0]} ({point.value})"
    try:
        axis = getattr(import_module(point.value), split(point.value)[1])
    except (Exception, SystemExit) as error:  # whatever a stranger's module does while it is imported
        raise ConfigError(f"{where} failed to import: {describe(error)}.") from error
    if not isinstance(axis, Axis):
        raise ConfigError(f"{where} must be a forge_train.Axis, found {type(axis).__name__}.")
    if axis.name != point.name:
        raise ConfigError(f"{where} is named {axis.name!r}; its entry point must have the same name.")
    if axis.name in AXES or not axis.name.isidentifier():
        raise ConfigError(f"{where} must be a Python identifier, and no axis of Forge's; rename it.")
    if axis.splits_data and not axis.averages:
        raise ConfigError(f"{where} splits data, so gradients must be averaged along it: add averages=True.")
    if axis.domains or axis.divides or not axis.configured:
        raise ConfigError(f"{where} sets `domains`, `divides` or `configured`, which are for Forge's axes; omit them.")
    return axis


def tell_idle(job: Job, idle: Iterable[str]) -> None:
    """Warn of plugins of an axis that nobody made larger than 1."""
    axes = {*CONFIGURED, *installed()}
    for name in idle:
        for axis in sorted(axes.intersection(job.hooks.enabled[name].cls.provides)):
            if job.config.origin(("parallel", axis)) is DEFAULT:
                key = f"parallel.{axis}"
                log.warning("Plugin %r does nothing here: %s is 1; set it, as in -s %s=2.", name, key, key)
