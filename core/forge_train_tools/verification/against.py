"""Another setting judged by the configuration, both on one process."""

from __future__ import annotations

import itertools
from dataclasses import replace

from forge_train.base.format import format_list

from .diagnose import BEFORE, of_choices
from .later import GRADIENT, LOSS
from .numbers import errors, relative, together
from .ranks import choices_apart, data_apart, different, up_to
from .recording import Recording
from .routing import TIE
from .verdict import Check, Verdict

NARROW_GRADIENT, NARROW_LOSS = 5e-2, 1e-2
"""Tolerances of 8 bits of mantissa against 24: for all gradients together, and for the loss."""
ROUNDED_GRADIENT = 2e-1
"""The same of all gradients where products are of 3 bits of mantissa."""


def compare_settings(one: Recording, other: Recording, assignment: str, *, rounded: float = 0.0) -> Verdict:
    """Judge another setting by the reference, both on one process.

    Args:
        one: the reference.
        other: the same with another setting.
        assignment: that setting, in words.
        rounded: how coarsely plugins of the reference alone round below its precision, relative.
    """
    verdict = _judged_settings(one, other, assignment, rounded)
    parted = choices_apart(one, other, max(TIE, rounded))
    if verdict.agree or BEFORE & verdict.failed or parted is None or not parted.tie:
        return verdict
    verdict = _judged_settings(one, other, assignment, rounded, until=parted.step - 1)
    return replace(verdict, routing_difference=parted, advice=(of_choices(parted),))


def _judged_settings(
    one: Recording, other: Recording, assignment: str, rounded: float, until: int | None = None
) -> Verdict:
    narrow = one.narrow or other.narrow
    loss, loss_at = relative(one.first.losses[:until], other.first.losses[:until])
    gradients = errors(one.gradients, other.gradients)
    whole = together(one.gradients, other.gradients)
    data, data_at = data_apart(one.first, other.ranks)
    start = different(one.first.start, other.first.start)
    allowed = ROUNDED_GRADIENT if rounded else NARROW_GRADIENT if narrow else GRADIENT
    checks = (
        Check("initial weights", len(start), 0, "parameters that start differently", format_list(start)),
        Check("data", data, 0, "steps whose sequences are others", data_at),
    )
    steps = (
        Check("loss", loss, NARROW_LOSS if narrow or rounded else LOSS, up_to(until), loss_at),
        Check("gradients", whole, allowed, "relative (Frobenius), of all at step 1"),
    )
    worst = tuple(gradients[:10]) if until != 0 and whole > allowed else ()
    return Verdict(
        title=f"{assignment}{', unrounded,' * bool(rounded)} against the configuration, on one process",
        sides=("configuration", assignment),
        checks=checks if until == 0 else checks + steps,
        losses=tuple(itertools.zip_longest(one.first.losses, other.first.losses, fillvalue=float("nan"))),
        offenders=worst,
    )
