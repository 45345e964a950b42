"""The metrics of two runs, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forge_train.run.records import TIMINGS

from ..run_folder import RunFolder

_ASIDE = TIMINGS | {"version", "timing", "step"}


@dataclass(frozen=True)
class Difference:
    """A number that differs."""

    step: int
    key: str
    packed: Any
    here: Any

    @property
    def relative(self) -> float | None:
        """|a − b| / max(|a|, |b|); None for what has none."""
        numbers = [one for one in (self.packed, self.here) if isinstance(one, (int, float)) and math.isfinite(one)]
        if len(numbers) != 2:
            return None
        return abs(numbers[0] - numbers[1]) / (max(map(abs, numbers)) or 1.0)


@dataclass(frozen=True)
class Compared:
    """The comparison of a repeated run with its pack. Times and speeds are left out."""

    steps: int
    """Logged steps that both have."""
    keys: tuple[str, ...]
    """Metrics that were compared."""
    evaluations: int
    """Evaluations that both have."""
    missing: int
    """Logged steps and evaluations of the pack that this run lacks."""
    first: Difference | None
    """At the earliest step that differs."""
    largest: Difference | None
    """With the largest relative difference."""
    differing: int
    """Steps that differ."""

    @property
    def equal(self) -> bool:
        """Return True if something was compared, and all of it was equal to the bit."""
        return bool(self.steps or self.evaluations) and self.first is None

    def as_json(self) -> dict[str, Any]:
        return {"equal": self.equal, **asdict(self), "keys": list(self.keys)}

    def described(self) -> str:
        """In a sentence or two."""
        if not self.steps and not self.evaluations:
            return "Nothing was compared: the pack and this run have no logged step and no evaluation in common."
        what = f"{self.steps:,} logged steps ({', '.join(self.keys)})" if self.steps else ""
        held = f"{self.evaluations:,} evaluation{'s' * (self.evaluations > 1)}" if self.evaluations else ""
        both = " and ".join(filter(None, (what, held)))
        short = f" {self.missing:,} more in the pack were not repeated." if self.missing else ""
        if self.first is None or self.largest is None:
            return f"Equal bit for bit: {both}.{short}"
        text = f"The first difference is at step {self.first.step}: {_told(self.first)}."
        if self.largest != self.first:
            text += f" The largest is at step {self.largest.step}: {_told(self.largest)}."
        return f"{text} {self.differing:,} of the steps differ; compared: {both}.{short}"


def compare(packed: RunFolder, here: RunFolder) -> Compared:
    """Compare what two runs logged and evaluated, at each step that both have."""
    lines = _common(packed.metrics, here.metrics)
    held = _common(packed.evaluations, here.evaluations)
    found = [*_differences(lines.pairs), *_differences(held.pairs, "held out ")]
    found.sort(key=lambda one: one.step)
    sized = [one for one in found if one.relative is not None]
    keys = dict.fromkeys(key for then, now in lines.pairs for key in (*_compared(then, now),))
    return Compared(
        steps=len(lines.pairs),
        keys=tuple(keys),
        evaluations=len(held.pairs),
        missing=lines.missing + held.missing,
        first=found[0] if found else None,
        largest=max(sized, key=lambda one: one.relative or 0.0) if sized else found[0] if found else None,
        differing=len({one.step for one in found}),
    )


@dataclass(frozen=True)
class _Common:
    pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]]
    missing: int


def _common(then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> _Common:
    steps = {line["step"]: line for line in now}
    before = {line["step"]: line for line in then}  # a step that was repeated counts once
    pairs = [(line, steps[step]) for step, line in before.items() if step in steps]
    return _Common(pairs, len(before) - len(pairs))


def _compared(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[str]:
    """Keys of both that do not differ from run to run."""
    aside = _ASIDE.union(then.get("timing") or (), now.get("timing") or ())
    return [key for key in {**then, **now} if key not in aside]


def _differences(
    pairs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]], prefix: str = ""
) -> Iterable[Difference]:
    for then, now in pairs:
        for key in _compared(then, now):
            before, after = then.get(key), now.get(key)
            if not (before == after or _both_nan(before, after)):
                yield Difference(then["step"], f"{prefix}{key}", before, after)


def _both_nan(first: Any, second: Any) -> bool:
    return all(isinstance(one, float) and math.isnan(one) for one in (first, second))


def _told(one: Difference) -> str:
    by = "" if one.relative is None else f" (relative {one.relative:.1e})"
    return f"{one.key} is {one.here!r} here and {one.packed!r} in the pack{by}"
