"""What the pattern of differences between one process and a layout suggests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from . import Offender, Verdict
from .record import Fingerprint, Record, Recording
from .routing import Parting

PURE = 1e-3
"""A gradient is a pure multiple of what it should be if so little of it remains beside that multiple."""
BEFORE = frozenset({"initial weights", "peers", "data"})
"""Checks without which no other says anything."""
ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost first."""


def diagnose(verdict: Verdict, one: Recording, layout: Recording) -> Iterator[str]:
    """Sentences, what must be mended first coming first."""
    failed = {check.name: check for check in verdict.checks if not check.ok}
    if check := failed.get("initial weights"):
        yield (
            f"The initial weights differ ({check.where}): a parameter must be declared by `initial(name)` of the "
            "module that owns it, and be filled by core, so that it starts the same on every topology."
        )
    if check := failed.get("peers"):
        yield (
            f"Ranks that share a data index were fed different batches ({check.where}): `build_data` must place its "
            "micro-batches by job.dist.data_rank and job.dist.data_ranks, never by the rank."
        )
    elif check := failed.get("data"):
        yield (
            f"The layout trains on other sequences ({check.where}): global micro-batch = position × data ranks + data "
            "index, whatever the number of ranks."
        )
    if BEFORE & failed.keys():
        return
    parted = verdict.parting
    if parted and (parted.tie or parted.step == 1 or not verdict.offenders):
        yield of_choices(parted)
    if "routing" not in failed or (parted and parted.step > 1):
        yield from _gradients(verdict, layout)
        yield from _loss(verdict, failed, one, layout)
        if check := failed.get("buffers"):
            yield (
                f"A persistent buffer ends otherwise ({check.where}): what moves it, such as the load of experts, must "
                "be counted once, over the tokens of all ranks."
            )
    if check := failed.get("checkpoint"):
        yield (
            f"One process does not load what the layout saved ({check.where}): a parameter that is sharded must be a "
            "DTensor, under its global name, and so must its optimizer state."
        )


def of_choices(parted: Parting) -> str:
    """What to make of choices that fell otherwise."""
    found = f"At step {parted.step}, {parted.moved} choices of {parted.where} fell otherwise"
    equal = f"between scores that are equal up to rounding ({parted.slack:.0e} relative)"
    if not parted.tie:
        return (
            f"{found}, and at most {parted.near} of them are {equal}: the scores are computed otherwise, or what is "
            "made of them. What comes after it differs for that alone."
        )
    ways = ["another run.seed"]
    if parted.step > 1:
        ways.append(f"--steps {parted.step - 1}")
    if parted.precision != "fp32":
        ways.append("train.precision=fp32")
    return (
        f"{found}: ties. Both sides have at least as many {equal}. Loss, gradient norm"
        f"{', gradients' * (parted.step == 1)} and buffers are not compared from that step on: they differ although "
        f"nothing is wrong. To compare more, try {' or '.join(ways)}."
    )


def _gradients(verdict: Verdict, layout: Recording) -> Iterator[str]:
    everything = layout.parameters
    pure: dict[float, list[Offender]] = {}
    other: list[Offender] = []
    missing: list[str] = []
    for offender in verdict.offenders:
        if offender.name not in layout.gradients or offender.ratio == 0:
            missing.append(offender.name)
        elif _remains(offender) < PURE:
            pure.setdefault(float(f"{offender.ratio:.3g}"), []).append(offender)
        else:
            other.append(offender)
    nearly = pure.pop(1.0, [])
    if not (missing or pure or other):
        other = nearly
    if missing:
        yield f"No gradient arrives at {_group(missing, everything)}: something detaches it, or leaves it out."
    for ratio, offenders in sorted(pure.items(), key=lambda pair: -len(pair[1])):
        names = [offender.name for offender in offenders]
        hint = _size_hint(ratio, layout)
        if len(names) == len(layout.gradients):
            yield (
                f"Every gradient is {ratio:g} times what it should be: an averaging factor. SHARD transforms must "
                f"average over R = dp_replicate × dp_shard × cp = {layout.layout.averaged}, and nobody else may.{hint}"
            )
        else:
            yield (
                f"The gradients of {_group(names, everything)} are {ratio:g} times what they should be, and no others: "
                f"an averaging factor of that group alone.{hint}"
            )
    if other:
        names = [offender.name for offender in other]
        axes = _axes_apart(names, layout)
        where = f", and differ between ranks along {' and '.join(axes)}" if axes else ""
        cause = (
            f"they are not reduced over {' and '.join(axes)}: each rank keeps what its own part of the data or of the "
            "sequence gave"
            if axes
            else "a contribution is missing or counted twice, or the forward pass computes something else there"
        )
        yield f"The gradients of {_group(names, everything)} are wrong{where}: {cause}."


