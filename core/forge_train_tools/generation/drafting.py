"""The modules of a model's tail guess the tokens after the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from forge_train.base.errors import ConfigError
from forge_train.contract.model import Model
from forge_train.plugin.job import Job
from forge_train_kit import heads, hookspecs
from forge_train_kit.model import Slots

from .forwards import Forwards, replica_of
from .guessing import Guessing, columns, slots_of, undoing
from .sampling import likeliest


def check(job: Job, model: Model, drafts: int) -> None:
    """Check that a model can draft this many tokens at once; every rank of a pipeline calls this.

    Raises:
        ConfigError: explaining why not, on all ranks.
    """
    part, lacks = drafting_part(model), ""
    try:
        undoing(job, model, slots_of(job, drafts, 1, 1))
        _caches(part, _slots(job, drafts, 1, 1))
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


def memory(job: Job, model: Model, forwards: Forwards, drafts: int, places: int, capacity: int) -> Guessing:
    """Memory of rows of which the modules guess tokens.

    Args:
        job: its task computes the logits.
        model: one that `check` accepts.
        forwards: of the model.
        drafts: tokens to draft at once.
        places: most rows side by side.
        capacity: length of the longest row so far.
    """
    own, slots = slots_of(job, drafts, places, capacity), _slots(job, drafts, places, capacity)
    part = drafting_part(model)
    guesser = ModuleGuesser(job, part, forwards, drafts, slots, _caches(part, slots))
    return Guessing(own, undoing(job, model, own), guesser)


def drafting_part(model: Model) -> Any:
    """The part with the modules that draft; None on a rank of a pipeline that has another."""
    return next((one for one in model.parts if isinstance(getattr(one, "tail", None), heads.Drafting)), None)


def _slots(job: Job, drafts: int, places: int, capacity: int) -> list[Slots]:
    """Those of each module, which is given tokens again whose followers were drafts."""
    return [slots_of(job, extra, places, capacity) for extra in range(drafts, 2 * drafts)]


def _caches(part: Any, slots: Sequence[Slots]) -> list[Any]:
    """Those of the modules, if this rank has them."""
    return [] if part is None else [part.tail.new_slots(depth, one) for depth, one in enumerate(slots)]


@dataclass
class _Row:
    """A row as the modules know it: when they were last called, its first `seen` tokens had followers that stay."""

    seen: int
    given: list[Tensor]
    """Inputs of each module, `[positions, dim]`, from position `seen` − its number on, or 0."""


class ModuleGuesser:
    """The modules of a model's tail.

    Before a forward the model has seen tokens 0 … n − 1 of a row, and token n was chosen. Module k, from 0, guesses
    token n + 1 + k from the output of the module before it for the tokens up to n − 1.

    Args:
        job: its task computes the logits.
        part: of this rank with the modules; None if another rank has them.
        forwards: of the model.
        drafts: tokens to draft at once.
        slots: of each module.
        caches: of each module, if this rank has them.
    """

    def __init__(
        self, job: Job, part: Any, forwards: Forwards, drafts: int, slots: Sequence[Slots], caches: Sequence[Any]
    ) -> None:
        self._job, self._part, self._forwards, self._drafts = job, part, forwards, drafts
        self._slots, self._caches, self._known = slots, caches, list[_Row]()
        self._vocabulary = hookspecs.tokenizer(job).vocabulary
        self._blank = torch.empty(0)
        """Hidden states of a token, for calls that do not count: collectives wait for them."""

    def begin(self, place: int, ids: Sequence[int], length: int) -> Callable[[Tensor], None]:
        return partial(self._begun, place, ids, length)

    def idle(self) -> Callable[[Tensor], None]:
        return self._begun_nothing

    def guess(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        return self._shared(None if self._part is None else self._guessed(rows))

    def checked(self, counts: Sequence[int], hidden: Tensor) -> None:
        """The states of the guesses that stay are the first module's next inputs."""
        for row, new in zip(self._known, torch.split(hidden[: sum(counts), 0], list(counts)), strict=True):
            row.given[0] = new

    def end(self, place: int, last: int) -> None:
        if self._part is None:
            return
        for slots in self._slots:
            slots.end(place, last)
        self._known[place] = self._known[last]
        del self._known[last]

    # -- around the model's forwards --------------------------------------------------------------

    def _begun(self, place: int, ids: Sequence[int], length: int, hidden: Tensor) -> None:
        """Have the modules read a prompt, up to the tokens whose followers are not known."""
        self._blank = hidden[:, :1]
        seen, inputs = len(ids) - 1, hidden[0]
        given = []
        for depth, slots in enumerate(self._slots):
            count = max(seen - depth, 0)
            slots.grow(length)
            slots.begin(place, count)
            given.append(inputs[count:])
            if count:
                further = torch.tensor([ids[depth + 1 : depth + 1 + count]], device=slots.device)
                positions = torch.arange(count, device=slots.device)[None]
                inputs = self._draft(depth, inputs[None, :count], further, positions, self._caches[depth])[0][0]
            else:
                self._draft_nothing(depth)
                inputs = inputs[:0]
        self._known[place:] = [_Row(seen, given)]

    def _begun_nothing(self, hidden: Tensor) -> None:
        self._blank = hidden[:, :1]
        for depth in range(self._drafts):
            self._draft_nothing(depth)

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
        return [ids[end + 1 :] for ids, end in zip(tokens, known, strict=True)]

    def _called(self, depth: int, tokens: Sequence[list[int]], known: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """A module's output for its inputs of each row, and that for the head of all of them."""
        starts = [max(row.seen - depth, 0) for row in self._known]
        counts = [end - start for start, end in zip(starts, known, strict=True)]
        slots = self._slots[depth]
        slots.advance_by(counts, starts)
        given = [(ids[at + depth + 1], at) for ids, start, end in zip(tokens, starts, known, strict=True)
                 for at in range(start, end)]  # fmt: skip
        ids, positions = columns(given, slots.device)
        inputs = slots.outward(torch.cat([row.given[depth] for row in self._known])[:, None])
        after, normed = self._draft(depth, inputs, ids, positions, self._caches[depth])
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
