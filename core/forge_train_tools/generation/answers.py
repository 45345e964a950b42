"""Answers to requests, in the order of the requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from forge_train.contract.model import Model
from forge_train.plugin.job import Job

from .drafts import Drafts
from .engine import run
from .requests import Request, Requests
from .rows import Stopped, TextRow

CHUNK = 16
"""Rows of a chunk, times those that are generated side by side: rows that end early wait for their turn in memory."""


@dataclass(frozen=True)
class Answer:
    """A text that a model wrote after a prompt."""

    record: int
    """Number of the prompt, from 0."""
    sample: int
    """Number of the answer to that prompt, from 0."""
    text: str
    tokens: int
    """Number of generated tokens, without the document's end."""
    stopped: Stopped
    id: Any = None
    """The record's value under `id`."""
    cut: int = 0
    """Number of the prompt's tokens that were left out on the left."""
    ids: tuple[int, ...] | None = None
    """The generated tokens, the document's end too; like the next two, None unless log-probabilities were asked for."""
    log_probabilities: tuple[float, ...] | None = None
    """Natural logarithms of the probability of each token in the distribution that it was drawn from."""
    model_log_probabilities: tuple[float, ...] | None = None
    """And in the model's own, at temperature 1."""

    def line(self, samples: int) -> dict[str, Any]:
        """It as JSON, without what there is not.

        Args:
            samples: answers to each prompt.
        """
        found: dict[str, Any] = {"record": self.record}
        if self.id is not None:
            found["id"] = self.id
        if samples > 1:
            found["sample"] = self.sample
        found |= {"text": self.text, "tokens": self.tokens, "stopped": self.stopped}
        if self.cut:
            found["cut"] = self.cut
        if self.ids is not None:
            scores = {
                "log_probabilities": self.log_probabilities,
                "model_log_probabilities": self.model_log_probabilities,
            }
            found |= {"ids": self.ids, **scores}
        return found


@dataclass(frozen=True, kw_only=True)
class Answering:
    """The model at work on some requests.

    Args:
        job: the job.
        model: with its weights.
        requests: all of them.
        samples: answers to each.
        slots: rows side by side.
        longest: tokens that the model reads at once; None for any number.
        ends: tokens that end an answer of a chat, beside the tokenizer's.
        scored: whether log-probabilities are asked for.
        drafts: how many tokens to guess at once; counts them.
    """

    job: Job
    model: Model
    requests: Requests
    samples: int
    slots: int
    longest: int | None
    ends: tuple[int, ...]
    scored: bool
    drafts: Drafts

    def answers(self, start: int, stop: int) -> Iterator[Answer]:
        """Yield the answers with numbers from `start` to `stop`, in order; over several ranks, on each of them."""
        rows = self._rows(start)
        while start < stop:
            taken: dict[int, tuple[TextRow, Request]] = {}
            ended: set[int] = set()
            chunk = self._taken(islice(rows, min(CHUNK * self.slots, stop - start)), taken)
            for row in run(self.job, self.model, chunk, slots=self.slots, drafts=self.drafts):
                ended.add(row.number)
                while start in ended:
                    yield self._answer(*taken.pop(start))
                    start += 1

    def _rows(self, start: int) -> Iterator[tuple[TextRow, Request]]:
        first, sample = divmod(start, self.samples)
        for one in self.requests.read(first):
            request = self.requests.request(*one)
            for at in range(sample, self.samples):
                yield self._row(request, at), request
            sample = 0

    def _row(self, request: Request, sample: int) -> TextRow:
        return TextRow(
            request.number * self.samples + sample,
            request.ids,
            request.sampling,
            self.requests.tokenizer,
            ends=self.ends if request.chat else (),
            longest=self.longest,
            request=(request.draw, sample),
            scored=self.scored,
            items=request.items,
        )

    def _taken(
        self, rows: Iterator[tuple[TextRow, Request]], taken: dict[int, tuple[TextRow, Request]]
    ) -> Iterator[TextRow]:
        for row, request in rows:
            taken[row.number] = row, request
            yield row

    def _answer(self, row: TextRow, request: Request) -> Answer:
        scores: dict[str, Any] = {}
        if self.scored:
            scores = {
                "ids": tuple(one.id for one in row.choices),
                "log_probabilities": tuple(one.drawn for one in row.choices),
                "model_log_probabilities": tuple(one.model for one in row.choices),
            }
        sample = row.number % self.samples
        return Answer(request.number, sample, row.text, row.tokens, row.stopped, request.id, request.cut, **scores)
