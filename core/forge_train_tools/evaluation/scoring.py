"""Log-likelihoods of token ids, on any layout: the same, whatever is beside a request and whoever computes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import MASKED, Batch, Job, Model
from forge_train.base.errors import ConfigError
from forge_train.step.forward import Forward
from forge_train_kit import hookspecs
from forge_train_kit.contract import Evaluator
from forge_train_kit.data.items import PromptItems, gathered, item_axes, padded
from forge_train_kit.evaluators import measure
from forge_train_kit.model import full_tensor, sum_in_chunks, sum_of_slices
from forge_train_kit.tokenizer import Tokenizer

from ..generation.completion import items_of
from ..inference.batches import UNIT

NUMBER = "evaluation.number"
"""A target: the place of each row's request, `[batch]` int64, -1 for rows that do not count."""
UNLIMITED = 1 << 31


@dataclass(frozen=True)
class Request:
    """Some tokens, and those that follow them, whose probability is asked for; at least one of each."""

    context: tuple[int, ...]
    """With marks of its items, if it has some (`ItemPrompts`)."""
    continuation: tuple[int, ...]
    items: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Modality → items of the context."""


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


class Rows:
    """A loader of this rank's micro-batches of requests: micro-batch k of all goes to data-parallel rank k mod ranks,
    and rows beyond the last request do not count.

    The last token of a continuation is only predicted, never read. Requests are sorted by length, so that little
    padding is computed, and the first micro-batch needs the most memory.

    Args:
        requests: all of them; longer ones are cut on their left, unless they have items.
        job: the job.
        tokenizer: of the model.
        batch: rows of a micro-batch.
        longest: tokens that the model reads at once.
    """

    def __init__(self, requests: Sequence[Request], job: Job, tokenizer: Tokenizer, batch: int, longest: int) -> None:
        requests, self._items = placed(requests, job, longest)
        ids = [(*one.context, *one.continuation)[-(longest + 1) :] for one in requests]
        order = sorted(range(len(ids)), key=lambda at: (-len(ids[at]), ids[at]))
        self._rows = [(at, ids[at], len(requests[at].continuation)) for at in order]
        self._rank, self._ranks = job.dist.data_rank, job.dist.data_ranks
        self._size, self._longest, self._pad = batch, longest, tokenizer.end or 0
        self._taken = 0
        self.steps = -(-len(ids) // (batch * self._ranks))
        """Micro-batches of each rank."""
        self.cut = [len(one.context) + len(one.continuation) - len(row) for one, row in zip(requests, ids, strict=True)]
        """Number of tokens that each request lost."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        start = (self._taken * self._ranks + self._rank) * self._size
        self._taken += 1
        return self._batch(self._rows[start : start + self._size])

    def state_dict(self) -> dict[str, Any]:
        return {"sequences": self._taken * self._ranks * self._size}

    def skip(self, sequences: int) -> None:
        self._taken += sequences // (self._ranks * self._size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._taken = state["sequences"] // (self._ranks * self._size)

    def _batch(self, rows: Sequence[tuple[int, tuple[int, ...], int]]) -> Batch:
        longest = max((len(ids) - 1 for _, ids, _ in rows), default=1)
        shape = (self._size, min(-(-longest // UNIT) * UNIT, max(self._longest, longest)))
        inputs, labels = torch.full(shape, self._pad), torch.full(shape, MASKED)
        numbers = torch.full(shape[:1], -1)
        for at, (number, row, asked) in enumerate(rows):
            ids, size = torch.tensor(row), len(row) - 1
            inputs[at, :size] = ids[:-1]
            labels[at, size - asked : size] = ids[-asked:]
            numbers[at] = number
        each = [self._items[number].read(shape[1]) for number, _, _ in rows] if self._items else []
        if self._items:  # rows beyond the last request have none
            none = gathered(self._items[0].fields, (), shape[1])
            each += [none] * (self._size - len(rows))
        extras = {name: torch.from_numpy(one) for name, one in padded(each).items()} if each else {}
        return Batch(inputs, labels, extras=extras, axes=item_axes(each)).with_targets({NUMBER: numbers})


class Scorer:
    """Computes requests in micro-batches, on all ranks together.

    Args:
        job: the job; each rank makes the same calls.
        model: with its weights.
        batch: rows of a micro-batch.

    Raises:
        ConfigError: for a model whose head gives no token logits, or without a tokenizer.
    """

    def __init__(self, job: Job, model: Model, batch: int) -> None:
        check_model(job)
        self.longest = min((int(getattr(part, "max_sequence", UNLIMITED)) for part in model.parts), default=UNLIMITED)
        self._job, self._forward, self._batch = job, Forward(job, model), batch
        self._tokenizer = hookspecs.tokenizer(job)

    def __call__(self, requests: Sequence[Request]) -> list[Score]:
        """The answers, in the order of the requests, on every rank.

        Raises:
            ConfigError: for a continuation that is longer than what the model reads at once.
        """
        check(requests, self.longest)
        rows = Rows(requests, self._job, self._tokenizer, self._batch, self.longest)
        found: dict[int, tuple[float, bool]] = {}
        if rows.steps:
            evaluator = Evaluator("evaluation", lambda: rows, partial(self._measure, found), {})
            measure(self._forward, evaluator, rows, rows.steps, "forge eval")
        all_ranks = {at: one for part in self._job.dist.gather_objects(found) for at, one in part.items()}
        return [Score(*all_ranks[at], len(one.continuation), rows.cut[at]) for at, one in enumerate(requests)]

    def _measure(self, found: dict[int, tuple[float, bool]], part: nn.Module, hidden: Tensor, batch: Batch) -> None:
        sums = sum_of_slices(sums_by_row(self._tokenizer, part, hidden, batch), self._job).tolist()
        for at, (total, wrong) in zip(batch.targets[NUMBER].tolist(), sums, strict=True):
            if at >= 0:
                found[at] = (total, not wrong)


def check_model(job: Job) -> None:
    """Look at whether a model can be asked.

    Raises:
        ConfigError: its head gives no token logits, or it has no tokenizer.
    """
    if (given := job.hooks.gives("head")) != "token_logits":
        raise ConfigError(f"Tasks need token logits; the head of this model gives {given!r}.")
    if not job.hooks.provider("tokenizer"):
        raise ConfigError("Tasks need a tokenizer, which this model does not have.")


def check(requests: Sequence[Request], longest: int) -> None:
    """Look at requests before anything is computed.

    Raises:
        ConfigError: for a continuation that is longer than what the model reads at once.
    """
    for one in requests:
        if len(one.continuation) > longest:
            raise ConfigError(
                f"What is asked for has {len(one.continuation):,} tokens, and the model reads {longest:,} at once; "
                "shorten it."
            )


def placed(requests: Sequence[Request], job: Job, longest: int) -> tuple[Sequence[Request], list[PromptItems]]:
    """Requests with room for their items, and these, for each of the requests if any has some.

    Raises:
        ConfigError: the model does not take such items, an item can't be read, or a request is too long.
    """
    wanted = {name: some for one in requests for name, some in one.items.items() if some}
    if not wanted:
        return requests, []
    prompts = items_of(job, wanted)
    assert prompts is not None
    made, found = list[Request](), list[PromptItems]()
    for one in requests:
        context, items = prompts.place(one.context, one.items, "A task", "/")
        if one.items and len(context) + len(one.continuation) > longest + 1:
            raise ConfigError(
                f"A prompt and its choice have {len(context) + len(one.continuation):,} tokens with their items, and "
                f"the model reads {longest:,} at once; shorten it."
            )
        made.append(Request(tuple(context), one.continuation))
        found.append(items)
    return made, found


def sums_by_row(tokenizer: Tokenizer, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
    """`[batch, 2]` fp64, of this rank's slice of the sequences: the summed log-probability of a row's labels, and how
    many of them are not the likeliest."""
    head = part.get_submodule("head")
    return sum_in_chunks(partial(_by_row, head, tokenizer.vocabulary), head, 0, hidden, batch.labels)


def _by_row(head: nn.Module, vocabulary: int, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = full_tensor(head(hidden)).float()
    log_probabilities = F.log_softmax(logits.flatten(0, 1), -1)
    each = F.nll_loss(log_probabilities, labels.flatten(), ignore_index=MASKED, reduction="none")
    wrong = (logits[..., :vocabulary].argmax(-1) != labels) & (labels != MASKED)
    return torch.stack((-each.double().view(labels.shape).sum(1), wrong.double().sum(1)), -1)
