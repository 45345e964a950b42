"""Distances between numbers and between gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from .verdict import Offender


def errors(reference: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[Offender]:
    """Every parameter's gradient, the worst first; one that is missing on a side counts as zero there."""
    total = norm(reference.values())
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
    return sorted(found, key=lambda one: (-finite(one.error), one.name))


def together(reference: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The relative error of all gradients as one vector."""
    names = reference.keys() & other.keys()
    return norm(other[name].double() - reference[name].double() for name in names) / (norm(reference.values()) or 1.0)


def typical(gaps: Sequence[Offender]) -> float:
    """Root of the mean squared error."""
    return math.sqrt(sum(finite(gap.error) ** 2 for gap in gaps) / (len(gaps) or 1))


def norm(tensors: Iterable[Tensor]) -> float:
    return float(sum(float(tensor.double().norm()) ** 2 for tensor in tensors) ** 0.5)


def relative(reference: Sequence[float], other: Sequence[float]) -> tuple[float, str]:
    """The largest relative difference, and at which step."""
    worst, where = 0.0, ""
    for step, (a, b) in enumerate(itertools.zip_longest(reference, other, fillvalue=float("nan")), start=1):
        difference = finite(abs(a - b) / (abs(a) or 1.0))
        if difference > worst:
            worst, where = difference, f"step {step}: {a:.8g} and {b:.8g}"
    return worst, where


def finite(value: float) -> float:
    return float("inf") if math.isnan(value) else value
