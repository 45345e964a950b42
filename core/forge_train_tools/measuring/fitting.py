"""Latency and bandwidth, fitted to the times of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge_train.base.errors import ConfigError

from ..planning.clusters import Rate, steps
from ..planning.communication import Collective

SHORTEST = 1e-9
"""Latency in seconds that stands for one too short to be told from zero."""


@dataclass(frozen=True)
class Sample:
    """The time that a collective took."""

    kind: str
    ranks: int
    held: int
    """Bytes of what goes in, or of what comes out, whichever is more."""
    seconds: float

    @property
    def sent(self) -> float:
        """Bytes that a rank sends, as a plan counts them."""
        return Collective(self.kind, "", self.ranks, self.held).sent

    @property
    def steps(self) -> int:
        return steps(self.kind, self.ranks)


def fit(samples: Sequence[Sample]) -> Rate:
    """The rate with the least sum of squared relative errors of `seconds = sent / bandwidth + steps × latency`.

    Raises:
        ConfigError: for samples of one size, which can't tell the two apart.
    """
    if len({(one.sent, one.steps) for one in samples}) < 2:
        raise ConfigError("A fit of latency and bandwidth needs messages of two sizes or more.")
    rows = [(one.sent / one.seconds, one.steps / one.seconds) for one in samples]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    per_byte, latency = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if per_byte <= 0:  # the largest message is still all latency
        return Rate(max(one.sent / one.seconds for one in samples), b / bb)
    return Rate(1 / per_byte, latency) if latency >= SHORTEST else Rate(aa / a, SHORTEST)


def worst(samples: Sequence[Sample], rate: Rate) -> float:
    """The largest relative error of a rate."""
    return max(abs(rate.seconds(one.sent, one.steps) / one.seconds - 1) for one in samples)
