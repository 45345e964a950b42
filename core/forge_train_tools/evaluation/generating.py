"""Answers to prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_train import Job, Model
from forge_train.base.errors import ConfigError
from forge_train_kit import hookspecs
from forge_train_kit.data.items import ItemPrompts, PromptItems
from forge_train_kit.tokenizer import Tokenizer

from ..generation import rows
from ..generation.completion import items_of
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
        items: modality → items, at the prompt's placeholders or before it.
    """

    prompt: str
    tokens: int
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    draw: tuple[int, int] = (0, 0)
    items: Mapping[str, Sequence[Any]] = field(default_factory=dict)


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
    longest, prompts = rows.longest(model), _prompts(job, asked)
    for one in asked:
        if longest is not None and one.tokens >= longest:
            raise ConfigError(
                f"An answer may have {one.tokens:,} tokens, and the model reads {longest:,} with the prompt; ask for "
                "fewer."
            )
        if prompts is not None and one.items:
            ids, _ = _placed(prompts, one)
            if longest is not None and len(ids) + one.tokens > longest:
                raise ConfigError(
                    f"A prompt has {len(ids):,} tokens with its items, and the model reads {longest:,} with an answer "
                    f"of {one.tokens:,}: {one.prompt[-40:]!r}."
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
    tokenizer, prompts = hookspecs.tokenizer(job), _prompts(job, asked)
    begun = (_row(tokenizer, longest, number, one, cuts, prompts) for number, one in enumerate(asked))
    for row in run(job, model, begun, slots=batch):
        found[row.number] = Answer(row.text, row.stopped, cuts.pop(row.number))
    return [found[number] for number in range(len(asked))]


def _prompts(job: Job, asked: Sequence[Generation]) -> ItemPrompts | None:
    """Finds the items of prompts; None if there are none.

    Raises:
        ConfigError: the model does not take such items.
    """
    wanted = {name: some for one in asked for name, some in one.items.items() if some}
    return items_of(job, wanted) if wanted else None


def _placed(prompts: ItemPrompts, asked: Generation) -> tuple[list[int], PromptItems]:
    text = prompts.with_placeholders(asked.prompt, asked.items)
    marked = rows.encode(prompts.tokenizer, text, whole=False)
    return prompts.place(marked, asked.items, f"The prompt {asked.prompt[-40:]!r}", "/")


def _row(
    tokenizer: Tokenizer,
    longest: int | None,
    number: int,
    asked: Generation,
    cuts: dict[int, int],
    prompts: ItemPrompts | None,
) -> rows.TextRow:
    """A prompt as the engine takes it, cut on its left if there is no room for the answer."""
    items = None
    if prompts is not None and asked.items:
        ids, items = _placed(prompts, asked)
    else:
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
    return rows.TextRow(number, kept, sampling, tokenizer, longest=longest, request=asked.draw, items=items)
