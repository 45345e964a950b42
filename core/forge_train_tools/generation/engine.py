"""Generates rows side by side: finished ones make place for the next, and no row changes another's numbers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from forge_train.base.errors import ConfigError, ForgeError
from forge_train.contract.model import Model
from forge_train.plugin.job import Job
from forge_train_kit.data.items import PromptItems, RowItems, padded
from forge_train_kit.enabled_modalities import enabled_modalities

from .drafts import Drafts
from .forwards import Call, Forwards, replica_of
from .guessing import Guessing, chosen
from .memory import Memory, OneByOne, memory_for
from .packed import packed

log = logging.getLogger("forge_train")


class Row(Protocol):
    """A request while it is generated. Over several ranks, each has its own copy of every row.

    A row whose prompt has images or other items among its tokens has them as `items` (`PromptItems`).
    """

    number: int
    """Of the request."""
    ids: list[int]
    """Tokens of the prompt, and those generated so far."""
    prompt: int
    """Number of tokens of the prompt, at least one."""
    most: int
    """Most tokens to generate; with the prompt's no more than the model reads at once."""
    done: bool

    def choose(self, logits: Tensor) -> Any:
        """The next token, or what `add` needs to know of it, with its `id` if there are drafts; called on one rank, and
        changes nothing.

        Args:
            logits: `[vocabulary]` fp32 on the CPU.
        """
        ...

    def add(self, choice: Any) -> None:
        """Append a chosen token to `ids`, and end the row if it was the last; called on every rank."""
        ...


_R = TypeVar("_R", bound=Row)


def run(job: Job, model: Model, rows: Iterator[_R], *, slots: int, drafts: Drafts | None = None) -> Iterator[_R]:
    """Yield rows as they end.

    Every rank must iterate over equal rows, to the end; each is yielded on all of them. Data-parallel ranks, and those
    of context parallelism, share the rows, and keep step: one without work computes what nobody looks at.

    Args:
        job: provides the task and the attention kernel.
        model: a language model.
        rows: read as there is place for them.
        slots: most rows side by side on each data-parallel rank.
        drafts: how many tokens to guess at once, by `drafts_of`; counts them.

    Raises:
        ConfigError: the model can't generate here.
        ForgeError: logits are NaN; names the request.
    """
    if slots < 1:
        raise ConfigError(f"Rows are generated at least one at a time, not {slots}.")
    _check(model)
    return cast("Iterator[_R]", _Run(job, model, rows, slots, drafts).rows())


def follow(job: Job, model: Model, row: _R, drafts: Drafts | None = None) -> Generator[_R, None, None]:
    """Yield a row after each forward; otherwise as `run`, and up to rounding the same numbers.

    Without drafts it computes the row without others that do not count, which takes less time for a single row.
    """
    _check(model)
    return cast("Generator[_R, None, None]", _Run(job, model, iter([row]), 1, drafts, alone=True).rows())


def _check(model: Model) -> None:
    if model.looks_ahead:
        raise ConfigError(f"This model can't generate text: {model.looks_ahead}.")


@dataclass
class _Replica:
    """The rows of one copy of the model: see `replica_of`."""

    waiting: list[Row] = field(default_factory=list)
    """They have a place, and begin next."""
    active: list[Row] = field(default_factory=list)

    @property
    def taken(self) -> int:
        return len(self.waiting) + len(self.active)


