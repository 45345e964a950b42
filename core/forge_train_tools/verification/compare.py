"""Two recordings side by side: what differs, by how much, and whether that is more than rounding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from forge_train.base.format import format_list

from .diagnose import BEFORE, diagnose, of_no_update
from .follow import Followed
from .later import (
    GRADIENT,
    LOSS,
    LUCK,
    METRIC,
    NORM,
    SHARE,
    SHARE_IN_PARTS,
    beyond,
    in_parts,
    later_checks,
    path_checks,
    update_checks,
)
from .numbers import errors, finite, relative, typical
from .overflow import Overflow
from .patterns import unexplained
from .ranks import (
    choices_apart,
    coarsest,
    data_apart,
    different,
    metrics_apart,
    other_starts,
    overflows,
    peers_apart,
    pieces_apart,
    scalars_apart,
    side_effect_check,
    union,
    up_to,
    without_overflows,
)
from .recording import Record, Recording
from .routing import TIE, TIES, RoutingDifference
from .states import resume_check, state_checks
from .verdict import Check, Offender, Verdict


@dataclass(frozen=True)
class Exact:
    """One process in fp32, where the precision is narrow or a plugin rounds below it."""

    recording: Recording
    followed: Record
    """The same on the layout's path."""


RANKS_APART = frozenset({"initial weights", "peers", "replicas", "checkpoint"})
"""Checks of what a checkpoint holds once for all ranks: where ranks differ in it, a resume is different for that."""
Explain = Callable[[], str]


def compare(
    one: Recording,
    layout: Recording,
    followed: Followed,
    exact: Exact | None = None,
    explain: Explain = lambda: "",
) -> Verdict:
    """Judge a layout by one process.

    Args:
        one: the reference.
        layout: the other.
        followed: what one process found on the layout's path, and in its checkpoint.
        exact: the reference in fp32, where the precision is narrow.
        explain: what to ask about first gradients that are wrong.
    """
    allowed = max(TIES) if exact and not one.narrow else TIE  # a plugin rounds: as a narrow precision would
    overflow = Overflow.find(one, layout, followed)
    promised = overflow if overflow and overflow.promised else None
    verdict = _judged(one, layout, followed, exact, until=promised.step - 1 if promised else None)
    if not BEFORE & verdict.failed:
        parted = choices_apart(one, layout, allowed)
        if parted and promised and parted.step > promised.step:
            parted = None
        if parted and parted.tie and not verdict.agree:
            verdict = replace(_judged(one, layout, followed, exact, until=parted.step - 1), routing_difference=parted)
        elif parted and not parted.tie and not (exact and verdict.agree):
            verdict = replace(verdict, routing_difference=parted)
        routing = _routing(one, parted) if verdict.routing_difference or parted is None or parted.tie else ()
        verdict = replace(verdict, checks=(*verdict.checks[: len(BEFORE)], *routing, *verdict.checks[len(BEFORE) :]))
        verdict = _followed(verdict, one, layout, followed, exact, coarsest(one, layout, allowed), free=not promised)
    if not RANKS_APART & verdict.failed:
        verdict = replace(verdict, checks=(*verdict.checks, *resume_check(layout, followed)))
    if verdict.agree:
        return replace(verdict, advice=tuple(filter(None, [of_no_update(layout), str(overflow or "")])))
    at_first = verdict.routing_difference is not None and verdict.routing_difference.step == 1
    asks = not (exact or at_first) and unexplained(verdict.offenders, layout)
    return replace(verdict, advice=tuple(diagnose(verdict, one, layout, followed, explain() if asks else "")))


def _followed(
    verdict: Verdict,
    one: Recording,
    layout: Recording,
    followed: Followed,
    exact: Exact | None,
    allowed: float,
    *,
    free: bool,
) -> Verdict:
    """With the checks of what one process found on the layout's path, as far as there is such a path: one start, one
    gradient for all replicas, and weights that are what the optimizer makes of these. Losses and norms too, where free
    runs part by rounding."""
    if any(pieces_apart([getattr(rank, kept) for rank in layout.ranks]) for kept in ("gradients", "last_gradients")):
        return verdict
    updates = () if {"checkpoint", "evaluation"} & verdict.failed else update_checks(followed)
    updates += state_checks(followed) if all(check.ok for check in updates) else ()
    verdict = replace(verdict, checks=(*verdict.checks, *updates), updates=beyond(followed.updates) if updates else ())
    if {"updates", "optimizer", "checkpoint", "buffers", "replicas"} & verdict.failed:
        return verdict
    wide = exact.followed if exact else None
    later, offenders = later_checks(one, layout, followed, wide, allowed)
    verdict = replace(verdict, checks=(*verdict.checks, *later), later=offenders)
    if verdict.routing_difference is None and verdict.failed <= {"loss", "grad_norm"} and (verdict.failed or not free):
        found = path_checks(layout, followed, wide)
        checks = [found.pop(check.name, check) for check in verdict.checks]
        verdict = replace(verdict, checks=(*checks, *found.values()))
    return verdict


