"""Patterns of wrong gradients, and parameters in words."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from forge_train.base.format import format_list

from ..planning.meshes import groups
from .recording import Fingerprint, Recording
from .updates import remainder
from .verdict import Offender

PURE = 1e-3
"""A gradient is a pure multiple of what it should be if so little of it remains beside that multiple."""
ROUNDING = 0.05
"""Gradients further from what they should be differ by more than a dtype."""
Kept = Literal["gradients", "last_gradients", "weights"]


def of_gradients(offenders: Sequence[Offender], layout: Recording, *, later: bool = False) -> Iterator[str]:
    """Explain wrong gradients of the first step, or of a later one."""
    everything = layout.parameters
    of = " of a later step" if later else ""
    end = " Those of the first step are right." if later else ""
    missing, pure, other = sorted_out(offenders, layout)
    nearly = pure.pop(1.0, [])
    if not (missing or pure or other):
        other = nearly
    if missing:
        nobody = not set(everything) - set(missing)
        arrives = f"No {'parameter receives a ' if nobody else ''}gradient{of}"
        arrives += "" if nobody else f" arrives at {group(missing, everything)}"
        yield f"{arrives}: something detaches it, or leaves it out.{end}"
    for ratio, found in sorted(pure.items(), key=lambda pair: -len(pair[1])):
        names = [offender.name for offender in found]
        hint = size_hint(ratio, layout)
        if len(names) == len(layout.gradients):
            flattened, size = layout.layout.table.flattened, layout.layout.shard_average_size
            added = [name for name in flattened["data"] if name not in flattened["dp_cp"]]
            others = "".join(
                f", the transform that covers {name!r} over its {layout.layout.size(name)}" for name in added
            )
            yield (
                f"Every gradient{of} is {ratio:g} times what it should be: an averaging factor. SHARD transforms must "
                f"average over {' × '.join(flattened['dp_cp'])} = {size}{others}, and nobody else may.{hint}{end}"
            )
        else:
            yield (
                f"The gradients{of} of {group(names, everything)} are {ratio:g} times what they should be, and no "
                f"others: an averaging factor of that group alone, or a constant in a plugin: verify without each of "
                f"yours.{hint}{end}"
            )
    if other:
        names = [offender.name for offender in other]
        axes = axes_apart(names, layout, "last_gradients" if later else "gradients")
        if not axes and _rounded(other):
            yield (
                f"The gradients{of} of {group(names, everything)} differ by {other[0].error:.0e}, as rounding does: "
                "something on the layout computes in a narrower dtype, or rounds to one. The largest difference is at "
                f"{other[0].name}.{end}"
            )
            return
        where = f", and differ between ranks along {' and '.join(axes)}" if axes else ""
        cause = (
            f"they are not reduced over {' and '.join(axes)}: each rank keeps what its own part of the data or of the "
            "sequence gave"
            if axes
            else "a contribution is missing or counted twice, or the forward pass computes something else there"
            + (", or with weights of an earlier step, which were not dropped (Applied.free_gathered)" if later else "")
        )
        yield f"The gradients{of} of {group(names, everything)} are wrong{where}: {cause}.{end}"


def unexplained(offenders: Sequence[Offender], layout: Recording) -> bool:
    """Return True if gradients are wrong, and neither multiples of the right ones nor left unreduced."""
    other = [one.name for one in sorted_out(offenders, layout)[2]]
    return bool(other) and not axes_apart(other, layout, "gradients")


def sorted_out(
    offenders: Sequence[Offender], layout: Recording
) -> tuple[list[str], dict[float, list[Offender]], list[Offender]]:
    """Gradients that do not arrive, those that are a multiple of what they should be, by the factor, and others."""
    missing: list[str] = []
    pure: dict[float, list[Offender]] = {}
    other: list[Offender] = []
    for offender in offenders:
        if offender.name not in layout.gradients or offender.ratio == 0:
            missing.append(offender.name)
        elif remainder(offender) < PURE:
            pure.setdefault(float(f"{offender.ratio:.3g}"), []).append(offender)
        else:
            other.append(offender)
    return missing, pure, other


def _rounded(offenders: Sequence[Offender]) -> bool:
    """Return True if gradients differ as by rounding: slightly, and in direction rather than length."""
    return offenders[0].error < ROUNDING and all(
        abs(one.ratio - 1) < max(0.3 * one.error, 1e-4) or one.error < 0.1 * offenders[0].error for one in offenders
    )


def size_hint(ratio: float, layout: Recording) -> str:
    """The sizes of the layout that a wrong factor may come from."""
    sizes = {axis: size for axis, size in layout.layout.axes().items() if size > 1}
    sizes["the number of ranks that gradients are averaged over"] = layout.layout.grad_average_size
    found = [
        f"{axis} is {size}"
        for axis, size in sizes.items()
        if size > 1 and (abs(ratio - size) < 1e-3 * size or abs(ratio * size - 1) < 1e-3)
    ]
    return f" ({', '.join(found)}.)" if found else ""


def group(names: Sequence[str], parameters: Mapping[str, str]) -> str:
    """A set of parameters in as few words as tell it apart from the others."""
    rest = set(parameters) - set(names)
    if not rest:
        return "all parameters"
    first = format_list(names)
    roles = {parameters.get(name, "") for name in names}
    if len(roles) == 1 and "" not in roles and not any(parameters[name] in roles for name in rest):
        return f"the {roles.pop()} ({first})"
    patterns = {re.sub(r"\d+", "*", name) for name in names}
    if len(names) > 1 and not any(re.sub(r"\d+", "*", name) in patterns for name in rest) and len(patterns) <= 3:
        return f"{', '.join(sorted(patterns))} ({len(names)})"
    if all("norm" in name for name in names):
        return f"norms ({first})"
    return first


def axes_apart(names: Sequence[str], layout: Recording, what: Kept) -> list[str]:
    """The axes along which ranks that hold the same piece of a tensor have other bytes."""
    sizes = layout.layout.domain("dense")

    def apart(axis: str) -> bool:
        return any(
            _differ(getattr(layout.ranks[one], what), getattr(layout.ranks[other], what), name)
            for group in groups(sizes, axis)
            for one, other in itertools.pairwise(group)
            for name in names
        )

    return [axis for axis in sizes if apart(axis)]


def _differ(one: Mapping[str, Fingerprint], other: Mapping[str, Fingerprint], name: str) -> bool:
    a, b = one.get(name), other.get(name)
    return a is not None and b is not None and a[0] == b[0] and a[1] != b[1]
