"""Rows of which the modules of a model's tail guess further tokens, which the model checks in one forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_train.base.errors import ConfigError
from forge_train.contract.model import Model
from forge_train.plugin.job import Job
from forge_train_kit import heads, hookspecs
from forge_train_kit.model import Slots, filled

from ..offline.logits import continues
from .forwards import Call, Forwards, replica_of
from .memory import SideBySide, joint
from .sampling import likeliest

if TYPE_CHECKING:
    from .engine import Row


@dataclass
class Drafts:
    """Number of tokens to draft at once, and counts of drafted and accepted ones."""

    tokens: int
    proposed: int = 0
    """Drafted tokens."""
    accepted: int = 0
    """Drafted tokens that were chosen too."""

    def __bool__(self) -> bool:
        return self.tokens > 0

    def count(self, proposed: int, accepted: int) -> None:
        self.proposed += proposed
        self.accepted += accepted

    def __str__(self) -> str:
        return f"{self.accepted:,} of {self.proposed:,} drafts accepted"


def check(job: Job, model: Model, drafts: int) -> None:
    """Check that a model can draft this many tokens at once; every rank of a pipeline calls this.

    Raises:
        ConfigError: explaining why not, on all ranks.
    """
    part, lacks = drafting_part(model), ""
    try:
        if not continues(job) or not all(hasattr(one, "new_slots") for one in model.parts):
            raise TypeError("the attention kernel can't continue from a cache, or the model has none")
        _caches(model, part, _slots(job, drafts, 1, 1))
    except TypeError as error:
        lacks = str(error)
    except IndexError:
        pass  # more drafts than modules
    everybody = job.dist.gather_objects((0 if part is None else part.tail.depths, lacks))
    depths = max(one for one, _ in everybody)
    if not depths:
        raise ConfigError("These weights come without modules that predict further tokens; leave drafts out.")
    if drafts > depths:
        raise ConfigError(f"{drafts} drafts were requested; the model's modules can draft at most {depths} tokens.")
    if lacks := next((one for _, one in everybody if one), ""):
        raise ConfigError(f"This model can't undo wrong drafts: {lacks}. Leave drafts out.")


def drafting_part(model: Model) -> Any:
    """The part with the modules that draft; None on a rank of a pipeline that has another."""
    return next((one for one in model.parts if isinstance(getattr(one, "tail", None), heads.Drafting)), None)


def _slots(job: Job, drafts: int, places: int, capacity: int) -> list[Slots]:
    """Those of the model, then those of each module, which is given tokens again whose followers were drafts."""
    extra = (drafts, *range(drafts, 2 * drafts))
    return [Slots(places, capacity, job.device, joint=joint(job), extra=one) for one in extra]


def _caches(model: Model, part: Any, slots: Sequence[Slots]) -> tuple[dict[int, Any], list[Any]]:
    """Those of this rank's parts by number, and those of the modules, if it has them."""
    parts: Sequence[Any] = model.parts
    own = {number: one.new_slots(slots[0]) for number, one in enumerate(parts)}
    return own, [] if part is None else [part.tail.new_slots(depth, one) for depth, one in enumerate(slots[1:])]


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


@dataclass
class _Row:
    """A row as the modules know it: when they were last called, its first `seen` tokens had followers that stay."""

    length: int
    """Most tokens."""
    seen: int
    given: list[Tensor]
    """Inputs of each module, `[positions, dim]`, from position `seen` − its number on, or 0."""


