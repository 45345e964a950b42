"""Answers to prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge_train import Job, Model
from forge_train.base.errors import ConfigError
from forge_train_kit import hookspecs
from forge_train_kit.tokenizer import Tokenizer

from ..generation import rows
from ..generation.engine import run
from ..generation.sampling import Sampling


@dataclass(frozen=True)
class Generation:
    """A prompt, and how it is answered.

    Args:
        prompt: a text.
        tokens: the most tokens of the answer.
        stop: texts that end it.
        temperature: 0 for the likeliest tokens; `top_p` and `top_k` as in `forge generate`.
        seed: decides with `draw` what is drawn, so that neither the order nor what is beside it changes an answer.
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


@dataclass(frozen=True)
class Answer:
    """Text that a model wrote.

    Args:
        text: without the stop text.
        stopped: why it ended: see `Stopped` in `forge_train_tools.generation.rows`.
        cut: number of tokens of the prompt that were left out on the left.
    """

    text: str
    stopped: str
    cut: int = 0


def check_prompts(job: Job, model: Model, asked: Sequence[Generation]) -> None:
    """Look at what can be wrong before anything is computed.

    Raises:
        ConfigError: this model or layout can't generate, or there is no room for an answer.
    """
    if asked:
        rows.check(job, model)
    longest = rows.longest(model)
    for one in asked:
        if longest is not None and one.tokens >= longest:
            raise ConfigError(
                f"An answer may have {one.tokens:,} tokens, and the model reads {longest:,} with the prompt; ask for "
                "fewer."
            )


def generate(
    job: Job, model: Model, asked: Sequence[Generation], batch: int, longest: int | None = None
) -> list[Answer]:
    """The answers, in order; every rank gets them.

    Args:
        job: the job.
        model: with its weights.
        asked: the prompts.
        batch: answers that are written side by side; it changes none of them.
        longest: tokens of a prompt and its answer; by default as many as the model reads at once.
    """
    found: dict[int, Answer] = {}
    cuts: dict[int, int] = {}
    longest = rows.longest(model) if longest is None else longest
    tokenizer = hookspecs.tokenizer(job)
    begun = (_row(tokenizer, longest, number, one, cuts) for number, one in enumerate(asked))
    for row in run(job, model, begun, slots=batch):
        found[row.number] = Answer(row.text, row.stopped, cuts.pop(row.number))
    return [found[number] for number in range(len(asked))]


def _row(
    tokenizer: Tokenizer, longest: int | None, number: int, asked: Generation, cuts: dict[int, int]
) -> rows.TextRow:
    """A prompt as the engine takes it, cut on its left if there is no room for the answer."""
    ids = rows.encode(tokenizer, asked.prompt, whole=False)
    begin = len(tokenizer.begin)
    cut = cuts[number] = 0 if longest is None else max(len(ids) + asked.tokens - longest, 0)
    sampling = Sampling(
        tokens=asked.tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        seed=asked.seed,
        stop=asked.stop,
    )
    kept = [*ids[:begin], *ids[begin + cut :]]
    return rows.TextRow(number, kept, sampling, tokenizer, longest=longest, request=asked.draw)
