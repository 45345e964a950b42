"""Two recordings side by side: what differs, by how much, and whether that is more than rounding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from .diagnose import BEFORE, diagnose, of_choices
from .explain import Explanation
from .follow import Followed
from .later import (
    GRADIENT,
    LOSS,
    LUCK,
    NORM,
    SHARE,
    SHARE_IN_PARTS,
    beyond,
    in_parts,
    later_checks,
    path_checks,
    update_checks,
)
from .numbers import errors, finite, relative, together, typical
from .patterns import unexplained
from .recording import Fingerprint, Record, Recording
from .routing import TIES, Parting, parting
from .verdict import Check, Offender, Verdict, few

NARROW_GRADIENT, NARROW_LOSS = 5e-2, 1e-2
"""What is expected of 8 bits of mantissa against 24: of all gradients together, and of the loss."""
ROUNDED_GRADIENT = 2e-1
"""The same of all gradients where products are of 3 bits of mantissa."""


@dataclass(frozen=True)
class Exact:
    """One process in fp32, where the precision is narrow or a plugin rounds below it."""

    recording: Recording
    followed: Record
    """The same on the layout's path."""


Explain = Callable[[], "Explanation | None"]


def compare(
    one: Recording,
    layout: Recording,
    followed: Followed,
    exact: Exact | None = None,
    explain: Explain = lambda: None,
) -> Verdict:
    """Judge a layout by one process.

    Args:
        one: the reference.
        layout: the other.
        followed: what one process found on the layout's path, and in its checkpoint.
        exact: the reference in fp32, where the precision is narrow.
        explain: what to ask about first gradients that are wrong.
    """
    precision = "bf16" if exact and one.precision == "fp32" else "fp32"
    verdict = _judged(one, layout, followed, exact)
    if not BEFORE & verdict.failed:
        parted = _parting(one, layout, precision)
        if parted and parted.tie and not verdict.agree:
            verdict = replace(_judged(one, layout, followed, exact, until=parted.step - 1), parting=parted)
        elif parted and not parted.tie and not (exact and verdict.agree):
            verdict = replace(verdict, parting=parted)
        routing = _routing(one, parted) if verdict.parting or parted is None or parted.tie else ()
        verdict = replace(verdict, checks=(*verdict.checks[: len(BEFORE)], *routing, *verdict.checks[len(BEFORE) :]))
        verdict = _followed(verdict, one, layout, followed, exact, _coarsest(one, layout, precision))
    if verdict.agree:
        return verdict
    at_first = verdict.parting is not None and verdict.parting.step == 1
    asks = not (exact or at_first) and unexplained(verdict.offenders, layout)
    return replace(verdict, advice=tuple(diagnose(verdict, one, layout, followed, explain() if asks else None)))


