"""Rows that are given several tokens at once: their newest, and guesses of what follows, which one forward checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from forge_train.contract.model import Model
from forge_train.plugin.job import Job
from forge_train_kit.model import Slots, filled

from ..offline.logits import continues
from .forwards import Call
from .memory import SideBySide, joint

if TYPE_CHECKING:
    from .engine import Row


class Guesser(Protocol):
    """Guesses the next tokens of rows; the ranks that compute a row must agree on its guesses."""

    def begin(self, place: int, ids: Sequence[int], length: int) -> Callable[[Tensor], None] | None:
        """A row begins that may grow to a length; gives what to call with the hidden states of its prompt."""
        ...

    def idle(self) -> Callable[[Tensor], None] | None:
        """Other ranks have a row begin, and this one has none."""
        ...

    def guess(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Guesses for each row, of which tokens were added since; without rows, on a rank that has none."""
        ...

    def checked(self, counts: Sequence[int], hidden: Tensor) -> None:
        """The model has seen so many tokens of each row: its newest, and guesses."""
        ...

    def end(self, place: int, last: int) -> None:
        """A row ends; the last one takes its place."""
        ...


def chosen(
    rows: Sequence[Row], logits: Iterable[Tensor], guesses: Sequence[Sequence[int]]
) -> list[tuple[int, list[Any]]]:
    """The number of guesses of each row, and its choices: the guesses that it would have chosen, and one more.

    Args:
        rows: some.
        logits: after the newest token of the first row, and after each of its guesses; then the next row's.
        guesses: of each row.
    """
    each = iter(logits)
    pairs = zip(rows, guesses, strict=True)
    return [(len(some), _chosen(row, islice(each, 1 + len(some)), some)) for row, some in pairs]


def _chosen(row: Row, logits: Iterator[Tensor], guesses: Sequence[int]) -> list[Any]:
    if not guesses:
        return [row.choose(next(logits))]
    known, found = len(row.ids), list[Any]()
    try:
        for one, guess in zip_longest(tuple(logits), guesses):
            found.append(row.choose(one))
            if guess is None or found[-1].id != guess:
                break
            row.ids.append(guess)
    finally:
        del row.ids[known:]
    return found


class Guessing(SideBySide):
    """Memory of rows that are given several tokens at once, as in arXiv:2211.17192; but a guess is accepted if it is
    what the row chooses, which is the same with and without guesses.

    Before a forward the model has seen tokens 0 … n − 1 of a row, and token n was chosen. The forward is given token n
    and the guesses of those that follow.

    Args:
        slots: places of the rows, with room for guesses.
        caches: of each part of the model.
        guesser: guesses.
    """

    guesses: list[list[int]]
    """Of each row in the forward at hand."""

    def __init__(self, slots: Slots, caches: Mapping[int, Any], guesser: Guesser) -> None:
        super().__init__(slots, caches)
        self._guesser, self._lengths = guesser, list[int]()

    def begin(self, place: int, ids: Sequence[int], length: int) -> Call:
        call = super().begin(place, ids, length)
        self._lengths[place:] = [length]
        call.then = self._guesser.begin(place, ids, length)
        return call

    def idle(self) -> Call:
        call = super().idle()
        call.then = self._guesser.idle()
        return call

    def advance(self, rows: Sequence[Sequence[int]], most: int) -> list[Call]:
        found = self._guesser.guess(rows)
        room = [max(length - len(ids) - 1, 0) for ids, length in zip(rows, self._lengths, strict=True)]
        self.guesses = [some[:most] for some, most in zip(found, room, strict=True)]
        if not rows:
            return [super().idle()]
        counts = [1 + len(some) for some in self.guesses]
        self._slots.advance_by(counts, [len(ids) - 1 for ids in rows])
        given = [(one, at) for ids, some in zip(rows, self.guesses, strict=True)
                 for at, one in enumerate((ids[-1], *some), len(ids) - 1)]  # fmt: skip
        ids, positions = columns(given, self._slots.device)
        return [Call(ids, positions, self._caches, len(given), partial(self._guesser.checked, counts))]

    def end(self, place: int, last: int) -> None:
        super().end(place, last)
        self._guesser.end(place, last)
        self._lengths[place] = self._lengths[last]
        del self._lengths[last]


def slots_of(job: Job, extra: int, places: int, capacity: int) -> Slots:
    """Places of rows with room for so many guesses of each."""
    return Slots(places, capacity, job.device, joint=joint(job), extra=extra)


def undoing(job: Job, model: Model, slots: Slots) -> dict[int, Any]:
    """Caches of this rank's parts that can forget wrong guesses, by number.

    Raises:
        TypeError: there are none; says why.
    """
    parts: Sequence[Any] = model.parts
    if not continues(job) or not all(hasattr(one, "new_slots") for one in parts):
        raise TypeError("the attention kernel can't continue from a cache, or the model has none")
    return {number: one.new_slots(slots) for number, one in enumerate(parts)}


def columns(given: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Tokens and their positions, `[2, tokens, 1]`, with those that do not count."""
    found = [filled(one, 0) for one in zip(*given, strict=True)]
    return torch.tensor(found, device=device).unsqueeze(-1)
