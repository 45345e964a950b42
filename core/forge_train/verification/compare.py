"""Two recordings side by side: what differs, by how much, and whether that is more than rounding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from . import Check, Offender, Verdict
from .diagnose import diagnose
from .record import Fingerprint, Record, Recording

LOSS = 1e-5
"""Relative, in fp32: what another order of summation gives."""
NORM = 1e-5
GRADIENT = 1e-4
"""Relative error of each parameter's gradient in the Frobenius norm. One that vanishes beside all others (1e-4 of their
norm) is measured against that."""
NARROW_GRADIENT, NARROW_LOSS = 5e-2, 1e-2
"""What is expected of 8 bits of mantissa against 24: of all gradients together, and of the loss."""


@dataclass(frozen=True)
class Gap:
    """How far a narrow precision is from fp32 on one process: what a layout's distance is measured by."""

    loss: float
    norm: float
    gradient: float


def own_gap(narrow: Recording, exact: Recording) -> Gap:
    return Gap(
        loss=_relative(exact.first.losses, narrow.first.losses)[0],
        norm=_relative(exact.first.norms, narrow.first.norms)[0],
        gradient=max((one.error for one in errors(exact.gradients, narrow.gradients)), default=0.0),
    )


def compare(one: Recording, layout: Recording, loaded: Mapping[str, str], gap: Gap | None = None) -> Verdict:
    """Judge a layout by one process.

    Args:
        one: the reference.
        layout: the other.
        loaded: hashes of what one process found in the layout's checkpoint.
        gap: of a narrow precision to fp32; None in fp32.
    """
    first = layout.first
    loss, loss_at = _relative(one.first.losses, first.losses)
    norm, norm_at = _relative(one.first.norms, first.norms)
    gradients = errors(one.gradients, layout.gradients)
    allowed = max(GRADIENT, 2 * gap.gradient) if gap else GRADIENT
    peers, peers_at = _peers(layout.ranks)
    data, data_at = _data(one.first, layout.ranks)
    start = _different(one.first.start, _union(rank.start for rank in layout.ranks))
    apart = _apart([rank.weights for rank in layout.ranks])
    spoken = _scalars(layout.ranks)
    saved = _different(_union(rank.saved for rank in layout.ranks), loaded)
    checks = (
        Check("initial weights", len(start), 0, "parameters that start differently", _few(start)),
        Check("peers", peers, 0, "ranks that share a data index and saw another batch", peers_at),
        Check("data", data, 0, "steps whose sequences are not those of one process", data_at),
        Check("loss", loss, max(LOSS, gap.loss / 10) if gap else LOSS, "relative", loss_at),
        Check("grad_norm", norm, max(NORM, gap.norm) if gap else NORM, "relative", norm_at),
        Check(
            "gradients",
            gradients[0].error if gradients else 0.0,
            allowed,
            "relative (Frobenius), of a parameter at step 1",
            gradients[0].name if gradients else "",
        ),
        Check("replicas", len(apart) + spoken, 0, "parameters that are not bit-equal on all ranks", _few(list(apart))),
        Check("checkpoint", len(saved), 0, "tensors that one process loads differently", _few(saved)),
    )
    offenders = tuple(offender for offender in gradients if not offender.error <= allowed)
    verdict = Verdict(
        title=f"{len(layout.ranks)} processes ({_axes(layout)}) against one",
        sides=("1 process", f"{len(layout.ranks)} processes"),
        checks=checks,
        losses=tuple(itertools.zip_longest(one.first.losses, first.losses, fillvalue=float("nan"))),
        offenders=offenders,
    )
    return verdict if verdict.agree else _advised(verdict, one, layout)


def compare_settings(one: Recording, other: Recording, assignment: str) -> Verdict:
    """Judge another setting by the reference, both on one process."""
    narrow = "fp32" in (one.precision, other.precision) and one.precision != other.precision
    narrow = narrow or one.precision != "fp32"
    loss, loss_at = _relative(one.first.losses, other.first.losses)
    gradients = errors(one.gradients, other.gradients)
    together = _together(one.gradients, other.gradients)
    data, data_at = _data(one.first, other.ranks)
    start = _different(one.first.start, other.first.start)
    checks = (
        Check("initial weights", len(start), 0, "parameters that start differently", _few(start)),
        Check("data", data, 0, "steps whose sequences are others", data_at),
        Check("loss", loss, NARROW_LOSS if narrow else LOSS, "relative", loss_at),
        Check("gradients", together, NARROW_GRADIENT if narrow else GRADIENT, "relative (Frobenius), of all at step 1"),
    )
    worst = tuple(gradients[:10]) if together > checks[-1].tolerance else ()
    return Verdict(
        title=f"{assignment} against the configuration, on one process",
        sides=("configuration", assignment),
        checks=checks,
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


def _advised(verdict: Verdict, one: Recording, layout: Recording) -> Verdict:
    return replace(verdict, advice=tuple(diagnose(verdict, one, layout)))