def _followed(
    verdict: Verdict, one: Recording, layout: Recording, followed: Followed, exact: Exact | None, coarsest: str
) -> Verdict:
    """With the checks of what one process found on the layout's path, as far as there is such a path: one start, one
    gradient for all replicas, and weights that are what the optimizer makes of these."""
    if any(_apart([getattr(rank, kept) for rank in layout.ranks]) for kept in ("gradients", "last_gradients")):
        return verdict
    updates = () if "checkpoint" in verdict.failed else update_checks(followed)
    verdict = replace(verdict, checks=(*verdict.checks, *updates), updates=beyond(followed.updates) if updates else ())
    if {"updates", "optimizer", "checkpoint", "buffers", "replicas"} & verdict.failed:
        return verdict
    wide = exact.followed if exact else None
    later, offenders = later_checks(one, layout, followed, wide, coarsest)
    verdict = replace(verdict, checks=(*verdict.checks, *later), later=offenders)
    if verdict.parting is None and verdict.failed and verdict.failed <= {"loss", "grad_norm"}:
        found = path_checks(layout, followed, wide)
        verdict = replace(verdict, checks=tuple(found.get(check.name, check) for check in verdict.checks))
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
    norm, norm_at = relative(one.first.norms[:until], first.norms[:until])
    own_loss = LUCK * relative(wide.first.losses, one.first.losses)[0] if wide else 0.0
    own_norm = LUCK * relative(wide.first.norms, one.first.norms)[0] if wide else 0.0
    differ = errors(one.gradients, layout.gradients)
    gradients = _narrow_gradients(one, layout, wide) if wide else _gradients(differ)
    peers, peers_at = _peers(layout.ranks)
    data, data_at = _data(one.first, layout.ranks)
    start = other_starts(one, layout)
    apart = _apart([rank.weights for rank in layout.ranks])
    spoken = _scalars(layout.ranks)
    saved = _different(_union(rank.saved for rank in layout.ranks), followed.loaded)
    steps = (
        Check("loss", loss, max(LOSS, own_loss), _says(until), loss_at),
        Check("grad_norm", norm, max(NORM, own_norm), _says(until), norm_at),
        gradients,
    )
    checks = (
        Check("initial weights", len(start), 0, "parameters that start differently", few(list(start))),
        Check("peers", peers, 0, "ranks that share a data index and saw another batch", peers_at),
        Check("data", data, 0, "steps whose sequences are not those of one process", data_at),
        *(() if until == 0 else steps),
        *(_buffers(one.buffers, layout.buffers) if until is None else ()),
        Check("replicas", len(apart) + spoken, 0, "parameters that are not bit-equal on all ranks", few(list(apart))),
        Check("checkpoint", len(saved), 0, "tensors that one process loads differently", few(saved)),
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


def other_starts(one: Recording, layout: Recording) -> dict[str, list[int]]:
    """Weights that start differently from one process, and on which ranks."""
    found: dict[str, list[int]] = {}
    for rank in layout.ranks:
        for name, value in rank.start.items():
            if one.first.start.get(name) != value:
                found.setdefault(name, []).append(rank.rank)
    for name in one.first.start.keys() - _union(rank.start for rank in layout.ranks).keys():
        found[name] = [rank.rank for rank in layout.ranks]
    return dict(sorted(found.items()))


def _parting(one: Recording, other: Recording, at_least: str) -> Parting | None:
    """Where choices part, by the coarsest of both precisions and a third."""
    precision = _coarsest(one, other, at_least)
    return parting([rank.choices for rank in one.ranks], [rank.choices for rank in other.ranks], precision)


def _coarsest(one: Recording, other: Recording, at_least: str) -> str:
    return max(one.precision, other.precision, at_least, key=list(TIES).index)


def _routing(one: Recording, parted: Parting | None) -> tuple[Check, ...]:
    """One check for a model that makes choices, none for others; ties are allowed."""
    says = "choices that fell otherwise"
    if parted:
        return (Check("routing", parted.moved, parted.near, f"{says}, at step {parted.step}", parted.where),)
    return (Check("routing", 0, 0, says),) if any(rank.choices and rank.choices[0] for rank in one.ranks) else ()


def _gradients(differ: Sequence[Offender]) -> Check:
    worst = differ[0] if differ else Offender("", 0.0, 1.0)
    return Check("gradients", worst.error, GRADIENT, "relative (Frobenius), of a parameter at step 1", where=worst.name)


def _narrow_gradients(one: Recording, layout: Recording, exact: Recording) -> Check:
    """Root of the mean squared relative gap over all parameters, beside that of the precision itself."""
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


def compare_settings(one: Recording, other: Recording, assignment: str, *, rounded: bool = False) -> Verdict:
    """Judge another setting by the reference, both on one process.

    Args:
        one: the reference.
        other: the same with another setting.
        assignment: that setting, in words.
        rounded: whether the reference alone rounds below its precision.
    """
    verdict = _judged_settings(one, other, assignment, rounded)
    parted = _parting(one, other, "fp8" if rounded else "fp32")
    if verdict.agree or BEFORE & verdict.failed or parted is None or not parted.tie:
        return verdict
    verdict = _judged_settings(one, other, assignment, rounded, until=parted.step - 1)
    return replace(verdict, parting=parted, advice=(of_choices(parted),))


def _judged_settings(
    one: Recording, other: Recording, assignment: str, rounded: bool, until: int | None = None
) -> Verdict:
    narrow = {one.precision, other.precision} != {"fp32"}
    loss, loss_at = relative(one.first.losses[:until], other.first.losses[:until])
    gradients = errors(one.gradients, other.gradients)
    whole = together(one.gradients, other.gradients)
    data, data_at = _data(one.first, other.ranks)
    start = _different(one.first.start, other.first.start)
    allowed = ROUNDED_GRADIENT if rounded else NARROW_GRADIENT if narrow else GRADIENT
    checks = (
        Check("initial weights", len(start), 0, "parameters that start differently", few(start)),
        Check("data", data, 0, "steps whose sequences are others", data_at),
    )
    steps = (
        Check("loss", loss, NARROW_LOSS if narrow or rounded else LOSS, _says(until), loss_at),
        Check("gradients", whole, allowed, "relative (Frobenius), of all at step 1"),
    )
    worst = tuple(gradients[:10]) if until != 0 and whole > allowed else ()
    return Verdict(
        title=f"{assignment}{', unrounded,' * rounded} against the configuration, on one process",
        sides=("configuration", assignment),
        checks=checks if until == 0 else checks + steps,
        losses=tuple(itertools.zip_longest(one.first.losses, other.first.losses, fillvalue=float("nan"))),
        offenders=worst,
    )


def _says(until: int | None) -> str:
    return "relative" if until is None else f"relative, up to step {until}"


def _peers(ranks: Sequence[Record]) -> tuple[int, str]:
    leaders: dict[int, Record] = {}
    apart = []
    for rank in ranks:
        leader = leaders.setdefault(rank.data_rank, rank)
        if leader.batches != rank.batches:
            apart.append(f"rank {rank.rank} and rank {leader.rank} (data index {rank.data_rank})")
    return len(apart), few(apart)


def _data(one: Record, ranks: Sequence[Record]) -> tuple[int, str]:
    leaders = {rank.data_rank: rank for rank in reversed(ranks)}
    wrong = []
    for step, expected in enumerate(one.batches):
        seen = [row for rank in leaders.values() if step < len(rank.batches) for row in rank.batches[step]]
        if sorted(seen) != sorted(expected):
            wrong.append(f"step {step + 1}")
    return len(wrong), few(wrong)


def _apart(pieces: Sequence[Mapping[str, Fingerprint]]) -> dict[str, set[str]]:
    """Parameters of which some ranks hold the same piece with other bytes."""
    seen: dict[tuple[str, str], str] = {}
    apart: dict[str, set[str]] = {}
    for rank in pieces:
        for name, (piece, value) in rank.items():
            if seen.setdefault((name, piece), value) != value:
                apart.setdefault(name, set()).add(piece)
    return apart


def _scalars(ranks: Sequence[Record]) -> int:
    """Whether loss and norm are the same double everywhere."""
    return int(any((rank.losses, rank.norms) != (ranks[0].losses, ranks[0].norms) for rank in ranks))


def _different(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _union(parts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {name: value for part in parts for name, value in part.items()}


def _axes(layout: Recording) -> str:
    sizes = [f"{axis} {size}" for axis, size in layout.layout.axes().items() if size > 1]
    return " × ".join(sizes) or "one axis"
