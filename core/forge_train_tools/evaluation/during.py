"""Tasks as an evaluation of a run, beside its loss on held-out data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from forge_train import Batch, Job, Metric, Model
from forge_train.base.errors import ConfigError
from forge_train.checkpoint.state import random_state, set_random_state
from forge_train_kit import hookspecs
from forge_train_kit.contract import Evaluator
from forge_train_kit.tokenizer import Tokenizer

from ..generation import rows
from . import texts
from .generating import Answer, Generation, generate
from .harness import Harness
from .job import Evaluation
from .local_tasks import Answers, LocalTask
from .scoring import NUMBER, Request, Rows, Score, check, check_model, sums_by_row

_NOTHING = Answer("", "end")


@contextmanager
def _own_draws() -> Iterator[None]:
    """A block that takes no random number from the run: lm-eval draws some, and so may a user's function."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


class TasksOfRun:
    """Tasks that a run asks its model whenever it evaluates, all questions each time.

    Requests are cut at `train.sequence`, and `train.micro_batch` of them are answered side by side: there is memory for
    that.

    Args:
        job: the run.
        name: of the evaluation.
        tasks: as for `forge eval --task`.
        limit: records of each task; 0 takes all.

    Raises:
        ConfigError: for a task that can't be had, or can't be asked.
    """

    @_own_draws()
    def __init__(self, job: Job, name: str, tasks: Sequence[str], limit: int) -> None:
        check_model(job)
        self._job, self._name = job, name
        local, harness = Evaluation(path=Path(), tasks=tuple(tasks), limit=limit).prepared()
        self._tasks = {one.file.name: _of_file(job, one) for one in local}
        self._tasks |= {one.names[0]: _of_harness(one) for one in (harness.each() if harness is not None else ())}
        self._check_prompts()

    def check(self, model: Model) -> None:
        """Look at whether the model can do what it is asked.

        Raises:
            ConfigError: it is to write, and can't.
        """
        for task in self._tasks.values():
            if task.prompts:
                self._explained(partial(rows.check, self._job, model))

    def _check_prompts(self) -> None:
        tokenizer, longest = hookspecs.tokenizer(self._job), self._job.config.train.sequence
        for name, one in ((name, prompt) for name, task in self._tasks.items() for prompt in task.prompts):
            self._explained(partial(rows.encode, tokenizer, one.prompt, whole=False))
            if one.tokens >= longest:
                raise ConfigError(
                    f"{self._name}.tasks: an answer of {name} may have {one.tokens:,} tokens, and train.sequence = "
                    f"{longest:,} must hold the prompt, too; ask for fewer, or raise it."
                )

    def _explained(self, check: Callable[[], object]) -> None:
        try:
            check()
        except ConfigError as error:
            raise ConfigError(f"{self._name}.tasks: a task has the model write. {error}") from error

    def evaluator(self, due: Callable[[], bool]) -> Evaluator:
        """The evaluation; `due` is asked before each."""
        return _evaluator(self._job, self._name, self._tasks, due)


@dataclass
class _Task:
    """Questions of a task, and what to do with their scores.

    Args:
        pairs: continuations after contexts.
        whole: texts, each of which is read in windows.
        prompts: texts that the model continues.
        values: makes numbers by name.
        names: of the numbers, if there are prompts.
    """

    pairs: Sequence[tuple[str, str]]
    whole: Sequence[str]
    prompts: Sequence[Generation]
    values: Callable[[Answers], Mapping[str, float]]
    names: Sequence[str] = ()

    def requests(self, tokenizer: Tokenizer, longest: int) -> Iterable[tuple[int, Request]]:
        """Each with the number of its question, which is that of several windows."""
        for at, one in enumerate(self.pairs):
            yield at, texts.pair(tokenizer, *one)
        for at, text in enumerate(self.whole, len(self.pairs)):
            for window in texts.rolling(tokenizer, text, longest):
                yield at, window


def _of_file(job: Job, task: LocalTask) -> _Task:
    asked, values = task.questions, partial(_of_answers, task)
    if asked.shown:
        raise ConfigError(f"{task.file.where}: {task.file.name}.items: choices are shown items by forge eval alone.")
    nothing = Answers(prompts=[_NOTHING for _ in asked.prompts])
    names = job.dist.on_main(lambda: [*values(nothing)]) if asked.prompts else ()  # and tries a user's function
    return _Task(asked.pairs, asked.texts, asked.prompts, values, names)


def _of_answers(task: LocalTask, answers: Answers) -> Mapping[str, float]:
    return {name: one.value for name, one in task.result(answers)[0].items()}