def _loss(verdict: Verdict, failed: Mapping[str, object], one: Recording, layout: Recording) -> Iterator[str]:
    tolerance = next((check.tolerance for check in verdict.checks if check.name == "loss"), float("inf"))
    start, ours = verdict.losses[0]
    at_start = abs(start - ours) <= tolerance * abs(start)
    if not at_start:
        hint = _size_hint(ours / start, layout) if start else ""
        yield (
            f"The loss differs from the first step on ({start:.7g} and {ours:.7g}) from equal weights and data: the "
            f"forward pass computes something else, or the mean is not over the unmasked tokens of all ranks.{hint}"
        )
        return
    if verdict.offenders:
        return
    norms = one.first.norms[0], layout.first.norms[0]
    if "grad_norm" in failed and abs(norms[0] - norms[1]) > 1e-4 * norms[0]:
        yield (
            f"All gradients are right and their global norm is not ({norms[0]:.7g} and {norms[1]:.7g}): a sharded "
            "parameter counts once over its mesh, a replicated one once in all. Clipping scales by it."
        )
    elif "loss" in failed:
        yield (
            "The first step agrees and later ones do not: the optimizer or clipping treats shards as whole tensors, or "
            "gathered weights were not dropped (Applied.release)."
        )
    if "replicas" in failed:
        apart = [name for name in layout.first.weights if _axes_apart([name], layout, weights=True)]
        axes = _axes_apart(apart, layout, weights=True)
        yield (
            f"{_group(apart, layout.parameters) if apart else 'Loss or norm'} differ between ranks that hold replicas"
            f"{' along ' + ' and '.join(axes) if axes else ''}: their gradients, or what the optimizer does with them, "
            "are not the same on all of them."
        )


def _remains(offender: Offender) -> float:
    """What is left of a gradient beside its multiple of the reference, relative to the reference: from
    ‖g − r‖² = (k − 1)²‖r‖² + ‖g − k r‖²."""
    return float(max(offender.error**2 - (offender.ratio - 1) ** 2, 0.0) ** 0.5) / max(abs(offender.ratio), 1e-12)


def _size_hint(ratio: float, layout: Recording) -> str:
    sizes = {axis: size for axis, size in layout.layout.axes().items() if size > 1}
    sizes["R"] = layout.layout.averaged
    found = [
        f"{axis} is {size}"
        for axis, size in sizes.items()
        if size > 1 and (abs(ratio - size) < 1e-3 * size or abs(ratio * size - 1) < 1e-3)
    ]
    return f" ({', '.join(found)}.)" if found else ""


def _group(names: Sequence[str], parameters: Mapping[str, str]) -> str:
    """A set of parameters in as few words as tell it apart from the others."""
    rest = set(parameters) - set(names)
    if not rest:
        return "all parameters"
    few = ", ".join(names[:3]) + (f", … {len(names) - 3} more" if len(names) > 3 else "")
    roles = {parameters.get(name, "") for name in names}
    if len(roles) == 1 and "" not in roles and not any(parameters[name] in roles for name in rest):
        return f"the {roles.pop()} ({few})"
    patterns = {re.sub(r"\d+", "*", name) for name in names}
    if len(names) > 1 and not any(re.sub(r"\d+", "*", name) in patterns for name in rest) and len(patterns) <= 3:
        return f"{', '.join(sorted(patterns))} ({len(names)})"
    if all("norm" in name for name in names):
        return f"norms ({few})"
    return few


def _axes_apart(names: Sequence[str], layout: Recording, *, weights: bool = False) -> list[str]:
    """The axes along which ranks that hold the same piece of a tensor have other bytes."""
    sizes = [getattr(layout.layout, axis) for axis in ORDER]
    found = set()
    for number, axis in enumerate(ORDER):
        step = 1
        for size in sizes[number + 1 :]:
            step *= size
        for rank in layout.ranks:
            if rank.rank // step % sizes[number] == 0:
                continue
            neighbour = layout.ranks[rank.rank - step]
            if any(_differ(_pieces(rank, weights), _pieces(neighbour, weights), name) for name in names):
                found.add(axis)
    return [axis for axis in ORDER if axis in found]


def _pieces(rank: Record, weights: bool) -> Mapping[str, Fingerprint]:
    return rank.weights if weights else rank.gradients


def _differ(one: Mapping[str, Fingerprint], other: Mapping[str, Fingerprint], name: str) -> bool:
    a, b = one.get(name), other.get(name)
    return a is not None and b is not None and a[0] == b[0] and a[1] != b[1]
