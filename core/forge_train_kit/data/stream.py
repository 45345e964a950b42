"""The global sequence of samples, a pure function of (seed, index): no list, no state but a number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from forge_train import ConfigError

from .balance import Costs
from .documents import Int64
from .permutation import permute
from .rows import Arrays, Rows

HELD_OUT_SEED = 0x1E57
"""Of the order of held-out rows, the same for all runs, so that a few batches are a fair sample and stay the same."""


class Stream(Protocol):
    """Samples by index, without end.

    A stream of held-out data may have an attribute `samples`, the number of samples that count: those after them are
    read with all labels masked, and with `Arrays.sources` of -1. One of training data may have `epoch`, the number of
    samples of an epoch, for `train.epochs`. One whose samples differ in what they cost may have `costs(places)`, as
    `Rows.costs`: within a global batch, samples are then spread over micro-batches and ranks by it.
    """

    digest: str
    """Of everything that decides what sample i is, but the seed."""

    def places(self, index: Int64) -> Int64:
        """Return the places of samples, `[k]` → `[k, …]`; called for many samples at a time."""
        ...

    def read(self, places: Int64) -> Arrays:
        """The samples of some places, `[k, …]`. Called by several threads at once, or in another process, where samples
        are read ahead: a stream for which that is right can be pickled."""
        ...

    def where(self, place: Int64) -> str:
        """Describe the sample at one place, `[…]`, for messages: file and document, or file and token."""
        ...

    def after(self, place: Int64) -> Int64:
        """The place that stands in for one that can't be read: the next one of its source."""
        ...

    def state_dict(self, samples: int) -> dict[str, Any]:
        """Return the state with which to resume after this many samples; JSON only."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], samples: int) -> None:
        """Go on from there.

        Raises:
            ConfigError: the state belongs to other content.
        """
        ...


class Ordered:
    """One source, epoch after epoch: sample i is row i mod n of epoch i // n, each in an order of its own.

    Args:
        rows: of the source.
        seed: of the order; None keeps the rows'.
        key: the plugin's section, which messages name.
        fixed: for held-out rows: every epoch has the order of epoch 0, and only epoch 0 counts.
    """

    def __init__(self, rows: Rows, seed: int | None, *, key: str, fixed: bool = False) -> None:
        self.rows, self._seed, self._key, self._fixed = rows, seed, key, fixed
        self.digest = rows.digest
        self.samples = rows.count if fixed else None
        self.epoch = None if fixed else rows.count
        self.costs: Callable[[Int64], Costs] | None = getattr(rows, "costs", None)

    def places(self, index: Int64) -> Int64:
        count = self.rows.count
        epoch, row = index // count, index % count
        if self._seed is None:
            return row
        return permute(row, np.zeros_like(epoch) if self._fixed else epoch, count, self._seed)

    def read(self, places: Int64) -> Arrays:
        return self.rows.read(places)

    def where(self, place: Int64) -> str:
        return self.rows.where(int(place))

    def inside(self, place: Int64) -> Iterable[Any]:
        """The items of a row; see `ItemRows`."""
        inside = getattr(self.rows, "inside", None)
        return () if inside is None else inside(int(place))

    def after(self, place: Int64) -> Int64:
        return np.asarray((place + 1) % self.rows.count)

    def state_dict(self, samples: int) -> dict[str, Any]:
        return {"corpus": self.digest}

    def load_state_dict(self, state: Mapping[str, Any], samples: int) -> None:
        if state.get("corpus", self.digest) != self.digest:
            raise ConfigError(
                f"{self._key}: the corpus is not the one this state was saved with: the files' content, the tokenizer "
                f"or a setting of [{self._key}] changed. Restore it, or start a new run from the checkpoint's weights "
                "(train.init_from)"
            )
