"""Two recordings side by side: what differs, by how much, and whether that is more than rounding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from . import Check, Offender, Verdict
from .diagnose import BEFORE, diagnose, of_choices
from .record import Fingerprint, Record, Recording
from .routing import TIES, Parting, parting

LOSS = 1e-5
"""Relative, in fp32: what another order of summation gives."""
NORM = 1e-5
GRADIENT = 1e-4
"""Relative error of each parameter's gradient in the Frobenius norm. One that vanishes beside all others (1e-4 of their
norm) is measured against that."""
NARROW_GRADIENT, NARROW_LOSS = 5e-2, 1e-2
"""What is expected of 8 bits of mantissa against 24: of all gradients together, and of the loss."""
ROUNDED_GRADIENT = 2e-1
"""The same of all gradients where products are of 3 bits of mantissa."""
SHARE = 1 / 10
"""Of a narrow precision's own gap to fp32: how far from one process a layout's first gradients may be that computes
every token as one process does."""
SHARE_IN_PARTS = 1 / 4
"""The same where a sum over features or a sequence is rounded in parts: how much further from fp32 they may be."""
LUCK = 3
"""Losses and norms are single numbers: one draw of rounding errors may move them so many times as far as another."""


def compare(one: Recording, layout: Recording, loaded: Mapping[str, str], exact: Recording | None = None) -> Verdict:
    """Judge a layout by one process.

    Args:
        one: the reference.
        layout: the other.
        loaded: hashes of what one process found in the layout's checkpoint.
        exact: the reference in fp32, where the precision is narrow.
    """
    verdict = _judged(one, layout, loaded, exact)
    if not BEFORE & verdict.failed:
        parted = _parting(one, layout, "bf16" if exact and one.precision == "fp32" else "fp32")
        if parted and parted.tie and not verdict.agree:
            verdict = replace(_judged(one, layout, loaded, exact, until=parted.step - 1), parting=parted)
        elif parted and not parted.tie and not (exact and verdict.agree):
            verdict = replace(verdict, parting=parted)
        routing = _routing(one, parted) if verdict.parting or parted is None or parted.tie else ()
        verdict = replace(verdict, checks=(*verdict.checks[: len(BEFORE)], *routing, *verdict.checks[len(BEFORE) :]))
    return verdict if verdict.agree else replace(verdict, advice=tuple(diagnose(verdict, one, layout)))


def _judged(
    one: Recording,
    layout: Recording,
    loaded: Mapping[str, str],
    exact: Recording | None,
    until: int | None = None,
) -> Verdict:
    """By numbers; those that come of steps after `until`, if that is given, are not looked at."""
    first = layout.first
    loss, loss_at = _relative(one.first.losses[:until], first.losses[:until])
    norm, norm_at = _relative(one.first.norms[:until], first.norms[:until])
    own_loss = LUCK * _relative(exact.first.losses, one.first.losses)[0] if exact else 0.0
    own_norm = LUCK * _relative(exact.first.norms, one.first.norms)[0] if exact else 0.0
    differ = errors(one.gradients, layout.gradients)
    gradients = _narrow_gradients(one, layout, exact) if exact else _gradients(differ)
    peers, peers_at = _peers(layout.ranks)
    data, data_at = _data(one.first, layout.ranks)
    start = _different(one.first.start, _union(rank.start for rank in layout.ranks))
    apart = _apart([rank.weights for rank in layout.ranks])
    spoken = _scalars(layout.ranks)
    saved = _different(_union(rank.saved for rank in layout.ranks), loaded)
    steps = (
        Check("loss", loss, max(LOSS, own_loss), _says(until), loss_at),
        Check("grad_norm", norm, max(NORM, own_norm), _says(until), norm_at),
        gradients,
    )
    checks = (
        Check("initial weights", len(start), 0, "parameters that start differently", _few(start)),
        Check("peers", peers, 0, "ranks that share a data index and saw another batch", peers_at),
        Check("data", data, 0, "steps whose sequences are not those of one process", data_at),
        *(() if until == 0 else steps),
        *(_buffers(one.buffers, layout.buffers) if until is None else ()),
        Check("replicas", len(apart) + spoken, 0, "parameters that are not bit-equal on all ranks", _few(list(apart))),
        Check("checkpoint", len(saved), 0, "tensors that one process loads differently", _few(saved)),
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


def _parting(one: Recording, other: Recording, at_least: str) -> Parting | None:
    """Where choices part, by the coarsest of both precisions and a third."""
    precision = max(one.precision, other.precision, at_least, key=list(TIES).index)
    return parting([rank.choices for rank in one.ranks], [rank.choices for rank in other.ranks], precision)


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
    own = _typical(errors(exact.gradients, one.gradients))
    sizes = layout.layout
    if sizes.tp == sizes.cp == 1 or one.precision == "fp32":
        gap, share, what = _typical(errors(one.gradients, layout.gradients)), SHARE, "from one process"
    else:
        gap = max(_typical(errors(exact.gradients, layout.gradients)) - own, 0.0)
        share, what = SHARE_IN_PARTS, f"further from fp32 than one process, which is {own:.1e} from it"
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
    worst = max(gaps, key=lambda name: _finite(gaps[name]))
    return (Check("buffers", gaps[worst], LOSS, "relative, of a persistent buffer after the last step", where=worst),)


def _typical(gaps: Sequence[Offender]) -> float:
    return math.sqrt(sum(_finite(gap.error) ** 2 for gap in gaps) / (len(gaps) or 1))


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
    loss, loss_at = _relative(one.first.losses[:until], other.first.losses[:until])
    gradients = errors(one.gradients, other.gradients)
    together = _together(one.gradients, other.gradients)
    data, data_at = _data(one.first, other.ranks)
    start = _different(one.first.start, other.first.start)
    allowed = ROUNDED_GRADIENT if rounded else NARROW_GRADIENT if narrow else GRADIENT
    checks = (
        Check("initial weights", len(start), 0, "parameters that start differently", _few(start)),
        Check("data", data, 0, "steps whose sequences are others", data_at),
    )
    steps = (
        Check("loss", loss, NARROW_LOSS if narrow or rounded else LOSS, _says(until), loss_at),
        Check("gradients", together, allowed, "relative (Frobenius), of all at step 1"),
    )
    worst = tuple(gradients[:10]) if until != 0 and together > allowed else ()
    return Verdict(
        title=f"{assignment}{', unrounded,' * rounded} against the configuration, on one process",
        sides=("configuration", assignment),
        checks=checks if until == 0 else checks + steps,
        losses=tuple(itertools.zip_longest(one.first.losses, other.first.losses, fillvalue=float("nan"))),
        offenders=worst,
    )


def errors(reference: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[Offender]:
    """Every parameter's gradient, the worst first; one that is missing on a side counts as zero there."""
    total = _norm(reference.values())
    found = []
    for name in reference.keys() | other.keys():
        r, g = reference.get(name), other.get(name)
        r, g = (g * 0 if r is None and g is not None else r), (r * 0 if g is None and r is not None else g)
        assert r is not None
        assert g is not None
        r, g = r.double(), g.double()
        if r.shape != g.shape:
            found.append(Offender(name, float("inf"), float("nan")))
            continue
        size = max(float(r.norm()), 1e-4 * total) or 1.0
        ratio = float((g * r).sum() / (r * r).sum()) if r.any() else float("nan")
        found.append(Offender(name, float((g - r).norm()) / size, ratio))
    return sorted(found, key=lambda one: (-_finite(one.error), one.name))


