"""A trained model, opened to write text with it or to look at its logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from forge_train.base.errors import ConfigError
from forge_train.plugin import hookspecs
from forge_train_kit.hookspecs import tokenizer
from forge_train_kit.tokenizer import Tokenizer

from ..generation.completion import Completion, items_of
from ..generation.sampling import Sampling, SamplingOptions, sampling_of
from .logits import logits_of
from .opening import Opened

if TYPE_CHECKING:
    from ..generation.chat import Chat
    from ..generation.chats import ChatPrompts


class TrainedModel:
    """The model of a run, a checkpoint or a Hugging Face folder, with its weights."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened

    def __repr__(self) -> str:
        return f"TrainedModel({str(self.path)!r}, step {self.step})"

    @property
    def path(self) -> Path:
        """The checkpoint, or the folder in Hugging Face layout."""
        return self._opened.path

    @property
    def step(self) -> int:
        """Step of the checkpoint; 0 for a Hugging Face folder."""
        return self._opened.step

    @property
    def module(self) -> nn.Module:
        """The model itself, in evaluation mode."""
        return self._opened.model.parts[0]

    @property
    def tokenizer(self) -> Tokenizer:
        """Encodes and decodes text.

        Raises:
            ConfigError: if the model has none.
        """
        if not self._opened.job.hooks.provider("tokenizer"):
            raise ConfigError(f"{self.path}: this model has no tokenizer.")
        return tokenizer(self._opened.job)

    def generate(
        self,
        prompt: str = "",
        *,
        chat: bool = False,
        template: str = "",
        items: Mapping[str, Sequence[Any]] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> str:
        """Continue a text; returns what was added to it.

        Args:
            prompt: the text; empty for the beginning of a document.
            chat: whether the prompt is a user's message, to be put into the model's chat template.
            template: another chat template than the model's: `chatml`, `llama3`, `plain` or a file.
            items: images and the like, as `{"image": ["cat.png"]}`: at the prompt's placeholders, or before it.
            options: as in `forge generate`: `tokens` (200), `temperature` (0.8), `top_k`, `top_p`, `min_p`,
                `repetition_penalty`, `seed`, `stop`, `drafts` and `lookup`.

        Raises:
            ConfigError: for an option out of range, or a model that can't generate text.
        """
        return "".join(self.stream(prompt, chat=chat, template=template, items=items, **options))

    def stream(
        self,
        prompt: str = "",
        *,
        chat: bool = False,
        template: str = "",
        items: Mapping[str, Sequence[Any]] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Iterator[str]:
        """Yield the pieces of what `generate` returns, as they arrive."""
        return iter(self.complete(prompt, sampling_of(options), chat=chat, template=template, items=items))

    def complete(
        self,
        prompt: str,
        sampling: Sampling,
        *,
        chat: bool = False,
        template: str = "",
        items: Mapping[str, Sequence[Any]] | None = None,
    ) -> Completion:
        """The completion behind `stream`, which also knows why and after how many tokens it ended."""
        opened = self._opened
        if not chat:
            return Completion(opened.job, opened.model, prompt, sampling, items=items)
        chats = self.chats(template)
        if (prompts := items_of(opened.job, items or {})) is not None:
            prompt = prompts.with_placeholders(prompt, items or {})
        given = chats.render([{"role": "user", "content": prompt}])
        return Completion(opened.job, opened.model, given, sampling, whole=True, ends=chats.ends, items=items)

    def chats(self, template: str = "") -> ChatPrompts:
        """The model's chat template, or another one: `chatml`, `llama3`, `plain` or a file.

        Raises:
            ConfigError: if it has none.
        """
        from ..generation.chats import ChatPrompts

        return ChatPrompts(self._opened.job, self.path, self._opened.adapters, template)

    def chat(self, *, system: str = "", template: str = "", **options: Unpack[SamplingOptions]) -> Chat:
        """A chat with the model: `for piece in model.chat().answer("Hello"): …`

        Args:
            system: the system's message; empty for none.
            template: another chat template than the model's: `chatml`, `llama3`, `plain` or a file.
            options: as in `generate`.

        Raises:
            ConfigError: the model can't chat.
        """
        from ..generation.chat import Chat

        opened = self._opened
        return Chat(opened.job, opened.model, self.chats(template), sampling_of(options), system)

    def logits(self, text: str | Sequence[int]) -> Tensor:
        """The logits after each token of a text: `[tokens, vocabulary]`, fp32 on the CPU.

        Args:
            text: a text, which the tokenizer encodes without adding tokens; or token ids.

        Raises:
            ConfigError: for no token, or a token id that the tokenizer does not have.
            ForgeError: if the logits are NaN.
        """
        ids = list(self.tokenizer.encode(text) if isinstance(text, str) else text)
        if not ids:
            raise ConfigError("logits: expected at least one token, found none.")
        job = self._opened.job
        known = self.tokenizer.vocabulary
        if strange := [one for one in ids if not 0 <= one < known]:
            raise ConfigError(f"logits: there is no token {strange[0]}; the tokenizer's ids go from 0 to {known - 1}.")
        if (given := job.hooks.gives("head")) != "token_logits":
            raise ConfigError(f"logits: the head of this model gives {given!r}, not token logits.")
        with torch.no_grad():
            hidden = self.module(torch.tensor([ids], device=job.device))
            return logits_of(hookspecs.task(job), self.module, hidden, len(ids))
