"""Sizes of a model that no machine can hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..base.errors import ConfigError


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
