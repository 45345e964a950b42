"""Checks that a model can be made, and that transforms implement what the configuration asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

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


@contextmanager
def addressable(sections: Mapping[str, Any]) -> Iterator[None]:
    """Refuse a tensor whose size in bytes no integer of torch can hold, and name the largest value that may cause it.

    Raises:
        ConfigError: for such a tensor made in the block.
    """
    try:
        yield
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        values = [(value, key) for name, one in sections.items() for key, value in _integers(name, one)]
        value, key = max(values, default=(0, ""))
        cause = f"{key}: {value:,} is too large" if key else "A size of the model is too large"
        raise ConfigError(
            f"{cause}: a tensor of the model would have more bytes than a machine can address "
            f"({str(error).splitlines()[0]}). Set a smaller one."
        ) from None


def _integers(name: str, section: Any) -> Iterator[tuple[str, int]]:
    if dataclasses.is_dataclass(section):
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if isinstance(value, int) and not isinstance(value, bool):
                yield f"{name}.{field.name}", value