def _of_harness(harness: Harness) -> _Task:
    """The harness is run twice: to hear what it asks, and once the answers are there."""
    heard = _Replayed()
    names = [*_named(harness, heard)]
    return _Task(heard.pairs, heard.whole, heard.prompts, partial(_replayed, harness), names)


def _replayed(harness: Harness, answers: Answers) -> Mapping[str, float]:
    return _named(harness, _Replayed(answers))


def _named(harness: Harness, replayed: _Replayed) -> Mapping[str, float]:
    ((result, _),) = harness.run(replayed, bare=True)
    return {name.replace(", ", "."): one.value for name, one in result.metrics.items()}


@dataclass
class _Replayed:
    """Answers that are there already, or nothing; notes what was asked."""

    answers: Answers | None = None
    pairs: list[tuple[str, str]] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)
    prompts: list[Generation] = field(default_factory=list)
    failed: bool = False

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        self.pairs += pairs
        return [Score(0.0, False, 1) for _ in pairs] if self.answers is None else [*self.answers.pairs]

    def rolling(self, whole: Sequence[str]) -> list[Score]:
        self.whole += whole
        return [Score(0.0, False, 1) for _ in whole] if self.answers is None else [*self.answers.texts]

    def generate(self, asked: Sequence[Generation]) -> list[Answer]:
        self.prompts += asked
        return [_NOTHING for _ in asked] if self.answers is None else [*self.answers.prompts]


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

    @_own_draws()
    def value(self, sums: Tensor, maxima: Tensor) -> Mapping[str, float]:
        scores = [
            Score(total, not wrong, tokens)
            for (total, wrong), tokens in zip(sums.view(-1, 2).tolist(), self._tokens, strict=True)
        ]
        cut = len(self._task.pairs)
        return self._task.values(Answers(scores[:cut], scores[cut:]))


class _Written(Metric):
    """The numbers of a task in which the model writes; every rank is told them.

    Args:
        names: of the numbers.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(maxima=len(names))
        self._names = names

    def update(self, values: Mapping[str, float]) -> None:
        found = [values.get(name, math.nan) for name in self._names]
        self.maxima.copy_(torch.tensor(found, dtype=self.maxima.dtype))

    def value(self, sums: Tensor, maxima: Tensor) -> Mapping[str, float]:
        return dict(zip(self._names, maxima.tolist(), strict=True))


class _Writing(Rows):
    """A loader of requests which first has the model write.

    Args:
        written: tasks, and where their numbers go.
        requests: as for `Rows`; so are `job`, `tokenizer`, `batch` and `longest`.
    """

    def __init__(
        self,
        written: Sequence[tuple[_Task, _Written]],
        requests: Sequence[Request],
        job: Job,
        tokenizer: Tokenizer,
        batch: int,
        longest: int,
    ) -> None:
        super().__init__(requests, job, tokenizer, batch, longest)
        self._written, self._job = written, job

    @_own_draws()
    def on_model(self, model: Model) -> None:
        for task, metric in self._written:
            answers = generate(self._job, model, task.prompts, self._size, self._longest)
            metric.update(self._job.dist.on_main(partial(task.values, Answers(prompts=answers))))


def _evaluator(job: Job, name: str, tasks: Mapping[str, _Task], due: Callable[[], bool]) -> Evaluator:
    tokenizer, longest = hookspecs.tokenizer(job), job.config.train.sequence
    scored: dict[str, _Scores] = {}
    written = {key: _Written(task.names) for key, task in tasks.items() if task.prompts}
    requests, questions = list[Request](), list[int]()
    first = 0
    for key, task in tasks.items():
        if key in written:
            continue
        tokens = [0] * (len(task.pairs) + len(task.whole))
        for question, request in task.requests(tokenizer, longest):
            requests.append(request)
            questions.append(first + question)
            tokens[question] += len(request.continuation)
        scored[key] = _Scores(task, first, tokens)
        first += len(tokens)
    check(requests, longest)
    train, layout = job.config.train, job.dist.layout
    loader: Callable[[], Rows] = partial(Rows, requests, job, tokenizer, train.micro_batch, longest)
    if written:
        pairs = [(tasks[key], metric) for key, metric in written.items()]
        loader = partial(_Writing, pairs, requests, job, tokenizer, train.micro_batch, longest)
    batches = -(-loader().steps // layout.micro_batches(train.global_batch, train.micro_batch))
    places = torch.tensor([*questions, -1])  # that of rows that do not count is the last

    def measure(part: nn.Module, hidden: Tensor, batch: Batch) -> None:
        nonlocal places
        places = places.to(hidden.device)
        sums = sums_by_row(tokenizer, part, hidden, batch)
        for metric in scored.values():
            metric.update(places[batch.targets[NUMBER]], sums)

    return Evaluator(name, loader, measure, {**scored, **written}, batches or -1, due)
