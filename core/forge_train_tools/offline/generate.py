"""Generates text one token at a time; keeps keys and values if the model can."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from forge_train.base.errors import ConfigError
from forge_train.contract.model import Model
from forge_train.plugin.job import Job
from forge_train_kit import hookspecs
from forge_train_kit.tokenizer import Tokenizer

from . import drafting
from .logits import Logits

Stopped = Literal["", "tokens", "end", "stop", "length"]
"""Why a text ended: the requested number of tokens, the document's end, a stop string, or the model's longest sequence;
empty while it continues."""

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Rule for choosing tokens.

    Args:
        tokens: the most tokens to generate.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: choose among this many of the likeliest tokens; 0 means all.
        top_p: choose among the fewest likeliest tokens whose probabilities reach this sum (Holtzman et al. 2019,
            arXiv:1904.09751); after top_k.
        seed: of the random generator.
        stop: texts that end the generation and are not part of it.
        drafts: tokens that the modules of the model's tail draft at once, and that the model then checks in one pass;
            the text is the same. 0 disables drafts. Needs temperature 0.

    Raises:
        ConfigError: naming every value that is out of range.
    """

    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    drafts: int = 0

    def __post_init__(self) -> None:
        wrong = [
            f"{name}: expected {expected}, found {getattr(self, name)!r}."
            for name, fits, expected in (
                ("tokens", self.tokens >= 1, "at least 1"),
                ("temperature", 0 <= self.temperature < math.inf, "a finite number of at least 0"),
                ("top_k", self.top_k >= 0, "at least 0 (which means all)"),
                ("top_p", 0 < self.top_p <= 1, "a number greater than 0 and at most 1"),
                ("seed", 0 <= self.seed < 2**63, "a number from 0 up to 2⁶³ - 1"),
                ("stop", all(self.stop), "non-empty texts"),
                ("drafts", self.drafts >= 0, "at least 0 (which means none)"),
                ("temperature", not (self.drafts and self.temperature), "0, because drafts are greedy"),
            )
            if not fits
        ]
        if wrong:
            raise ConfigError("\n".join(wrong))


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw a token id from `logits [vocabulary]`, on the generator's device."""
    if not sampling.temperature:
        return int(logits.argmax())
    order = None
    if sampling.top_k and sampling.top_k < len(logits):
        logits, order = logits.topk(sampling.top_k)
    elif sampling.top_p < 1:
        logits, order = logits.sort(descending=True, stable=True)
    probabilities = torch.softmax((logits - logits.max()) / sampling.temperature, dim=0)
    if sampling.top_p < 1:
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities[before < sampling.top_p]
    drawn = int(torch.multinomial(probabilities, 1, generator=generator))
    return drawn if order is None else int(order[drawn])