class Guessing(SideBySide):
    """Memory of rows that are given several tokens at once, as in arXiv:2211.17192; but a guess is accepted if it is
    what the row chooses, which is the same with and without guesses.

    Before a forward the model has seen tokens 0 … n − 1 of a row, and token n was chosen. Module k, from 0, guesses
    token n + 1 + k from the output of the module before it for the tokens up to n − 1. The forward is given token n and
    the guesses.
    """

    guesses: list[list[int]]
    """Of each row in the forward at hand."""

    def __init__(self, job: Job, model: Model, forwards: Forwards, drafts: int, places: int, capacity: int) -> None:
        """
        Args:
            job: its task computes the logits.
            model: one that `check` accepts.
            forwards: of the model.
            drafts: tokens to draft at once.
            places: most rows side by side.
            capacity: length of the longest row so far.
        """
        self._job, self._part, self._forwards, self._drafts = job, drafting_part(model), forwards, drafts
        slots = _slots(job, drafts, places, capacity)
        own, self._deep = _caches(model, self._part, slots)
        super().__init__(slots[0], own)
        self._deep_slots, self._known = slots[1:], list[_Row]()
        self._vocabulary = hookspecs.tokenizer(job).vocabulary
        self._blank = torch.empty(0)
        """Hidden states of a token, for calls that do not count: collectives wait for them."""

    def begin(self, place: int, ids: Sequence[int], length: int) -> Call:
        call = super().begin(place, ids, length)
        call.then = partial(self._begun, place, ids, length)
        return call

    def idle(self) -> Call:
        call = super().idle()
        call.then = self._begun_nothing
        return call

    def advance(self, rows: Sequence[Sequence[int]], most: int) -> list[Call]:
        self.guesses = self._shared(None if self._part is None else self._guessed(rows))
        if not rows:
            return [super().idle()]
        counts = [1 + len(some) for some in self.guesses]
        self._slots.advance_by(counts, [len(ids) - 1 for ids in rows])
        given = [(one, at) for ids, some in zip(rows, self.guesses, strict=True)
                 for at, one in enumerate((ids[-1], *some), len(ids) - 1)]  # fmt: skip
        ids, positions = self._columns(given)
        return [Call(ids, positions, self._caches, len(given), partial(self._checked, counts))]

    def end(self, place: int, last: int) -> None:
        super().end(place, last)
        if self._part is None:
            return
        for slots in self._deep_slots:
            slots.end(place, last)
        self._known[place] = self._known[last]
        del self._known[last]

    # -- around the model's forwards --------------------------------------------------------------

    def _begun(self, place: int, ids: Sequence[int], length: int, hidden: Tensor) -> None:
        """Have the modules read a prompt, up to the tokens whose followers are not known."""
        self._blank = hidden[:, :1]
        seen, inputs = len(ids) - 1, hidden[0]
        given = []
        for depth, slots in enumerate(self._deep_slots):
            count = max(seen - depth, 0)
            slots.grow(length)
            slots.begin(place, count)
            given.append(inputs[count:])
            if count:
                further = torch.tensor([ids[depth + 1 : depth + 1 + count]], device=slots.device)
                positions = torch.arange(count, device=slots.device)[None]
                inputs = self._draft(depth, inputs[None, :count], further, positions, self._deep[depth])[0][0]
            else:
                self._draft_nothing(depth)
                inputs = inputs[:0]
        self._known[place:] = [_Row(length, seen, given)]

    def _begun_nothing(self, hidden: Tensor) -> None:
        self._blank = hidden[:, :1]
        for depth in range(self._drafts):
            self._draft_nothing(depth)

    def _checked(self, counts: Sequence[int], hidden: Tensor) -> None:
        """The model has seen the guesses: the states of those that stay are the first module's next inputs."""
        for row, new in zip(self._known, torch.split(hidden[: sum(counts), 0], list(counts)), strict=True):
            row.given[0] = new

    # -- guesses ----------------------------------------------------------------------------------

    def _guessed(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        tokens, known = [list(ids) for ids in rows], [len(ids) - 1 for ids in rows]
        for row, end in zip(self._known, known, strict=True):
            row.given[0] = row.given[0][: end - row.seen]
        for depth in range(self._drafts):
            if not rows:
                self._logits(self._draft_nothing(depth), 1)
                continue
            after, normed = self._called(depth, tokens, known)
            ends = torch.tensor([len(one) for one in after], device=normed.device).cumsum(0) - 1
            for ids, logits in zip(tokens, self._logits(normed[ends], len(rows)), strict=True):
                ids.append(likeliest(logits[: self._vocabulary]))
            self._keep(depth, known, after)
        for row, end in zip(self._known, known, strict=True):
            row.seen = end
        room = [max(row.length - end - 2, 0) for row, end in zip(self._known, known, strict=True)]
        return [ids[end + 1 :][:most] for ids, end, most in zip(tokens, known, room, strict=True)]

    def _called(self, depth: int, tokens: Sequence[list[int]], known: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """A module's output for its inputs of each row, and that for the head of all of them."""
        starts = [max(row.seen - depth, 0) for row in self._known]
        counts = [end - start for start, end in zip(starts, known, strict=True)]
        slots = self._deep_slots[depth]
        slots.advance_by(counts, starts)
        given = [(ids[at + depth + 1], at) for ids, start, end in zip(tokens, starts, known, strict=True)
                 for at in range(start, end)]  # fmt: skip
        ids, positions = self._columns(given)
        inputs = slots.outward(torch.cat([row.given[depth] for row in self._known])[:, None])
        after, normed = self._draft(depth, inputs, ids, positions, self._deep[depth])
        return [*torch.split(after[: len(given), 0], counts)], normed

    def _keep(self, depth: int, known: Sequence[int], after: Sequence[Tensor]) -> None:
        """Add a module's outputs to the next one's inputs, and keep those inputs that it needs again: its last tokens
        may have been given a wrong guess."""
        for row, end, new in zip(self._known, known, after, strict=True):
            start, upto = max(row.seen - depth, 0), max(end - depth + 1, 0) if depth else end
            if depth + 1 < self._drafts:
                row.given[depth + 1] = torch.cat((row.given[depth + 1], new))
            row.given[depth] = row.given[depth][max(end - depth, 0) - start : upto - start]

    def _shared(self, guesses: list[list[int]] | None) -> list[list[int]]:
        """Those of one rank of each replica, as the ranks that compute a row must agree on its tokens."""
        number, count = replica_of(self._job)
        everybody = [(number, guesses)]
        if self._job.dist.world > count:
            everybody = self._job.dist.gather_objects((number, guesses))
        return next(found for replica, found in everybody if replica == number and found is not None)

    # -- calls ------------------------------------------------------------------------------------

    def _draft(self, depth: int, hidden: Tensor, ids: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        with self._forwards.mode():
            found: tuple[Tensor, Tensor] = self._part.tail.draft(depth, hidden, ids, positions, cache)
            return found

    def _draft_nothing(self, depth: int) -> Tensor:
        zero = torch.zeros(1, 1, dtype=torch.int64, device=self._job.device)
        return self._draft(depth, self._blank, zero, zero, None)[1]

    def _logits(self, hidden: Tensor, rows: int) -> Tensor:
        with self._forwards.mode():
            return self._forwards.logits(self._part, hidden, rows)

    def _columns(self, given: Sequence[tuple[int, int]]) -> Tensor:
        """Tokens and their positions, `[2, tokens, 1]`, with those that do not count."""
        columns = [filled(one, 0) for one in zip(*given, strict=True)]
        return torch.tensor(columns, device=self._job.device).unsqueeze(-1)
