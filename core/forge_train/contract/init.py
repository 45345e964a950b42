"""Initial values of parameters. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Init:
    """Initial values of a parameter.

    Args:
        kind: `normal` (mean 0), `uniform` (mean 0), `ones`, `zeros`, or `given`.
        std: standard deviation of the first two kinds.
        values: for `given`: maps the run's seed to the full tensor on the CPU, the same on every rank.
    """

    kind: Literal["normal", "uniform", "ones", "zeros", "given"]
    std: float = 0.02
    values: Callable[[int], Tensor] | None = None
