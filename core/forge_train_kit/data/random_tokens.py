"""Random tokens, each a function of (seed, position): nothing is read or stored, and nothing is to be learned."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_train import MASKED, ConfigError

from .documents import Int64
from .permutation import scramble
from .rows import Arrays


class RandomTokens:
    """A `Stream`: one endless text of documents, cut every `sequence` tokens; sample i is its i-th stretch.

    Tokens are uniform and independent, so no model's loss falls below ln(vocabulary). A document ends after each token
    with the same probability: lengths are geometric. Rows are as those of `SplitRows`.

    Args:
        sequence: tokens of a row.
        vocabulary: number of token ids.
        length: mean tokens of a document.
        seed: of all of it.
        isolate: whether documents of one row are kept apart.
        key: the section that messages name.
    """

    def __init__(self, sequence: int, vocabulary: int, length: int, *, seed: int, isolate: bool, key: str) -> None:
        self._sequence, self._vocabulary, self._isolate, self._key = sequence, vocabulary, isolate, key
        self._end_below = np.uint64(2**64 // length - 1)
        self._keys = scramble(np.array([seed % 2**64, (seed + 1) % 2**64], np.uint64))
        settings = f"{sequence} {vocabulary} {length} {seed} {isolate}"
        self.digest = hashlib.blake2b(settings.encode(), digest_size=16).hexdigest()

    def places(self, index: Int64) -> Int64:
        return index

    def read(self, places: Int64) -> Arrays:
        columns = np.arange(self._sequence + 1, dtype=np.int64)
        at = (places[:, None] * self._sequence + columns).astype(np.uint64)
        ids = _below(scramble(at ^ self._keys[0]), self._vocabulary)
        inputs, labels = ids[:, :-1].copy(), ids[:, 1:].copy()
        if not self._isolate:
            return Arrays(inputs, labels)
        ends = scramble(at[:, :-1] ^ self._keys[1]) <= self._end_below
        labels[ends] = MASKED
        begins = np.zeros_like(ends)
        begins[:, 1:] = ends[:, :-1]
        first = np.maximum.accumulate(np.where(begins, columns[:-1], 0), axis=1)
        return Arrays(inputs, labels, columns[:-1] - first, begins.cumsum(axis=1))

    def where(self, place: Int64) -> str:
        return "computed, and not read"

    def after(self, place: Int64) -> Int64:
        return np.asarray(place + 1)

    def state_dict(self, samples: int) -> dict[str, Any]:
        return {"corpus": self.digest}

    def load_state_dict(self, state: Mapping[str, Any], samples: int) -> None:
        if state.get("corpus", self.digest) != self.digest:
            raise ConfigError(
                f"{self._key}: these are not the tokens that the state was saved with: a setting changed."
            )


def _below(random: NDArray[np.uint64], n: int) -> Int64:
    """Numbers from 0 to n-1, n below 2³², out of 64 random bits each."""
    return ((random >> np.uint64(32)) * np.uint64(n) >> np.uint64(32)).astype(np.int64)
