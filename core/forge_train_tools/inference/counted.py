"""A count of the records that a command has written."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .asked import Inferred
from .lines import Found


class Counted:
    """Counts records, their tokens, and what is worth telling of them."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._tokens = self._not_finite = self._cut = 0

    def add(self, found: Sequence[tuple[dict[str, Any], Found]]) -> list[dict[str, Any]]:
        """Count some records; gives their lines."""
        for line, one in found:
            self._tokens += one.tokens
            self._cut += bool(one.cut)
            self._not_finite += not _finite(line)
        return [line for line, _ in found]

    @property
    def speed(self) -> float:
        """Tokens in a second."""
        return self._tokens / max(time.monotonic() - self._began, 1e-9)

    def result(self, found: Inferred) -> Inferred:
        """The results with these counts."""
        seconds = time.monotonic() - self._began
        return replace(found, tokens=self._tokens, seconds=seconds, not_finite=self._not_finite, cut=self._cut)


def _finite(value: Any) -> bool:
    """True if every number in it is finite."""
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, list):
        return all(map(_finite, value))
    if isinstance(value, np.ndarray):
        return bool(np.isfinite(value).all())
    return not isinstance(value, float) or math.isfinite(value)