class _Run:
    """Every rank follows the rows of all replicas, so that they agree on what comes next."""

    def __init__(
        self, job: Job, model: Model, rows: Iterator[Row], slots: int, drafts: Drafts | None, *, alone: bool = False
    ) -> None:
        self._job, self._model, self._rows, self._slots, self._alone = job, model, rows, slots, alone
        self._drafts = drafts
        self._number, count = replica_of(job)
        self._replicas = [_Replica() for _ in range(count)]
        self._mine = self._replicas[self._number]
        self._forwards = Forwards(job, model)
        self._modalities = enabled_modalities(job)
        self._memory: Memory | None = None
        self._packed = model.parts if self._forwards.only_reads and not alone else ()
        ranks = job.dist.gather_objects((self._number, self._forwards.sees_logits))
        self._leaders = [ranks.index((replica, True)) for replica in range(count)]

    def rows(self) -> Generator[Row, None, None]:
        with generating(self._model), self._forwards.ready(), packed(self._packed):
            while True:
                self._fill()
                if not any(replica.taken for replica in self._replicas):
                    return
                yield from self._begin()
                yield from self._continue()

    def _fill(self) -> None:
        """Give rows to the replicas with the most places."""
        while True:
            least = min(self._replicas, key=lambda one: one.taken)
            if least.taken == self._slots or (row := next(self._rows, None)) is None:
                return
            least.waiting.append(row)

    def _begin(self) -> Iterator[Row]:
        most = max(len(replica.waiting) for replica in self._replicas)
        if not most:
            return
        if self._memory is None:
            places, longest = max(len(self._mine.waiting), 1), max(map(_length, self._mine.waiting), default=1)
            self._memory = self._memory_for(places, longest)
        found: list[Tensor | None] = []
        for at in range(most):
            row = self._mine.waiting[at] if at < len(self._mine.waiting) else None
            place = len(self._mine.active) + at
            call = self._memory.begin(place, row.ids, _length(row)) if row else self._memory.idle()
            logits = self._forwards(self._with_items(call, row))
            found.append(None if logits is None or row is None else logits[0])
        begun = [[*replica.waiting] for replica in self._replicas]
        for replica in self._replicas:
            replica.active += replica.waiting
            replica.waiting.clear()
        yield from self._chosen(begun, found)

    def _memory_for(self, places: int, longest: int) -> Memory:
        if self._drafts:
            return self._drafts.memory(self._job, self._model, self._forwards, places, longest)
        return OneByOne(self._job, self._model) if self._alone else memory_for(self._job, self._model, places, longest)

    def _with_items(self, call: Call, row: Row | None) -> Call:
        """The first forward of a row with its items. All ranks run the encoders, whichever have some.

        Raises:
            ConfigError: the row has items, and no cache that would keep what they gave.
        """
        if not self._modalities:
            return call
        length = call.ids.shape[1]
        items = _items(row) if row else None
        if items and items.placed and call.caches is None:
            raise ConfigError(
                "This model reads its whole text again as it grows, and can't keep images or other items: it needs "
                "attention with a cache, a kernel with offsets, and positions that do not change with the length."
            )
        none = {name: RowItems.none(one.features, length) for name, one in self._modalities.items()}
        found = items.read(length) if items else none
        extras = {name: torch.from_numpy(one).to(self._job.device) for name, one in padded([found]).items()}
        return replace(call, items=extras)

    def _continue(self) -> Iterator[Row]:
        if self._memory is None or not any(replica.active for replica in self._replicas):
            return
        active, most = self._mine.active, max(len(replica.active) for replica in self._replicas)
        logits = [self._forwards(call) for call in self._memory.advance([row.ids for row in active], most)]
        guesses = self._memory.guesses if isinstance(self._memory, Guessing) else []
        found = self._by_row(logits, len(active) + sum(map(len, guesses)))
        yield from self._chosen([[*one.active] for one in self._replicas], found, guesses)

    def _by_row(self, logits: Sequence[Tensor | None], rows: int) -> list[Tensor | None]:
        return [row for one in logits for row in (one if one is not None else [None] * rows)][:rows]

    def _chosen(
        self, asked: Sequence[Sequence[Row]], logits: Sequence[Tensor | None], guesses: Sequence[Sequence[int]] = ()
    ) -> Iterator[Row]:
        """Add the tokens of all replicas; rows that end with them leave their places.

        Args:
            asked: rows of each replica.
            logits: of each row of this one: those after its newest token, then those after each guess.
            guesses: of these rows, if there are any.
        """
        mine = asked[self._number]
        guesses = guesses or [()] * len(mine)
        everybody = self._shared(lambda: chosen(mine, _sound(mine, logits, guesses), guesses))
        for replica, rows, choices in zip(self._replicas, asked, everybody, strict=True):
            for row, (proposed, several) in zip(rows, choices, strict=True):
                if self._drafts:
                    self._drafts.count(proposed, len(several) - 1)
                for choice in several:
                    if not row.done:
                        row.add(choice)
            for row in rows:
                if row.done:
                    at, last = [id(one) for one in replica.active].index(id(row)), len(replica.active) - 1
                    replica.active[at] = replica.active[last]
                    del replica.active[last]
                    if replica is self._mine and self._memory is not None:
                        with self._forwards.mode():
                            self._memory.end(at, last)
                if row.done or self._alone:
                    yield row

    def _shared(self, choose: Callable[[], list[Any]]) -> list[list[Any]]:
        """Choices of the leaders of all replicas. An error of one is raised on all: they would wait for it."""
        dist = self._job.dist
        if dist.world == 1:
            return [choose()]
        found: tuple[list[Any], Exception | None] = [], None
        if dist.rank in self._leaders:
            try:
                found = choose(), None
            except Exception as error:
                known = isinstance(error, ForgeError | OSError)
                found = [], error if known else RuntimeError(f"rank {dist.rank}: {error!r}")
                if not known:
                    log.exception("choosing a token failed")
        everybody = dist.gather_objects(found)
        if failed := next((error for _, error in everybody if error is not None), None):
            raise failed
        return [everybody[leader][0] for leader in self._leaders]


@contextmanager
def generating(model: Model) -> Iterator[None]:
    """A block without dropout; afterwards the model's modes return, and gathered weights are freed."""
    modes = [(module, module.training) for part in model.parts for module in part.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        model.free_gathered()


def _items(row: Row) -> PromptItems | None:
    found: PromptItems | None = getattr(row, "items", None)
    return found


def _length(row: Row) -> int:
    return row.prompt + row.most


def _sound(rows: Sequence[Row], logits: Sequence[Tensor | None], guesses: Sequence[Sequence[int]]) -> list[Tensor]:
    """The logits of rows, if they are numbers."""
    found = [one for one in logits if one is not None]
    if not found or not math.isnan(float(torch.stack(found).sum())):  # takes a tenth of the time of `isnan`
        return found
    each = [row for row, some in zip(rows, guesses, strict=False) for _ in range(1 + len(some))]
    for row, one in zip(each, found, strict=False):
        if bool(one.isnan().any()):  # infinities have no sum either
            raise ForgeError(
                f"The model's logits are NaN after {len(row.ids)} tokens of request {row.number}: its weights are "
                "damaged."
            )
    return found
