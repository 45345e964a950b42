"""Answers to prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from forge_train import Job, Model
from forge_train.base.errors import ConfigError
from forge_train_kit import hookspecs

from ..offline.generate import Completion, Sampling


@dataclass(frozen=True)
class Generation:
    """A prompt, and how it is answered.

    Args:
        prompt: a text.
        tokens: the most tokens of the answer.
        stop: texts that end it.
        temperature: 0 for the likeliest tokens; `top_p` and `top_k` as in `forge generate`.
        seed: with `draw`, decides what is drawn: see `drawn`.
        draw: number of the request and of the sample.
    """

    prompt: str
    tokens: int
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    draw: tuple[int, int] = (0, 0)

    @property
    def drawn(self) -> int:
        """The seed of this request's own generator: neither its order nor what is beside it changes an answer."""
        digest = hashlib.blake2b(repr((self.seed, self.draw)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class Answer:
    """Text that a model wrote.

    Args:
        text: without the stop text.
        stopped: why it ended: see `forge_train_tools.offline.generate.Stopped`.
        cut: number of tokens of the prompt that were left out on the left.
    """

    text: str
    stopped: str
    cut: int = 0


def check(job: Job, longest: int, asked: Sequence[Generation]) -> None:
    """Look at what can be wrong before anything is computed.

    Raises:
        ConfigError: the layout cuts the model, or there is no room for an answer.
    """
    if asked and max(job.dist.layout.pp, job.dist.layout.cp) > 1:
        raise ConfigError("Generating text needs a whole model and whole sequences; this layout cuts it by pp or cp.")
    for one in asked:
        if one.tokens >= longest:
            raise ConfigError(
                f"An answer may have {one.tokens:,} tokens, and the model reads {longest:,} with the prompt; ask for "
                "fewer."
            )


def generate(job: Job, model: Model, asked: Sequence[Generation]) -> list[Answer]:
    """The answers, in order; every rank gets them."""
    return [_answer(job, model, one) for one in asked]


def _answer(job: Job, model: Model, asked: Generation) -> Answer:
    tokenizer = hookspecs.tokenizer(job)
    prompt, cut = asked.prompt, 0
    longest = min((int(getattr(part, "max_sequence", 1 << 31)) for part in model.parts), default=1 << 31)
    ids, room = tokenizer.encode(prompt), longest - asked.tokens - len(tokenizer.begin)
    if len(ids) > room:
        cut = len(ids) - room
        prompt = tokenizer.decode(ids[cut:])
    sampling = Sampling(
        tokens=asked.tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        seed=asked.drawn,
        stop=asked.stop,
    )
    completion = Completion(job, model, prompt, sampling)
    text = "".join(completion)
    return Answer(text, completion.stopped, cut)
