"""A request while it is generated: its tokens, its text, and how it ended."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from forge_train.base.errors import ConfigError
from forge_train.contract.model import Model
from forge_train.plugin.job import Job
from forge_train_kit.data.items import PromptItems
from forge_train_kit.tokenizer import Tokenizer

from .draws import uniform
from .sampling import Distribution, Sampling, likeliest
from .texts import Stops, Stream

Stopped = Literal["", "tokens", "end", "stop", "length"]
"""Why a text ended: the requested number of tokens, the document's end, a stop string, or the model's longest sequence;
empty while it continues."""


@dataclass(frozen=True)
class Choice:
    """A token that was chosen, and natural logarithms of its probability if they were asked for."""

    id: int
    drawn: float | None = None
    """Of the distribution that it was drawn from: after penalty, temperature and truncation."""
    model: float | None = None
    """Of the model's: all its logits, at temperature 1."""


class TextRow:
    """A request and its text so far.

    Args:
        number: its place among the rows of a call.
        ids: tokens of the prompt.
        sampling: how to choose tokens.
        tokenizer: of the model.
        ends: tokens that end a text, beside the tokenizer's.
        longest: tokens that the model reads at once; None for any number.
        request: number of the request and of its sample, for the draws.
        scored: whether to keep the log-probabilities of what is chosen.
        items: images and the like among the prompt's tokens.

    Raises:
        ConfigError: the prompt leaves no room.
    """

    def __init__(
        self,
        number: int,
        ids: Sequence[int],
        sampling: Sampling,
        tokenizer: Tokenizer,
        *,
        ends: Collection[int] = (),
        longest: int | None = None,
        request: tuple[int, int] = (0, 0),
        scored: bool = False,
        items: PromptItems | None = None,
    ) -> None:
        self.number, self.ids, self.prompt, self.items = number, list(ids), len(ids), items
        self.most = sampling.tokens if longest is None else min(sampling.tokens, room(len(ids), longest))
        self.done = False
        self.stopped: Stopped = ""
        self.text = ""
        self.tokens = 0
        """Number of generated tokens, without the document's end."""
        self.choices: list[Choice] = []
        """The generated tokens, the document's end too, if their log-probabilities were asked for."""
        self._sampling, self._vocabulary = sampling, tokenizer.vocabulary
        self._ends = {*tokenizer.stops, *ends}
        self._request, self._scored = request, scored
        self._likeliest = not (sampling.temperature or scored) and sampling.repetition_penalty == 1
        self._stream, self._stops = Stream(tokenizer, ids), Stops(sampling.stop)

    def choose(self, logits: Tensor) -> Choice:
        """The next token; changes nothing.

        Args:
            logits: `[vocabulary]` fp32 on the CPU; ids that the tokenizer does not have are never chosen.
        """
        known = logits[: self._vocabulary]
        if self._likeliest:
            return Choice(likeliest(known))
        found = Distribution.of(known, self._sampling, self.ids)
        token = found.draw(uniform(self._sampling.seed, *self._request, len(self.ids)))
        if not self._scored:
            return Choice(token)
        return Choice(token, found.log_probability(token), float(logits.double().log_softmax(0)[token]))

    def add(self, choice: Choice) -> None:
        """Append a token, and end if it, its text or their number says so."""
        self.ids.append(choice.id)
        if self._scored:
            self.choices.append(choice)
        if choice.id in self._ends:
            self._end("end")
            return
        self.tokens += 1
        self.text += self._stops.push(self._stream.push(choice.id))
        if self._stops.found:
            self._end("stop")
        elif self.tokens == self.most:
            self._end("tokens" if self.tokens == self._sampling.tokens else "length")

    def _end(self, stopped: Stopped) -> None:
        self.text += self._stops.push(self._stream.flush()) + self._stops.flush()
        self.stopped = "stop" if self._stops.found else stopped
        self.done = True


def check(job: Job, model: Model) -> None:
    """Check that a model can generate text here.

    Raises:
        ConfigError: explaining why not.
    """
    if not job.hooks.provider("tokenizer"):
        raise ConfigError("Generating text needs a tokenizer, but no enabled plugin provides one.")
    if (given := job.hooks.gives("head")) != "token_logits":
        raise ConfigError(f"Generating text needs token logits; the head of this model gives {given!r}.")
    if model.looks_ahead:
        raise ConfigError(f"This model can't generate text: {model.looks_ahead}.")


def longest(model: Model) -> int | None:
    """Tokens that the model reads at once; None for any number."""
    found = [getattr(part, "max_sequence", None) for part in model.parts]
    return min((int(one) for one in found if one is not None), default=None)


def room(tokens: int, longest: int) -> int:
    """Tokens that fit after a prompt of `tokens`.

    Raises:
        ConfigError: there are none.
    """
    if tokens >= longest:
        raise ConfigError(
            f"The prompt has {tokens} tokens; the model supports sequences of at most {longest}, "
            "including the generated tokens. Shorten the prompt."
        )
    return longest - tokens


def encode(tokenizer: Tokenizer, prompt: str, *, whole: bool) -> list[int]:
    """Token ids of a prompt; if documents have no beginning token, the end of another document precedes an empty one.

    Args:
        tokenizer: of the model.
        prompt: the text; empty for the beginning of a document.
        whole: whether the prompt begins as it should, as a rendered chat does; if not, the tokenizer's beginning is
            added, unless it is there.

    Raises:
        ConfigError: the prompt is no UTF-8, or has no token.
    """
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"The prompt is not UTF-8 at character {error.start}; give it as UTF-8.") from error
    ids, begin = tokenizer.encode(prompt), [] if whole else list(tokenizer.begin)
    if begin and ids[: len(begin)] == begin:  # as templates write it
        begin = []
    if ids := [*begin, *ids]:
        return ids
    if tokenizer.end is None:
        raise ConfigError("The tokenizer has no token that begins a document; give a prompt to continue.")
    return [tokenizer.end]
