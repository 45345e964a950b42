"""Initial values of parameters, and the weights that a run starts from. Importing this module imports no torch."""

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


@dataclass(frozen=True, slots=True)
class InitialWeights:
    """The answer of `initial_weights`: the model is filled.

    Args:
        missing: weights of the model, of all pipeline stages, that keep their initial values.
        unexpected: stored tensors that were left out.
        source: the path that was read, if not the one in `train.init_from`, such as a run's newest checkpoint.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    source: str = ""
