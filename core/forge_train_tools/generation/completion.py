"""Generates a text, and gives its pieces as they come."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from forge_train.base.errors import ConfigError
from forge_train.base.format import format_list
from forge_train.contract.model import Model
from forge_train.plugin.job import Job
from forge_train_kit import hookspecs
from forge_train_kit.data.items import ItemPrompts, prompts_of

from .drafts import drafts_of
from .engine import follow
from .rows import Stopped, TextRow, check, encode, longest
from .sampling import Sampling


class Completion:
    """A text that is being generated: iterate over its pieces, once; then read how it ended.

    It restores the model's mode (training or not) afterwards. Over several ranks, all of them must iterate: they get
    the same tokens.

    Args:
        job: provides the tokenizer and the task.
        model: with its weights.
        prompt: the text to continue; empty for the beginning of a document.
        sampling: how to choose tokens.
        whole: whether the prompt has its own beginning, as a rendered chat has; if not, the tokenizer's is added.
        ends: tokens that end a text, beside the tokenizer's.
        request: number of the request, for the draws.
        items: of the prompt by modality, as `{"image": ["cat.png"]}`: at its placeholders, or before it if it has none
            and is not whole.

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
        items: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        check(job, model)
        self._job, self._model = job, model
        tokenizer = hookspecs.tokenizer(job)
        self._prompts = items_of(job, items or {})  # its files last as long as this
        placed = None
        if self._prompts is None:
            ids = encode(tokenizer, prompt, whole=whole)
        else:
            given = items or {}
            prompt = prompt if whole else self._prompts.with_placeholders(prompt, given)
            marked = encode(self._prompts.tokenizer, prompt, whole=whole)
            ids, placed = self._prompts.place(marked, given, "The prompt", str(Path.cwd()))
        self._row = TextRow(
            0, ids, sampling, tokenizer, ends=ends, longest=longest(model), request=(request, 0), items=placed
        )
        self.drafts = drafts_of(job, model, sampling)

    @property
    def prompt(self) -> Sequence[int]:
        """Tokens of the prompt."""
        return self._row.ids[: self._row.prompt]

    @property
    def ids(self) -> Sequence[int]:
        """The generated tokens so far, the document's end included."""
        return self._row.ids[self._row.prompt :]

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
        rows = follow(self._job, self._model, self._row, self.drafts)
        shown = 0
        with closing(rows):
            for row in rows:
                if piece := row.text[shown:]:
                    shown = len(row.text)
                    yield piece


def items_of(job: Job, items: Mapping[str, Sequence[Any]]) -> ItemPrompts | None:
    """The encoder of prompts with items; None for a model of text alone.

    Raises:
        ConfigError: the model does not take a modality that is asked for.
    """
    found = prompts_of(job)
    known = () if found is None else tuple(found.fields.modalities)
    if unknown := [name for name, some in items.items() if some and name not in known]:
        takes = f"text and {format_list(map(repr, known))}" if known else "text alone"
        raise ConfigError(f"This model takes {takes}, but no {unknown[0]!r}.")
    return found
