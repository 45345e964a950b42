"""Verdict of a comparison."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .routing import RoutingDifference


@dataclass(frozen=True)
class Check:
    """One thing that must be the same."""

    name: str
    worst: float
    """The largest difference, as `says` explains; a count where equality is exact."""
    tolerance: float
    says: str
    where: str = ""
    """Place of the largest difference, if there is one."""

    @property
    def ok(self) -> bool:
        return self.worst <= self.tolerance


@dataclass(frozen=True)
class Offender:
    """A tensor that is not what it should be: a gradient, a change of weights, a part of the optimizer's state."""

    name: str
    error: float
    """‖x − r‖ / ‖r‖, where r is the reference's."""
    ratio: float
    """⟨x, r⟩ / ⟨r, r⟩."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Verdict:
    """Verdict of a comparison."""

    title: str
    sides: tuple[str, str]
    """Names of the reference and the other side."""
    checks: tuple[Check, ...]
    losses: tuple[tuple[float, float], ...]
    """Of each step, reference first."""
    offenders: tuple[Offender, ...] = ()
    """Gradients of the first step beyond the tolerance, the worst first."""
    later: tuple[Offender, ...] = ()
    """The same of the later step in which they differ most."""
    updates: tuple[Offender, ...] = ()
    """Changes of weights, and states of the optimizer, that its gradients do not explain, the worst first."""
    advice: tuple[str, ...] = ()
    """Suggestions from the pattern of differences."""
    routing_difference: RoutingDifference | None = None
    """The first choices that fell otherwise, where that is more than the other checks allow for."""

    @property
    def failed(self) -> set[str]:
        """Names of the checks that are not ok."""
        return {check.name for check in self.checks if not check.ok}

    @property
    def agree(self) -> bool:
        return not self.failed and self.routing_difference is None

    @property
    def undecided(self) -> bool:
        """True if everything comparable is right, and a tie kept the rest from being compared."""
        return not self.failed and self.routing_difference is not None

    def as_json(self) -> dict[str, Any]:
        return {
            "agree": self.agree,
            "undecided": self.undecided,
            "checks": [
                {"name": c.name, "worst": c.worst, "tolerance": c.tolerance, "ok": c.ok, "where": c.where}
                for c in self.checks
            ],
            "losses": [list(pair) for pair in self.losses],
            "gradients": [dataclasses.asdict(offender) for offender in self.offenders],
            "later_gradients": [dataclasses.asdict(offender) for offender in self.later],
            "updates": [dataclasses.asdict(offender) for offender in self.updates],
            "parting": self.routing_difference and self.routing_difference.as_json(),
            "advice": list(self.advice),
        }
