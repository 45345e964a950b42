"""Checks of what one process found on a layout's path: later gradients, the optimizer, an evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from .follow import Followed, FollowedStep
from .numbers import finite, relative, typical
from .ranks import side_effects, without_overflows
from .recording import Record, Recording
from .routing import routing_difference
from .updates import UPDATE, WEIGHT, Moved
from .verdict import Check, Offender

LOSS = 1e-5
"""Relative, in fp32: what another order of summation gives."""
NORM = 1e-5
GRADIENT = 1e-4
"""Relative error of each parameter's gradient in the Frobenius norm. One that vanishes beside all others (1e-4 of their
norm) is measured against that."""
SHARE = 1 / 10
"""Of a narrow precision's own gap to fp32: how far from one process a layout's gradients may be that computes every
token as one process does."""
SHARE_IN_PARTS = 1 / 4
"""The same where a sum over features or a sequence is rounded in parts: how much further from fp32 they may be."""
METRIC = 1e-3
"""Of a plugin's metric: a largest value, or a share of a few, moves more by rounding than a mean does."""
LUCK = 3
"""Losses and norms are single numbers: one draw of rounding errors may move them so many times as far as another."""


def update_checks(followed: Followed) -> tuple[Check, ...]:
    """Of the weights and of the optimizer's state, given the layout's gradients."""
    weights = [one for one in followed.updates if one.part == WEIGHT]
    states = [one for one in followed.updates if one.part != WEIGHT]
    says = "relative (Frobenius), given the layout's gradients"
    return (_update("updates", weights, f"{says}: how far a weight moved"),) + (
        (_update("optimizer", states, f"{says}: a state of the optimizer"),) if states else ()
    )


def _update(name: str, found: Sequence[Moved], says: str) -> Check:
    worst = found[0] if found else Moved("", 0.0, 1.0)
    return Check(name, finite(worst.error), UPDATE, says, str(worst))


def beyond(updates: Sequence[Moved]) -> tuple[Moved, ...]:
    return tuple(one for one in updates if not one.error <= UPDATE)


def later_checks(
    one: Recording, layout: Recording, followed: Followed, exact: Record | None, allowed: float
) -> tuple[tuple[Check, ...], tuple[Offender, ...]]:
    """Of the gradients of later steps and of an evaluation, both up to where choices part by a tie; and the offenders.

    Args:
        one: the reference.
        layout: the other.
        followed: what one process found on its path.
        exact: the same in fp32, where the precision is narrow.
        allowed: what is taken for a tie.
    """
    ours, theirs = followed.record, layout.ranks
    parted = routing_difference([ours.choices], [rank.choices for rank in theirs], allowed)
    tied = parted is not None and parted.tie
    last = parted.step - 1 if parted and tied else len(followed.steps)
    checks: tuple[Check, ...] = ()
    offenders: tuple[Offender, ...] = ()
    if steps := list(enumerate(followed.steps, start=1))[1:last]:
        number, (gap, most), step = max(
            ((number, _gap(one, layout, step, exact), step) for number, step in steps),
            key=lambda found: finite(found[1][0]) / (found[1][1] or 1e-300),
        )
        what = "all parameters" if exact else "a parameter"
        says = f"relative (Frobenius), of {what} at step {number}, from the layout's weights"
        checks = (Check("later gradients", gap, most, says, step.differ[0].name if step.differ else ""),)
        limit = max(most, GRADIENT)
        offenders = () if checks[0].ok else tuple(found for found in step.differ if not found.error <= limit)
    if ours.evaluation and not tied and not side_effects(theirs, "evaluation"):
        decided = routing_difference([[ours.decided]], [[rank.decided] for rank in theirs], allowed)
        if decided is None or not decided.tie:
            checks += (_evaluation(ours, theirs, exact),)
    return checks, offenders


def path_checks(layout: Recording, followed: Followed, exact: Record | None) -> dict[str, Check]:
    """Of losses and norms, each from the layout's weights: a large learning rate multiplies rounding errors from step
    to step, so that runs that agree at every single step part all the same."""
    says = "relative, from the layout's weights: free runs part by rounding"
    ours, theirs = followed.record, layout.first
    loss, loss_at = relative(ours.losses, theirs.losses)
    taken = [step.norm[0] for step in followed.steps], [step.norm[1] for step in followed.steps]
    told = ours.norms, theirs.norms  # which a plugin may have changed since, in on_gradients
    pairs = (without_overflows(*pair, theirs) for pair in (taken, told))
    norm, norm_at = max((relative(*pair) for pair in pairs), key=lambda found: finite(found[0]))
    own = LUCK * relative(exact.losses, ours.losses)[0] if exact else 0.0
    return {
        "loss": Check("loss", loss, max(LOSS, own), says, loss_at),
        "grad_norm": Check("grad_norm", norm, NORM, says, norm_at),
    }


def _gap(one: Recording, layout: Recording, step: FollowedStep, exact: Record | None) -> tuple[float, float]:
    """Return the difference between a step's gradients, and its tolerance."""
    if exact is None:
        return (step.differ[0].error if step.differ else 0.0), GRADIENT
    if in_parts(one, layout):
        return max(step.apart - step.own, 0.0), SHARE_IN_PARTS * step.own
    return typical(step.differ), SHARE * step.own


def in_parts(one: Recording, layout: Recording) -> bool:
    """Return True if a layout rounds sums in other parts than one process: those over features or a sequence, over an
    expert's tokens and, if gradients are narrow between micro-batches, over the batch."""
    sizes = layout.layout
    summed = any(gradient.dtype.itemsize < 4 for gradient in one.gradients.values())
    return one.narrow and (summed or sizes.tp * sizes.cp * sizes.ep > 1)


def _evaluation(ours: Record, ranks: Sequence[Record], exact: Record | None) -> Check:
    """Of the held-out loss, which comes of the same sequences and repeats itself."""
    (right, _), (found, again) = ours.evaluation, ranks[0].evaluation
    own = LUCK * _relative(exact.evaluation[0], right) if exact else 0.0
    where = f"{right:.8g} and {found:.8g}"
    says = "relative, of the held-out loss after the last step"
    if _relative(found, again) > LOSS:
        return Check("evaluation", _relative(found, again), LOSS, "relative, of the same evaluation, done twice", where)
    return Check("evaluation", finite(_relative(right, found)), max(LOSS, own), says, where)


def _relative(one: float, other: float) -> float:
    return abs(one - other) / (abs(one) or 1.0)
