"""Several sources as one stream, in proportions that hold over any stretch of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forge_train import ConfigError

from .documents import Int64
from .proportions import Phases
from .rows import Arrays
from .stream import Ordered


@dataclass(frozen=True, slots=True)
class Part:
    """One source of a mixture."""

    name: str
    stream: Ordered


class Mixture:
    """Sample i comes from the source that its place in the proportions says, and is the next sample of that source.

    The state is the number of samples that each source has given. A run that goes on with other weights, or with a
    source more, takes up each source where it was.

    Args:
        parts: the sources.
        phases: their proportions, by the index of a sample; every name of a part is in it.
        key: the section that messages name.
    """

    def __init__(self, parts: Sequence[Part], phases: Phases, *, key: str) -> None:
        self._parts = {part.name: part for part in parts}
        self._streams = [self._parts[name].stream for name in phases.names]
        self._phases, self._key = phases, key
        self._shift = np.zeros(len(phases.names), np.int64)
        """What each source had given beyond what the proportions say, since they were changed at a resume."""
        self.digest = hashlib.blake2b(json.dumps(self._digests).encode(), digest_size=16).hexdigest()

    @property
    def _digests(self) -> dict[str, str]:
        return {name: self._parts[name].stream.digest for name in self._phases.names}

    def given(self, samples: int) -> dict[str, int]:
        """How many of the first samples each source has given."""
        counts = self._phases.counts(samples) + self._shift
        return dict(zip(self._phases.names, counts.tolist(), strict=True))

    def places(self, index: Int64) -> Int64:
        """`[k]` → `[k, 2]`: the source, and the place in it."""
        source, number = self._phases.at(index)
        found = np.stack([source, number + self._shift[source]], axis=1)
        for at in np.unique(source).tolist():
            here = source == at
            found[here, 1] = self._streams[at].places(found[here, 1])
        return found

    def read(self, places: Int64) -> Arrays:
        source, row = places[:, 0], places[:, 1]
        every: list[int] = np.unique(source).tolist()
        if len(every) == 1:
            return self._streams[every[0]].read(row)
        parts = [(source == at, self._streams[at].read(row[source == at])) for at in every]
        return Arrays(*(_joined(name, parts) for name in ("inputs", "labels", "position_ids", "document_ids")))

    def state_dict(self, samples: int) -> dict[str, Any]:
        """What each source has given, and what it is."""
        return {"given": self.given(samples), "sources": self._digests}

    def load_state_dict(self, state: Mapping[str, Any], samples: int) -> None:
        """Take up each source where it was.

        Raises:
            ConfigError: a source of the same name has other content.
        """
        if "given" not in state:  # a place alone: that of these very proportions
            self._shift = np.zeros_like(self._shift)
            return
        known = state["sources"]
        for name, digest in self._digests.items():
            if known.get(name, digest) != digest:
                raise ConfigError(
                    f"{self._key}.sources: {name!r} is not what this state was saved with: its content or its packing "
                    "changed. Give the new one another name."
                )
        before = np.array([state["given"].get(name, 0) for name in self._phases.names], np.int64)
        self._shift = before - self._phases.counts(samples)


def _joined(name: str, parts: Sequence[tuple[Any, Arrays]]) -> Any:
    """The rows of several sources in one array, each at its place."""
    arrays = [(here, getattr(part, name)) for here, part in parts]
    if arrays[0][1] is None:
        return None
    joined = np.empty((len(arrays[0][0]), arrays[0][1].shape[1]), np.int64)
    for here, rows in arrays:
        joined[here] = rows
    return joined