class Completion:
    """A text that is being generated: iterate over its pieces, once; then read how it ended.

    It draws from its own generator, and restores the model's mode (training or not) afterwards. Over
    several ranks, all of them must iterate: they get the same tokens.

    Args:
        job: provides the tokenizer and the task.
        model: in one part.
        prompt: the text to continue; empty for the beginning of a document.
        sampling: how to choose tokens.
        whole: whether the prompt has its own beginning, as a rendered chat has; if not, the tokenizer's is added.
        ends: tokens that end a text, beside the tokenizer's.

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
    ) -> None:
        if max(len(model.parts), job.dist.layout.pp, job.dist.layout.cp) > 1:
            raise ConfigError("Generating text needs a whole model and whole sequences; this model is cut by pp or cp.")
        if not job.hooks.provider("tokenizer"):
            raise ConfigError("Generating text needs a tokenizer, but no enabled plugin provides one.")
        if (given := job.hooks.gives("head")) != "token_logits":
            raise ConfigError(f"Generating text needs token logits; the head of this model gives {given!r}.")
        if model.looks_ahead:
            raise ConfigError(f"This model can't generate text: {model.looks_ahead}.")
        self._job, self._model, self._part, self._sampling = job, model, model.parts[0], sampling
        self._tokenizer = hookspecs.tokenizer(job)
        self._ends = {*self._tokenizer.stops, *ends}
        self._prompt = self._encode(prompt, whole=whole)
        room = self._room()
        self._count = min(sampling.tokens, room)
        if sampling.drafts:
            drafting.check(job, self._part, sampling.drafts)
        self.drafts = drafting.Drafts()
        self.stopped: Stopped = ""
        self.tokens = 0
        """Number of generated tokens, without the document's end."""
        self.text = ""

    def __iter__(self) -> Iterator[str]:
        stream, stops = _Stream(self._tokenizer, self._prompt), _Stops(self._sampling.stop)
        modes = [(module, module.training) for module in self._part.modules()]
        self._part.eval()
        try:
            for token in self._ids():
                piece = stops.push(stream.push(token))
                self.text += piece
                if piece:
                    yield piece
                if stops.found:
                    break
            piece = stops.push(stream.flush()) + stops.flush()
            self.text += piece
            if stops.found:
                self.stopped = "stop"
            if piece:
                yield piece
        finally:
            for module, mode in modes:
                module.training = mode
            self._model.free_gathered()

    def _ids(self) -> Iterator[int]:
        for token in self._drafted() if self._sampling.drafts else self._drawn():
            if token in self._ends:
                self.stopped = "end"
                return
            self.tokens += 1
            yield token
            if self.tokens == self._count:
                break
        self.stopped = "tokens" if self.tokens == self._sampling.tokens else "length"

    def _drafted(self) -> Iterator[int]:
        length, vocabulary = len(self._prompt) + self._count, self._tokenizer.vocabulary
        rounds = drafting.Drafting(self._job, self._part, self._sampling.drafts, length, vocabulary, self.drafts)
        return rounds.tokens(self._prompt)

    def _drawn(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._sampling.seed)
        logits = Logits(self._job, self._part, len(self._prompt) + self._count)
        new: Sequence[int] = self._prompt
        while True:
            token = self._agree(logits(new)[: self._tokenizer.vocabulary], generator)
            yield token
            new = [token]

    def _agree(self, logits: Tensor, generator: torch.Generator) -> int:
        """The next token; all ranks use the first rank's, so that rounding differences can't make them diverge."""
        token: int = self._job.dist.on_main(lambda: choose(logits, self._sampling, generator))
        return token

    def _encode(self, prompt: str, *, whole: bool) -> list[int]:
        """Token ids of the prompt; if documents have no beginning token, the end of another document precedes it."""
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(f"The prompt is not UTF-8 at character {error.start}; give it as UTF-8.") from error
        if ids := [*(() if whole else self._tokenizer.begin), *self._tokenizer.encode(prompt)]:
            return ids
        if self._tokenizer.end is None:
            raise ConfigError("The tokenizer has no token that begins a document; give a prompt to continue.")
        return [self._tokenizer.end]

    def _room(self) -> int:
        longest = getattr(self._part, "max_sequence", None)
        if longest is None:
            return self._sampling.tokens
        if len(self._prompt) >= longest:
            raise ConfigError(
                f"The prompt has {len(self._prompt)} tokens; the model supports sequences of at most {longest}, "
                "including the generated tokens. Shorten the prompt."
            )
        return int(longest) - len(self._prompt)


class _Stream:
    """Turns tokens into pieces of text. Tokens that may be an incomplete character wait for the rest.

    Only the newest tokens are decoded, together with some before them, because a token's text can depend on its
    neighbours. The first of these begins a character, because one broken byte can spoil all characters next to it.
    """

    CONTEXT = 5
    """Least number of tokens before the new ones that are decoded with them."""
    PATIENCE = 8
    """Number of tokens that may wait. A character has at most four bytes; what waits longer is not UTF-8."""
    REST = 3
    """Number of newest waiting tokens that may still be the beginning of a character."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(before)
        self._cuts = [0, len(self._ids)]
        """Start of each piece; the last entry is the start of the next."""

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(len(self._ids))
        if not text.endswith(_REPLACEMENT):
            return self._take(len(self._ids), text)
        if len(self._ids) - self._cuts[-1] > self.PATIENCE:
            upto = len(self._ids) - self.REST
            return self._take(upto, self._decode(upto))
        return ""

    def flush(self) -> str:
        """The text that is still waiting."""
        return self._take(len(self._ids), self._decode(len(self._ids)))

    def _decode(self, upto: int) -> str:
        return self._tokenizer.decode(self._ids[:upto])

    def _take(self, upto: int, text: str) -> str:
        piece = text[len(self._decode(self._cuts[-1])) :]
        self._cuts.append(upto)
        drop = max((cut for cut in self._cuts if cut <= upto - self.CONTEXT), default=0)
        self._ids = self._ids[drop:]
        self._cuts = [cut - drop for cut in self._cuts if cut >= drop]
        return piece


class _Stops:
    """Holds text back while it may be the beginning of a stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The text that can be shown: everything before the first stop string."""
        if self.found:
            return ""
        text = self._held + piece
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest prefix of `stop` that `text` ends with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
