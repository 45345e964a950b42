"""Updates made by an optimizer from given gradients, on one process and on a layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge_train.store.tree import join

from .recording import Record
from .verdict import Offender

UPDATE = 1e-4
"""Relative (Frobenius), beyond what storing a weight rounds: the same gradients and the same norm to clip by give the
same update, but for the last bit."""
FEW = 8
"""So few numbers are a multiple of anything."""
WEIGHT = "weight"
STATE, MODEL = "optimizer.state.", "model."


@dataclass(frozen=True)
class Moved(Offender):
    """Change of a weight, or of the optimizer's state for it, and its error."""

    part: str = WEIGHT
    """The weight itself, or the key of the optimizer's state."""
    along: float = 0.0
    """The difference as a multiple of the initial weight, where it is one; else 0."""
    ranks: tuple[int, ...] = ()
    """The ranks whose pieces are wrong, where others' are right."""

    def __str__(self) -> str:
        return self.name if self.part == WEIGHT else f"{self.part} of {self.name}"

    @property
    def pure(self) -> bool:
        """True if it is a multiple of the right value."""
        return math.isfinite(self.ratio) and remainder(self) < 1e-3


def remainder(one: Offender) -> float:
    """Return the remainder beside a multiple of the reference, relative to that multiple: from
    ‖g − r‖² = (k − 1)²‖r‖² + ‖g − k r‖²."""
    return float(max(one.error**2 - (one.ratio - 1) ** 2, 0.0) ** 0.5) / max(abs(one.ratio), 1e-12)


def moves(
    start: Mapping[str, Tensor],
    mine: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    steps: int,
    ranks: Sequence[Record] = (),
) -> list[Moved]:
    """Every weight and every tensor of the optimizer's state, the worst first.

    Args:
        start: initial weights, by the name of the parameter.
        mine: what one process came to, as a checkpoint names it.
        theirs: the same of a layout.
        steps: how many were taken.
        ranks: of the layout, for what each of them holds.
    """
    found = []
    for name in sorted(mine.keys() | theirs.keys()):
        parameter, part = _place(name, start)
        if not parameter:
            continue
        one, other = mine.get(name), theirs.get(name)
        if one is None or other is None or one.shape != other.shape:
            found.append(Moved(parameter, math.inf, math.nan, part))
        else:
            found.append(_moved(parameter, part, start[parameter], one, other, steps, ranks))
    return sorted(found, key=lambda one: -(math.inf if math.isnan(one.error) else one.error))


def _place(name: str, start: Mapping[str, Tensor]) -> tuple[str, str]:
    """A tensor's parameter and which part of it this is; none for a buffer, which moves by what a step has seen."""
    if name.startswith(MODEL):
        parameter = name.removeprefix(MODEL)
        return (parameter, WEIGHT) if parameter in start else ("", "")
    if name.startswith(STATE):
        rest = name.removeprefix(STATE)
        owner = max((p for p in start if rest.startswith(f"{p}.")), key=len, default="")
        return (owner, rest.removeprefix(f"{owner}.")) if owner else ("", "")
    return "", ""


def _moved(
    name: str, part: str, start: Tensor, one: Tensor, other: Tensor, steps: int, ranks: Sequence[Record]
) -> Moved:
    if torch.equal(one, other):
        return Moved(name, 0.0, 1.0, part)
    rounds = torch.finfo(one.dtype).eps if one.dtype.is_floating_point else 0.0
    base = start.double() if part == WEIGHT else torch.zeros_like(one, dtype=torch.double)
    right, gap = one.double() - base, other.double() - one.double()
    floor = steps * rounds * (base if part == WEIGHT else one.double()).abs()
    error = _beyond(gap, right, floor)
    square = float(right.square().sum())
    ratio = 1 + float((gap * right).sum()) / square if square else math.nan
    if not error > UPDATE:
        return Moved(name, error, ratio, part)
    wrong = tuple(
        rank.rank for rank in ranks if one.shape == start.shape and _wrong(gap, right, floor, rank.pieces.get(name, []))
    )
    wrong = wrong if len(wrong) < len(ranks) else ()
    return Moved(name, error, ratio, part, _along(gap, base) if part == WEIGHT else 0.0, wrong)


def _beyond(gap: Tensor, right: Tensor, floor: Tensor) -> float:
    """The relative error, less what rounding allows for."""
    excess = max(float(gap.norm()) - float(floor.norm()), 0.0) if gap.isfinite().all() else math.inf
    return excess / (float(right.norm()) or 1e-300) if excess else 0.0


def _wrong(gap: Tensor, right: Tensor, floor: Tensor, piece: Sequence[Sequence[int]]) -> bool:
    here = tuple(slice(first, end) for first, end in piece)
    return bool(gap[here].numel()) and _beyond(gap[here], right[here], floor[here]) > UPDATE


def _along(gap: Tensor, start: Tensor) -> float:
    """The factor if a difference, where there is one, is a multiple of the initial weight; else 0."""
    there = gap.abs() > 1e-3 * gap.abs().amax()
    if int(there.sum()) < FEW:
        return 0.0
    gap, start = gap * there, start * there
    square = float(start.square().sum())
    factor = float((gap * start).sum()) / square if square else 0.0
    return factor if float((gap - factor * start).norm()) < 0.05 * float(gap.norm()) else 0.0


def settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings of parameter groups, and non-tensor state, that differ: key → one value of each side.

    Args:
        one: the optimizer's state as JSON, with parameters named and tensors left out.
        other: of a layout, whose groups may be others.
    """
    found: dict[str, tuple[Any, Any]] = {}
    mine, theirs = dict(_values(one)), dict(_values(other))
    for place in sorted(mine.keys() & theirs.keys()):
        if not _same(mine[place], theirs[place]):
            found.setdefault(place[1], (join(mine[place], {}), join(theirs[place], {})))
    return found


def _values(state: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], Any]]:
    for group in state.get("param_groups", ()):
        for name in group["params"]:
            yield from (((name, key), value) for key, value in group.items() if key != "params" and _plain(value))
    for name, values in state.get("state", {}).items():
        if isinstance(values, Mapping):
            yield from (((name, key), value) for key, value in values.items() if _plain(value))


def _plain(value: Any) -> bool:
    """Return True if it holds no tensor; tensors are compared by themselves."""
    if isinstance(value, Mapping):
        return all(not key.startswith("$") or _plain(inner) for key, inner in value.items()) and "$tensor" not in value
    return True


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-300)
    return bool(one == other)