def _together(reference: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    names = reference.keys() & other.keys()
    return _norm(other[name].double() - reference[name].double() for name in names) / (_norm(reference.values()) or 1.0)


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(sum(float(tensor.double().norm()) ** 2 for tensor in tensors) ** 0.5)


def _finite(value: float) -> float:
    return float("inf") if math.isnan(value) else value


def _relative(reference: Sequence[float], other: Sequence[float]) -> tuple[float, str]:
    """The largest relative difference, and at which step."""
    worst, where = 0.0, ""
    for step, (a, b) in enumerate(itertools.zip_longest(reference, other, fillvalue=float("nan")), start=1):
        difference = _finite(abs(a - b) / (abs(a) or 1.0))
        if difference > worst:
            worst, where = difference, f"step {step}: {a:.8g} and {b:.8g}"
    return worst, where


def _says(until: int | None) -> str:
    return "relative" if until is None else f"relative, up to step {until}"


def _peers(ranks: Sequence[Record]) -> tuple[int, str]:
    leaders: dict[int, Record] = {}
    apart = []
    for rank in ranks:
        leader = leaders.setdefault(rank.data_rank, rank)
        if leader.batches != rank.batches:
            apart.append(f"rank {rank.rank} and rank {leader.rank} (data index {rank.data_rank})")
    return len(apart), _few(apart)


def _data(one: Record, ranks: Sequence[Record]) -> tuple[int, str]:
    leaders = {rank.data_rank: rank for rank in reversed(ranks)}
    wrong = []
    for step, expected in enumerate(one.batches):
        seen = [row for rank in leaders.values() if step < len(rank.batches) for row in rank.batches[step]]
        if sorted(seen) != sorted(expected):
            wrong.append(f"step {step + 1}")
    return len(wrong), _few(wrong)


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


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f", … {len(names) - 3} more" if len(names) > 3 else "")


def _axes(layout: Recording) -> str:
    sizes = [f"{axis} {size}" for axis, size in layout.layout.axes().items() if size > 1]
    return " × ".join(sizes) or "one axis"
