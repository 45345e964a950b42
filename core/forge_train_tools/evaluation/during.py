"""Tasks as an evaluation of a run, beside its loss on held-out data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from forge_train import Batch, Evaluator, Job, Metric
from forge_train.base.errors import ConfigError
from forge_train_kit import hookspecs
from forge_train_kit.tokenizer import Tokenizer

from . import texts
from .generating import Answer, Generation
from .harness import Harness
from .job import Evaluation
from .local_tasks import Answers, LocalTask
from .scoring import NUMBER, Request, Rows, Score, check, check_model, sums_by_row


def evaluator(job: Job, name: str, tasks: Sequence[str], limit: int) -> Evaluator:
    """An evaluation that asks all requests of some tasks once.

    Requests are cut at `train.sequence`, the length that the run has memory for.

    Args:
        job: the run.
        name: of the evaluation.
        tasks: as for `forge eval --task`.
        limit: records of each task; 0 takes all.

    Raises:
        ConfigError: for a task that can't be had, or that has the model write.
    """
    check_model(job)
    local, harness = Evaluation(path=Path(), tasks=tuple(tasks), limit=limit).prepared()
    if (harness is not None and harness.writes) or any(one.questions.prompts for one in local):
        raise ConfigError(
            f"{name}.tasks: a task has the model write, which takes a run too long; `forge eval` does it."
        )
    asked = {one.file.name: _of_file(one) for one in local}
    asked |= {one.names[0]: _of_harness(one) for one in (harness.each() if harness is not None else ())}
    return _evaluator(job, name, asked)


@dataclass
class _Task:
    """Questions of a task, and what to do with their scores.

    Args:
        values: makes numbers by name.
        pairs: continuations after contexts.
        whole: texts, each of which is read in windows.
    """

    pairs: Sequence[tuple[str, str]]
    whole: Sequence[str]
    values: partial[Mapping[str, float]]

    def requests(self, tokenizer: Tokenizer, longest: int) -> Iterable[tuple[int, Request]]:
        """Each with the number of its question, which is that of several windows."""
        for at, one in enumerate(self.pairs):
            yield at, texts.pair(tokenizer, *one)
        for at, text in enumerate(self.whole, len(self.pairs)):
            for window in texts.rolling(tokenizer, text, longest):
                yield at, window


def _of_file(task: LocalTask) -> _Task:
    return _Task(task.questions.pairs, task.questions.texts, partial(_of_answers, task))


def _of_answers(task: LocalTask, pairs: Sequence[Score], whole: Sequence[Score]) -> Mapping[str, float]:
    return {name: one.value for name, one in task.result(Answers(pairs, whole))[0].items()}


def _of_harness(harness: Harness) -> _Task:
    """The harness is run twice: to hear what it asks, and once the scores are there."""
    heard = _Replayed()
    [*harness.run(heard)]
    return _Task(heard.pairs, heard.whole, partial(_replayed, harness))


def _replayed(harness: Harness, pairs: Sequence[Score], whole: Sequence[Score]) -> Mapping[str, float]:
    ((result, _),) = harness.run(_Replayed([*pairs], [*whole]))
    return {name.replace(", ", "."): one.value for name, one in result.metrics.items()}


@dataclass
class _Replayed:
    """Answers with scores that are there already, or with nothing; notes what was asked."""

    scores: list[Score] | None = None
    rolled: list[Score] | None = None
    pairs: list[tuple[str, str]] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)
    failed: bool = False

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        self.pairs += pairs
        return [Score(0.0, False, 1) for _ in pairs] if self.scores is None else self.scores

    def rolling(self, whole: Sequence[str]) -> list[Score]:
        self.whole += whole
        return [Score(0.0, False, 1) for _ in whole] if self.rolled is None else self.rolled

    def generate(self, asked: Sequence[Generation]) -> list[Answer]:
        raise NotImplementedError


class _Scores(Metric):
    """The numbers of a task; its state has two sums for each question: log-likelihoods, and tokens that are not the
    likeliest.

    Args:
        task: the task.
        first: number of its first question among those of all tasks.
        tokens: that each question asks for.
    """

    def __init__(self, task: _Task, first: int, tokens: Sequence[int]) -> None:
        super().__init__(2 * len(tokens))
        self._task, self._first, self._tokens = task, first, tokens

    def update(self, questions: Tensor, sums: Tensor) -> None:
        """Add what rows contribute; questions that are not of this task are negative or too large."""
        own = questions - self._first
        counts = (own >= 0) & (own < len(self._tokens))
        self.sums.view(-1, 2).index_add_(0, own.clamp(0, len(self._tokens) - 1), sums * counts.unsqueeze(-1))

    def value(self, sums: Tensor, maxima: Tensor) -> Mapping[str, float]:
        scores = [
            Score(total, not wrong, tokens)
            for (total, wrong), tokens in zip(sums.view(-1, 2).tolist(), self._tokens, strict=True)
        ]
        cut = len(self._task.pairs)
        return self._task.values(scores[:cut], scores[cut:])


def _evaluator(job: Job, name: str, tasks: Mapping[str, _Task]) -> Evaluator:
    tokenizer, longest = hookspecs.tokenizer(job), job.config.train.sequence
    metrics: dict[str, _Scores] = {}
    requests, questions = list[Request](), list[int]()
    first = 0
    for key, task in tasks.items():
        tokens = [0] * (len(task.pairs) + len(task.whole))
        for question, request in task.requests(tokenizer, longest):
            requests.append(request)
            questions.append(first + question)
            tokens[question] += len(request.continuation)
        metrics[key] = _Scores(task, first, tokens)
        first += len(tokens)
    check(requests, longest)
    train, layout = job.config.train, job.dist.layout
    rows = partial(Rows, requests, job, tokenizer, train.micro_batch, longest)
    batches = -(-rows().steps // layout.micro_batches(train.global_batch, train.micro_batch))
    places = torch.tensor([*questions, -1])  # that of rows that do not count is the last

    def measure(part: nn.Module, hidden: Tensor, batch: Batch) -> None:
        nonlocal places
        places = places.to(hidden.device)
        sums = sums_by_row(tokenizer, part, hidden, batch)
        for metric in metrics.values():
            metric.update(places[batch.targets[NUMBER]], sums)

    return Evaluator(name, rows, measure, metrics, batches)
