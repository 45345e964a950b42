"""Several sources as one stream, in proportions that hold over any stretch of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_train import ConfigError

from .balance import Costs
from .documents import Int64
from .proportions import Recipe
from .rows import Arrays
from .stream import Ordered

if TYPE_CHECKING:
    from .items import RowItems


@dataclass(frozen=True, slots=True)
class Part:
    """One source of a mixture."""

    name: str
    stream: Ordered


class Mixture:
    """Sample i comes from the source that its place in the proportions says, and is the next sample of that source.

    The state is the number of samples that each source has given, and where the proportions were last changed. A run
    that continues with other weights, caps or phases, or with a source more, takes up each source where it was; caps
    count what a source really gave.

    Args:
        parts: the sources.
        recipe: their proportions; every name of a part is in it.
        key: the section that messages name.
        no_items: items of a row that has none, if some sources have items.
    """

    def __init__(
        self, parts: Sequence[Part], recipe: Recipe, *, key: str, no_items: Mapping[str, RowItems] | None = None
    ) -> None:
        self._no_items = no_items
        self._parts = {part.name: part for part in parts}
        self._streams = [self._parts[name].stream for name in recipe.names]
        self._recipe, self._key = recipe, key
        self._begin(0, {})
        self.costs = self._costs if any(stream.costs for stream in self._streams) else None
        counts = [part.stream.samples for part in parts]
        self.samples = None if None in counts else sum(count or 0 for count in counts)
        self.digest = hashlib.blake2b(json.dumps(self._digests).encode(), digest_size=16).hexdigest()

    def _begin(self, start: int, given: Mapping[str, int]) -> None:
        """Have the recipe hold from a sample on, before which each source had given something."""
        self._start, self._before = start, {name: int(given.get(name, 0)) for name in self._recipe.names}
        self._offset = np.array(list(self._before.values()), np.int64)
        self._phases, self._short = self._recipe.phases(start, self._before)

    @property
    def _digests(self) -> dict[str, str]:
        return {name: self._parts[name].stream.digest for name in self._recipe.names}

    def given(self, samples: int) -> dict[str, int]:
        """Return how many of the first samples come from each source."""
        counts = self._phases.counts(samples - self._start) + self._offset
        return dict(zip(self._recipe.names, counts.tolist(), strict=True))

    def places(self, index: Int64) -> Int64:
        """`[k]` → `[k, 2]`: the source, and the place in it.

        Raises:
            ConfigError: all sources are used up before the end. Only now: a resumed run says later what they gave.
        """
        if self._short:
            raise ConfigError(self._short)
        source, number = self._phases.at(index - self._start)
        found = np.stack([source, number + self._offset[source]], axis=1)
        for at in np.unique(source).tolist():
            here = source == at
            found[here, 1] = self._streams[at].places(found[here, 1])
        return found

    def _costs(self, places: Int64) -> Costs:
        """See `Rows.costs`; 0 where a source does not predict them."""
        found = np.zeros(len(places))
        for at, stream in enumerate(self._streams):
            here = places[:, 0] == at
            if stream.costs is not None and here.any():
                found[here] = stream.costs(places[here, 1])
        return found

    def read(self, places: Int64) -> Arrays:
        source, row = places[:, 0], places[:, 1]
        every: list[int] = np.unique(source).tolist()
        if len(every) == 1:
            found = self._streams[every[0]].read(row)
            same = np.full(len(found.inputs), every[0])  # a bucket has several sequences
            return replace(found, sources=same, items=found.items or self._without(len(found.inputs)))
        parts = [(source == at, self._streams[at].read(row[source == at])) for at in every]
        fields = ("inputs", "labels", "position_ids", "document_ids")
        joined = {name: _joined(name, parts) for name in fields}
        weights = None
        if any(part.weights is not None for _, part in parts):
            weights = np.ones(joined["inputs"].shape, np.float32)
            for here, part in parts:
                weights[here] = 1 if part.weights is None else part.weights
        return Arrays(**joined, sources=source.copy(), weights=weights, items=self._items(parts, len(source)))

    def inside(self, place: Int64) -> Iterable[Any]:
        """The items of a row; see `ItemRows`."""
        return self._streams[int(place[0])].inside(place[1])

    def _without(self, rows: int) -> tuple[Mapping[str, RowItems], ...] | None:
        return None if self._no_items is None else (self._no_items,) * rows

    def _items(self, parts: Sequence[tuple[Any, Arrays]], rows: int) -> tuple[Mapping[str, RowItems], ...] | None:
        """Those of each row, at its place."""
        if self._no_items is None:
            return None
        joined = [self._no_items] * rows
        for here, part in parts:
            for at, items in zip(np.flatnonzero(here).tolist(), part.items or (), strict=False):
                joined[at] = items
        return tuple(joined)

    def where(self, place: Int64) -> str:
        return f"{self._phases.names[int(place[0])]}: {self._streams[int(place[0])].where(place[1])}"

    def after(self, place: Int64) -> Int64:
        return np.stack([place[0], self._streams[int(place[0])].after(place[1])])

    def state_dict(self, samples: int) -> dict[str, Any]:
        """Return each source's count and digest, and the sample from which these proportions hold."""
        since = {"recipe": self._recipe.digest, "sample": self._start, "given": self._before}
        return {"given": self.given(samples), "sources": self._digests, "since": since}

    def load_state_dict(self, state: Mapping[str, Any], samples: int) -> None:
        """Take up each source where it was. Proportions that changed hold from here on.

        Raises:
            ConfigError: a source of the same name has other content.
        """
        if "given" not in state:  # a place alone: that of these very proportions
            self._begin(0, {})
            return
        known = state["sources"]
        for name, digest in self._digests.items():
            if known.get(name, digest) != digest:
                raise ConfigError(
                    f"{self._key}.sources: {name!r} is not what this state was saved with: its content or its packing "
                    "changed. Give the new one another name."
                )
        since = state["since"]
        if since["recipe"] == self._recipe.digest:
            self._begin(since["sample"], since["given"])
        else:
            self._begin(samples, state["given"])


def _joined(name: str, parts: Sequence[tuple[Any, Arrays]]) -> Any:
    """The rows of several sources in one array, each at its place."""
    arrays = [(here, getattr(part, name)) for here, part in parts]
    if arrays[0][1] is None:
        return None
    joined = np.empty((len(arrays[0][0]), arrays[0][1].shape[1]), np.int64)
    for here, rows in arrays:
        joined[here] = rows
    return joined
