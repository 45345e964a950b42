"""Checks that transforms implement what the configuration asks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..base.errors import ConfigError
from ..contract.transform import Transform
from ..plugin.job import Job


def needed(transforms: Sequence[tuple[str, Transform]]) -> list[tuple[str, Transform]]:
    """Without the fallbacks for what others cover."""
    covered = {axis for _, transform in transforms if not transform.fallback for axis in transform.covers}
    return [named for named in transforms if not (named[1].fallback and covered.issuperset(named[1].covers))]


def check_coverage(job: Job, transforms: Iterable[Transform]) -> None:
    """Check that transforms cover each parallel axis, and the precision if it is below fp32.

    Raises:
        ConfigError: if one is uncovered; names the installed plugins that would cover it.
    """
    covered = {axis for transform in transforms for axis in transform.covers}
    for axis, size in job.dist.layout.axes().items():
        if size > 1 and axis not in covered:
            raise ConfigError(
                f"parallel.{axis} is {size}, but no enabled plugin covers the axis {axis!r}.{_covering(job, axis)}"
            )
    precision = job.config.train.precision
    if precision != "fp32" and "precision" not in covered:
        raise ConfigError(
            f"train.precision is {precision!r}, but no enabled plugin covers 'precision'.{_covering(job, 'precision')}"
        )


def _covering(job: Job, axis: str) -> str:
    """The installed plugins that would cover it."""
    names = [name for name in job.hooks.covering(axis) if name not in job.hooks.enabled]
    return f" Installed plugins that do: {', '.join(names)}; enable one with --plugins." if names else ""
