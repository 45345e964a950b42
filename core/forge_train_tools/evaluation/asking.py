"""A model that all ranks hold, and that the main process alone asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from forge_train import Job, Model
from forge_train_kit import hookspecs

from ..generation.completion import items_of
from . import texts
from .generating import Answer, Generation, check_prompts, generate
from .scoring import Request, Score, Scorer, check, placed

_T = TypeVar("_T")
Items = Mapping[str, Sequence[Any]]
"""Modality → items of a prompt."""
_END = "end"


class Answering(Protocol):
    """Answers requests, in their order."""

    failed: bool
    """True if a model has failed."""

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[Score]: ...
    def rolling(self, whole: Sequence[str]) -> list[Score]: ...
    def generate(self, asked: Sequence[Generation]) -> list[Answer]: ...


class Asked:
    """Answers requests with a model. Over several ranks, all call `lead`; the main process does the work, and the
    others compute along whenever it asks: data, checks and metrics are read and computed once.

    Args:
        job: the job.
        model: with its weights.
        batch: rows of a micro-batch.
    """

    def __init__(self, job: Job, model: Model, batch: int) -> None:
        self._job, self._model, self._batch = job, model, batch
        self._scorer = Scorer(job, model, batch)
        self.failed = False
        """True once a request has failed, on every rank."""
        self.tokenizer = hookspecs.tokenizer(job)
        self.longest = self._scorer.longest
        """Tokens that the model reads at once."""

    def lead(self, work: Callable[[Asked], _T]) -> _T:
        """Do some work on the main process; every rank gets its result, or its error."""
        if self._job.dist.world == 1:
            return work(self)
        if not self._job.dist.main:
            return self._follow()  # type: ignore[no-any-return]
        try:
            result = work(self)
        except Exception as error:
            if not self.failed:  # or else the others know
                self._job.dist.on_main(partial(_raise, error))
            raise
        self._job.dist.on_main(lambda: (_END, result))
        return result

    def _follow(self) -> Any:
        while True:
            what, asked = self._job.dist.on_main(_nothing)
            if what == _END:
                return asked
            getattr(self, what)(asked)

    def _ask(self, what: str, asked: Sequence[Any]) -> Any:
        self._job.dist.on_main(lambda: (what, asked))
        try:
            return getattr(self, what)(asked)
        except BaseException:
            self.failed = True
            raise

    def _scores(self, requests: Sequence[Request]) -> list[Score]:
        return self._scorer(requests)

    def _texts(self, asked: Sequence[Generation]) -> list[Answer]:
        return generate(self._job, self._model, asked, self._batch)

    def check(
        self,
        pairs: Sequence[tuple[str, str]],
        whole: Sequence[str],
        prompts: Sequence[Generation],
        shown: Sequence[Items] = (),
    ) -> None:
        """Look at questions before anything is computed.

        Raises:
            ConfigError: for one that can't be asked.
        """
        requests = self._requests(pairs, shown)
        check(requests, self.longest)
        placed(requests, self._job, self.longest)
        for text in whole:
            next(texts.rolling(self.tokenizer, text, self.longest))
        check_prompts(self._job, self._model, prompts)

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]], shown: Sequence[Items] = ()) -> list[Score]:
        """The scores of continuations after their contexts.

        Args:
            pairs: contexts and continuations.
            shown: the items of each context; empty if none has some.
        """
        if not pairs:
            return []
        found: list[Score] = self._ask("_scores", self._requests(pairs, shown))
        return found

    def _requests(self, pairs: Sequence[tuple[str, str]], shown: Sequence[Items]) -> list[Request]:
        prompts = items_of(self._job, {name: some for one in shown for name, some in one.items()}) if shown else None
        if prompts is None:
            return [texts.pair(self.tokenizer, *one) for one in pairs]
        found = []
        for (context, continuation), items in zip(pairs, shown, strict=True):
            one = texts.pair(prompts.tokenizer, prompts.with_placeholders(context, items), continuation)
            found.append(replace(one, items=items))
        return found

    def rolling(self, whole: Sequence[str]) -> list[Score]:
        """The scores of whole texts, by windows; `greedy` if every token is."""
        if not whole:
            return []
        windows = [[*texts.rolling(self.tokenizer, text, self.longest)] for text in whole]
        scores = iter(self._ask("_scores", [window for each in windows for window in each]))
        return [_joined([next(scores) for _ in each]) for each in windows]

    def generate(self, asked: Sequence[Generation]) -> list[Answer]:
        """The answers to prompts, in their order."""
        if not asked:
            return []
        check_prompts(self._job, self._model, asked)
        found: list[Answer] = self._ask("_texts", asked)
        return found


def _joined(scores: Sequence[Score]) -> Score:
    total = sum(one.log_likelihood for one in scores)
    return Score(total, all(one.greedy for one in scores), sum(one.tokens for one in scores))


def _nothing() -> Any:
    raise AssertionError  # only the main process is asked


def _raise(error: Exception) -> Any:
    raise error
