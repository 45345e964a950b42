"""A text guesses its own next tokens: those that followed where its last ones stood before.

Prompt lookup decoding (A. Saxena, https://github.com/apoorvumang/prompt-lookup-decoding), with more guesses the longer
a place was right before, as in SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from forge_train.base.errors import ConfigError
from forge_train.contract.model import Model
from forge_train.plugin.job import Job

from .guessing import Guessing, slots_of, undoing

GRAM = 2
"""Tokens that must have stood there before."""
DOUBT = 3
"""Most tokens that a place must have guessed right before it is asked."""


def check(job: Job, model: Model, most: int) -> None:
    """Check that a model can have its guesses taken back; every rank of a layout calls this.

    Raises:
        ConfigError: explaining why not, on all ranks.
    """
    lacks = ""
    try:
        undoing(job, model, slots_of(job, most, 1, 1))
    except TypeError as error:
        lacks = str(error)
    if lacks := next(filter(None, job.dist.gather_objects(lacks)), ""):
        raise ConfigError(f"This model can't undo wrong guesses: {lacks}. Leave lookup out.")


def memory(job: Job, model: Model, most: int, places: int, capacity: int) -> Guessing:
    """Memory of rows whose texts guess.

    Args:
        job: of the model.
        model: one that `check` accepts.
        most: most tokens to guess at once.
        places: most rows side by side.
        capacity: length of the longest row so far.
    """
    slots = slots_of(job, most, places, capacity)
    return Guessing(slots, undoing(job, model, slots), TextGuesser(most))


class TextGuesser:
    """Guesses from the tokens of each row alone, which all ranks know that compute it.

    Args:
        most: most tokens of a row to guess at once.
    """

    def __init__(self, most: int) -> None:
        self._most, self._texts = most, list[Text]()

    def begin(self, place: int, ids: Sequence[int], length: int) -> Callable[[Tensor], None] | None:
        self._texts[place:] = [Text()]
        return None

    def idle(self) -> Callable[[Tensor], None] | None:
        return None

    def guess(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        return [text.guess(ids, self._most) for text, ids in zip(self._texts, rows, strict=True)]

    def checked(self, counts: Sequence[int], hidden: Tensor) -> None:
        """Rows tell by their tokens what was accepted."""

    def end(self, place: int, last: int) -> None:
        self._texts[place] = self._texts[last]
        del self._texts[last]


class Text:
    """The tokens of a row, read once: an earlier place that continues as the row does, and for how long it has.

    A new place may guess one token, and one more for each that it has guessed right. After places that were wrong from
    the beginning, a new one must first be right without being asked: a text that does not repeat itself costs little.
    """

    def __init__(self) -> None:
        self._read = 0
        self._after: dict[tuple[int, ...], int] = {}
        """Last tokens → the place after them, where they stood last."""
        self._place: int | None = None
        """Of the token that is guessed next."""
        self._right = 0
        """Number of tokens that this place, counting on, has guessed right."""
        self._doubt = 0
        """Tokens that it must have guessed right."""

    def guess(self, ids: Sequence[int], most: int) -> list[int]:
        """The next tokens.

        Args:
            ids: the tokens so far: those of the last call, and further ones.
            most: most tokens to guess.
        """
        for at in range(self._read, len(ids)):
            self._compare(ids, at)
            last = tuple(ids[max(at + 1 - GRAM, 0) : at + 1])
            if self._place is None:
                self._place, self._right = self._after.get(last), 0
            self._after[last] = at + 1
        self._read = len(ids)
        if self._place is None or self._right < self._doubt:
            return []
        found = list(ids[self._place : self._place + min(most, 1 + self._right)])
        while len(found) < min(most, 1 + self._right):  # the place is near the end: the text goes round
            found.append(found[self._place - len(ids)])
        return found

    def _compare(self, ids: Sequence[int], at: int) -> None:
        """Compare a new token with the guess, asked for or not."""
        if self._place is None:
            return
        if ids[self._place] == ids[at]:
            self._place, self._right, self._doubt = self._place + 1, self._right + 1, max(self._doubt - 1, 0)
            return
        if not self._right:
            self._doubt = min(self._doubt + 1, DOUBT)
        self._place = None
