"""Rehearsed points: the few layouts of a short model from which closed forms give all others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from forge_train.base.errors import ConfigError

from .composing import Composer, Point, Sizes
from .variants import Choice, Options, Variant

DATA = "data_parallel"


@dataclass(frozen=True)
class Kinds:
    """Choices of a candidate that decide its memory and its work; the schedule of a pipeline comes after them."""

    data: Choice
    others: tuple[tuple[str, Choice], ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.data, self.others))

    def __hash__(self) -> int:
        """Computed once, as caches ask for it a hundred times for each candidate."""
        return self._hash


class Points:
    """Rehearses a point when a form first asks for it.

    Args:
        composer: composes short models.
        options: of the search.
    """

    def __init__(self, composer: Composer, options: Options) -> None:
        self.composer, self.options = composer, options
        self.base = Kinds(
            options.others[DATA][0] if DATA in options.others else Choice(),
            tuple((kind, choices[0]) for kind, choices in options.others.items() if kind != DATA),
        )
        self.at = cache(self._at)
        self.kinds = cache(self._kinds)
        self._known: dict[Kinds, Kinds] = {}
        self.count = 0
        self.notes: dict[str, None] = {}

    def _kinds(self, variant: Variant) -> Kinds:
        """The kinds of a variant; one object for all that are equal."""
        others = tuple((kind, one) for kind, one in variant.choices if kind in self.options.others and kind != DATA)
        kinds = Kinds(variant.of(DATA), others)
        return self._known.setdefault(kinds, kinds)

    def variant(self, kinds: Kinds, axes: Mapping[str, int]) -> Variant:
        """The plugins for a point: those of its kinds, and of each axis above 1."""
        needed = [(axis, self.options.axes[axis][0]) for axis in self.options.axes if axes.get(axis, 1) > 1]
        if axes.get("etp", 1) > 1 and axes.get("ep", 1) == 1 and "ep" in self.options.axes:
            needed.append(("ep", self.options.axes["ep"][0]))
        data = [(DATA, kinds.data)] if DATA in self.options.others else []
        return Variant((*needed, *kinds.others, *data))

    def _at(
        self, kinds: Kinds, sizes: tuple[tuple[str, int], ...], micro_batch: int = 1, accumulation: int = 1
    ) -> Point:
        axes: Sizes = dict(sizes)
        self.count += 1
        found = self.composer.rehearse(
            self.variant(kinds, axes), axes, micro_batch=micro_batch, accumulation=accumulation
        )
        if not found.rest["flops"]:
            raise ConfigError(f"The search needs a step that can be rehearsed: {'; '.join(found.notes)}.")
        self.notes.update(dict.fromkeys(found.notes))
        return found
