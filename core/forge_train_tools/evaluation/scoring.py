"""Log-likelihoods of token ids, on any layout: the same, whatever is beside a request and whoever computes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import MASKED, Batch, Job, Model
from forge_train.base.errors import ConfigError
from forge_train.contract.protocols import Evaluator
from forge_train.step.forward import Forward
from forge_train_kit import hookspecs
from forge_train_kit.model import full_tensor, sum_in_chunks, sum_of_slices

from ..inference.batches import UNIT

_NUMBER = "evaluation.number"
"""A target: the place of each row's request, `[batch]` int64, -1 for rows that do not count."""
UNLIMITED = 1 << 31
_ONCE = "requests are computed once"


@dataclass(frozen=True)
class Request:
    """Some tokens, and those that follow them, whose probability is asked for; at least one of each."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class Score:
    """Answer to a request."""

    log_likelihood: float
    """Of the continuation after the context, natural logarithm."""
    greedy: bool
    """True if each of its tokens is the likeliest."""
    tokens: int
    """Of the continuation."""
    cut: int = 0
    """Number of tokens of the context that were left out on the left."""


class Scorer:
    """Computes requests in micro-batches, on all ranks together.

    A model reads at most `longest` tokens; the last token of a continuation is only predicted, never read. Requests are
    sorted by length, so that little padding is computed, and the first micro-batch needs the most memory.

    Args:
        job: the job; each rank makes the same calls.
        model: with its weights.
        batch: rows of a micro-batch.

    Raises:
        ConfigError: for a model whose head gives no token logits, or without a tokenizer.
    """

    def __init__(self, job: Job, model: Model, batch: int) -> None:
        if (given := job.hooks.gives("head")) != "token_logits":
            raise ConfigError(f"Tasks need token logits; the head of this model gives {given!r}.")
        if not job.hooks.provider("tokenizer"):
            raise ConfigError("Tasks need a tokenizer, which this model does not have.")
        self.longest = min((int(getattr(part, "max_sequence", UNLIMITED)) for part in model.parts), default=UNLIMITED)
        self._job, self._forward, self._batch = job, Forward(job, model), batch
        self._tokenizer = hookspecs.tokenizer(job)

    def __call__(self, requests: Sequence[Request]) -> list[Score]:
        """The answers, in the order of the requests, on every rank.

        Raises:
            ConfigError: for a continuation that is longer than what the model reads at once.
        """
        self.check(requests)
        rows = [(*one.context, *one.continuation)[-(self.longest + 1) :] for one in requests]
        order = sorted(range(len(rows)), key=lambda at: (-len(rows[at]), rows[at]))
        loader = _Rows([(at, rows[at], len(requests[at].continuation)) for at in order], self, self._job)
        found: dict[int, tuple[float, bool]] = {}
        if steps := -(-len(rows) // (self._batch * self._job.dist.data_ranks)):
            evaluator = Evaluator("evaluation", lambda: loader, partial(self._measure, found), {})
            self._forward.measure(evaluator, loader, steps, "forge eval")
        all_ranks = {at: one for part in self._job.dist.gather_objects(found) for at, one in part.items()}
        return [
            Score(*all_ranks[at], len(one.continuation), len(one.context) + len(one.continuation) - len(rows[at]))
            for at, one in enumerate(requests)
        ]

    def check(self, requests: Sequence[Request]) -> None:
        """Look at requests before anything is computed.

        Raises:
            ConfigError: for a continuation that is longer than what the model reads at once.
        """
        for one in requests:
            if len(one.continuation) > self.longest:
                raise ConfigError(
                    f"What is asked for has {len(one.continuation):,} tokens, and the model reads {self.longest:,} at "
                    "once; shorten it."
                )

    def _measure(self, found: dict[int, tuple[float, bool]], part: nn.Module, hidden: Tensor, batch: Batch) -> None:
        head = part.get_submodule("head")
        sums = sum_in_chunks(partial(_by_row, head, self._tokenizer.vocabulary), head, 0, hidden, batch.labels)
        whole = sum_of_slices(sums, self._job).tolist()
        for at, (total, wrong) in zip(batch.targets[_NUMBER].tolist(), whole, strict=True):
            if at >= 0:
                found[at] = (total, not wrong)

    def _rows_of_batch(self, rows: Sequence[tuple[int, tuple[int, ...], int]]) -> Batch:
        longest = max((len(ids) - 1 for _, ids, _ in rows), default=1)
        shape = (self._batch, min(-(-longest // UNIT) * UNIT, max(self.longest, longest)))
        inputs, labels = torch.full(shape, self._tokenizer.end or 0), torch.full(shape, MASKED)
        numbers = torch.full(shape[:1], -1)
        for at, (number, row, asked) in enumerate(rows):
            ids, size = torch.tensor(row), len(row) - 1
            inputs[at, :size] = ids[:-1]
            labels[at, size - asked : size] = ids[-asked:]
            numbers[at] = number
        return Batch(inputs, labels).with_targets({_NUMBER: numbers})


def _by_row(head: nn.Module, vocabulary: int, hidden: Tensor, labels: Tensor) -> Tensor:
    """`[batch, 2]` fp64: the summed log-probability of a row's labels, and how many of them are not the likeliest."""
    logits = full_tensor(head(hidden)).float()
    log_probabilities = F.log_softmax(logits.flatten(0, 1), -1)
    each = F.nll_loss(log_probabilities, labels.flatten(), ignore_index=MASKED, reduction="none")
    wrong = (logits[..., :vocabulary].argmax(-1) != labels) & (labels != MASKED)
    return torch.stack((-each.double().view(labels.shape).sum(1), wrong.double().sum(1)), -1)


class _Rows:
    """A loader of this rank's micro-batches: micro-batch k of all goes to data-parallel rank k mod ranks."""

    def __init__(self, rows: Sequence[tuple[int, tuple[int, ...], int]], scorer: Scorer, job: Job) -> None:
        self._rows, self._scorer = rows, scorer
        self._rank, self._ranks, self._size = job.dist.data_rank, job.dist.data_ranks, scorer._batch
        self._taken = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        start = (self._taken * self._ranks + self._rank) * self._size
        self._taken += 1
        return self._scorer._rows_of_batch(self._rows[start : start + self._size])

    def state_dict(self) -> dict[str, Any]:
        return {"sequences": self._taken * self._ranks * self._size}

    def skip(self, sequences: int) -> None:
        raise NotImplementedError(_ONCE)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError(_ONCE)
