"""Generates a text one token at a time; keeps keys and values if the model can."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import Tensor

from forge_train.contract.model import Model
from forge_train.plugin.job import Job
from forge_train_kit import hookspecs
from forge_train_kit.activations import Interventions

from ..offline import drafting
from ..offline.logits import Logits
from .rows import Choice, Stopped, TextRow, check, check_whole, encode, longest
from .sampling import Sampling


class Completion:
    """A text that is being generated: iterate over its pieces, once; then read how it ended.

    It restores the model's mode (training or not) afterwards. Over several ranks, all of them must iterate: they get
    the same tokens.

    Args:
        job: provides the tokenizer and the task.
        model: in one part.
        prompt: the text to continue; empty for the beginning of a document.
        sampling: how to choose tokens.
        whole: whether the prompt has its own beginning, as a rendered chat has; if not, the tokenizer's is added.
        ends: tokens that end a text, beside the tokenizer's.
        request: number of the request, for the draws.

    Raises:
        ConfigError: for a prompt that leaves no room, or a model that can't generate here.
    """

    def __init__(
        self,
        job: Job,
        model: Model,
        prompt: str,
        sampling: Sampling,
        *,
        whole: bool = False,
        ends: Collection[int] = (),
        request: int = 0,
    ) -> None:
        check_whole(job, model)
        check(job, model)
        self._job, self._model, self._part, self._sampling = job, model, model.parts[0], sampling
        tokenizer = hookspecs.tokenizer(job)
        self._vocabulary = tokenizer.vocabulary
        ids = encode(tokenizer, prompt, whole=whole)
        self._row = TextRow(0, ids, sampling, tokenizer, ends=ends, longest=longest(model), request=(request, 0))
        if sampling.drafts:
            drafting.check(job, self._part, sampling.drafts)
        self.drafts = drafting.Drafts()
        self._interventions = Interventions.of(model, job)

    @property
    def prompt(self) -> Sequence[int]:
        """Tokens of the prompt."""
        return self._row.ids[: self._row.prompt]

    @property
    def text(self) -> str:
        return self._row.text

    @property
    def tokens(self) -> int:
        """Number of generated tokens, without the document's end."""
        return self._row.tokens

    @property
    def stopped(self) -> Stopped:
        """Why it ended; empty while it continues."""
        return self._row.stopped

    def __iter__(self) -> Iterator[str]:
        row, shown = self._row, 0
        modes = [(module, module.training) for module in self._part.modules()]
        self._part.eval()
        try:
            choices = self._drafted() if self._sampling.drafts else self._drawn()
            for choice in self._interventions.each(choices):
                row.add(choice)
                if piece := row.text[shown:]:
                    shown = len(row.text)
                    yield piece
                if row.done:
                    break
        finally:
            for module, mode in modes:
                module.training = mode
            self._model.free_gathered()

    def _drafted(self) -> Iterator[Choice]:
        length = self._row.prompt + self._row.most
        rounds = drafting.Drafting(self._job, self._part, self._sampling.drafts, length, self._vocabulary, self.drafts)
        return map(Choice, rounds.tokens(self.prompt))

    def _drawn(self) -> Iterator[Choice]:
        logits = Logits(self._job, self._part, self._row.prompt + self._row.most)
        new = self.prompt
        while True:
            choice = self._agree(logits(new))
            yield choice
            new = [choice.id]

    def _agree(self, logits: Tensor) -> Choice:
        """The next token; all ranks use the first rank's, so that rounding differences can't make them diverge."""
        choice: Choice = self._job.dist.on_main(lambda: self._row.choose(logits))
        return choice