def _judged(
    one: Recording,
    layout: Recording,
    followed: Followed,
    exact: Exact | None,
    until: int | None = None,
) -> Verdict:
    """By numbers; those that come of steps after `until`, if that is given, are not looked at."""
    first, wide = layout.first, exact.recording if exact else None
    loss, loss_at = relative(one.first.losses[:until], first.losses[:until])
    norm, norm_at = relative(*without_overflows(one.first.norms[:until], first.norms[:until], one.first, first))
    own_loss = LUCK * relative(wide.first.losses, one.first.losses)[0] if wide else 0.0
    own_norm = LUCK * relative(*without_overflows(wide.first.norms, one.first.norms, one.first))[0] if wide else 0.0
    differ = errors(one.gradients, layout.gradients)
    gradients = _narrow_gradients(one, layout, wide) if wide else _gradients(differ)
    peers, peers_at = peers_apart(layout)
    data, data_at = data_apart(one.first, layout.ranks)
    start = other_starts(one, layout)
    apart = pieces_apart([rank.weights for rank in layout.ranks])
    spoken = scalars_apart(layout.ranks)
    saved = different(union(rank.saved for rank in layout.ranks), followed.loaded)
    steps = (
        Check("loss", loss, max(LOSS, own_loss), up_to(until), loss_at),
        Check("grad_norm", norm, max(NORM, own_norm), up_to(until), norm_at),
        gradients,
        *_metrics(one, layout, wide),
    )
    checks = (
        Check("initial weights", len(start), 0, "parameters that start differently", format_list(list(start))),
        Check("peers", peers, 0, "ranks that saw another batch than their data-parallel peers", peers_at),
        Check("data", data, 0, "steps whose sequences are not those of one process", data_at),
        *(() if until == 0 else steps),
        *(_buffers(one.buffers, layout.buffers) if until is None else ()),
        Check(
            "replicas",
            len(apart) + spoken,
            0,
            "parameters that are not bit-equal on all ranks",
            format_list(list(apart)),
        ),
        *(
            side_effect_check(layout.ranks, "checkpoint")
            or (Check("checkpoint", len(saved), 0, "tensors that one process loads differently", format_list(saved)),)
        ),
        *side_effect_check(layout.ranks, "evaluation"),
    )
    return Verdict(
        title=f"{len(layout.ranks)} processes ({_axes(layout)}) against one",
        sides=("1 process", f"{len(layout.ranks)} processes"),
        checks=checks,
        losses=tuple(itertools.zip_longest(one.first.losses, first.losses, fillvalue=float("nan"))),
        offenders=()
        if gradients.ok or until == 0
        else _beyond(differ, GRADIENT if exact is None else gradients.tolerance),
    )


def _routing(one: Recording, parted: RoutingDifference | None) -> tuple[Check, ...]:
    """One check for a model that makes choices, none for others; ties are allowed."""
    says = "choices that fell otherwise"
    if parted:
        return (Check("routing", parted.moved, parted.near, f"{says}, at step {parted.step}", parted.where),)
    return (Check("routing", 0, 0, says),) if any(rank.choices and rank.choices[0] for rank in one.ranks) else ()


def _gradients(differ: Sequence[Offender]) -> Check:
    worst = differ[0] if differ else Offender("", 0.0, 1.0)
    return Check("gradients", worst.error, GRADIENT, "relative (Frobenius), of a parameter at step 1", where=worst.name)


def _metrics(one: Recording, layout: Recording, exact: Recording | None) -> tuple[Check, ...]:
    """Of plugins, where they observed anything in the first step."""
    ours, theirs = one.first.metrics, layout.first.metrics
    if not ours and not theirs:
        return ()
    own = LUCK * metrics_apart(exact.first.metrics, ours)[0] if exact else 0.0
    worst, where = metrics_apart(ours, theirs)
    return (Check("metrics", worst, max(METRIC, own), "relative, of a metric of a plugin at step 1", where),)


def _narrow_gradients(one: Recording, layout: Recording, exact: Recording) -> Check:
    """Root of the mean squared relative gap over all parameters, beside that of the precision itself."""
    if {1} & overflows(one.first) & overflows(layout.first):
        return Check("gradients", 0.0, 0.0, "gradients that overflow at step 1 on one side only: they do on both")
    own = typical(errors(exact.gradients, one.gradients))
    if in_parts(one, layout):
        gap = max(typical(errors(exact.gradients, layout.gradients)) - own, 0.0)
        share, what = SHARE_IN_PARTS, f"further from fp32 than one process, which is {own:.1e} from it"
    else:
        gap, share, what = typical(errors(one.gradients, layout.gradients)), SHARE, "from one process"
    return Check("gradients", gap, share * own, f"relative, all parameters at step 1, {what}")


def _buffers(reference: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> tuple[Check, ...]:
    """One check for a model that keeps something beside its parameters, none for others."""
    gaps = {
        name: float((other[name].double() - value.double()).abs().max() / (value.double().abs().max() or 1.0))
        for name, value in reference.items()
        if name in other and value.numel()
    }
    if not gaps:
        return ()
    worst = max(gaps, key=lambda name: finite(gaps[name]))
    return (Check("buffers", gaps[worst], LOSS, "relative, of a persistent buffer after the last step", where=worst),)


def _beyond(differ: Sequence[Offender], allowed: float) -> tuple[Offender, ...]:
    return tuple(offender for offender in differ if not offender.error <= allowed)


def _axes(layout: Recording) -> str:
    sizes = [f"{axis} {size}" for axis, size in layout.layout.axes().items() if size > 1]
    return " × ".join(sizes) or "one axis"
