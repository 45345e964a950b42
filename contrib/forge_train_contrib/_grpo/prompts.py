"""Prompts: records as the tokens that the model continues."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from forge_train import ConfigError, Job
from forge_train_kit import hookspecs, model_files
from forge_train_kit.data.chats import Segments, open_template, tokenise_ended
from forge_train_kit.data.chats.beside import turn_end
from forge_train_kit.data.chats.calls import tools_of
from forge_train_kit.data.chats.records import check_beside, messages_of, with_system
from forge_train_kit.data.chats.sources import NoTemplateError
from forge_train_kit.data.chats.template import Template
from forge_train_kit.data.files import find
from forge_train_kit.data.formats import END, Part, lookup, text_of
from forge_train_kit.data.held_out import Side, side_of
from forge_train_kit.data.permutation import permute

from .gym import Gym
from .rewards import ANSWER, EXACT

KEY = "grpo.prompts"


@dataclass(frozen=True)
class Prompt:
    """A record as the model reads it."""

    where: str
    """File and place, for messages."""
    text: str
    ids: tuple[int, ...]
    record: Mapping[str, Any]


class Prompts:
    """The prompts of both sides.

    Args:
        job: gives the tokenizer and the length of a row.
        config: of the plugin.
        gym: makes the prompts, where no files have them.

    Raises:
        ConfigError: naming the file and the place of a record that is no prompt, or leaves no room for an answer.
    """

    def __init__(self, job: Job, config: Any, gym: Gym | None = None) -> None:
        self._job, self._config, self._tokenizer = job, config, hookspecs.tokenizer(job)
        self.ends = frozenset(self._tokenizer.stops)
        """Tokens that end an answer."""
        self._exact = config.reward == EXACT and gym is None and (config.reward_weight > 0 or not config.reward_model)
        self._sides: dict[Side, list[Prompt]] = {"train": [], "validation": []}
        for where, record in gym.records(chat=bool(config.template)) if gym else self._records():
            prompt = self._prompt(where, record)
            self._sides[side_of(prompt.text.encode(), config.held_out)].append(prompt)
        prompts = [prompt for side in self._sides.values() for prompt in side]
        if not prompts:
            raise ConfigError(f"{KEY}: {config.prompts} has no record.")
        self.chats = any(prompt.record.get("messages") is not None for prompt in prompts)
        """True if some are chats."""
        if config.template and not self.chats:
            raise ConfigError(f"grpo.template: no record of {config.prompts} has messages; leave it out.")

    def some(self, side: Side, first: int, count: int) -> list[Prompt]:
        """Prompts of the endless sequence of a side, by number; those of training in another order in each epoch."""
        known = self._sides[side]
        if not known:
            which = "evaluation: raise grpo.held_out, or leave evaluations out (train.evaluate_every = 0)"
            raise ConfigError(f"{KEY}: no prompt is left for {'training' if side == 'train' else which}.")
        numbers = np.arange(first, first + count, dtype=np.int64)
        places = numbers % len(known)
        if side == "train":
            places = permute(places, numbers // len(known), len(known), self._job.seed)
        return [known[place] for place in places.tolist()]

    def _records(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for file in find(self._config.prompts, key=KEY):
            form = lookup(file.suffix, file.label)
            parts = form.parts(file)
            if parts:
                for place, record in form.read(file, Part(parts[0].start, END, 0)):
                    yield file.at(place), record

    def _prompt(self, where: str, record: Mapping[str, Any]) -> Prompt:
        begin = self._tokenizer.begin
        if record.get("messages") is not None:
            text = self._chat(where, record)
            ids = self._tokenizer.encode(text)
        else:
            if beside := [name for name in ("system", "tools") if record.get(name) is not None]:
                raise ConfigError(f"{where}: {beside[0]!r} goes with messages; write the prompt as a message too.")
            text = text_of(record, "prompt", where, f"{KEY}; or messages")
            ids = self._tokenizer.encode(text)
            ids = ids if tuple(ids[: len(begin)]) == begin else [*begin, *ids]
        if self._exact and not isinstance(record.get(ANSWER), str | int | float):
            raise ConfigError(
                f"{where}: has no text or number under {ANSWER!r}, which grpo.reward = '{EXACT}' compares with; add "
                "it, or name a reward of your own."
            )
        most, sequence = self._config.tokens, self._job.config.train.sequence
        if not ids:
            raise ConfigError(f"{where}: the prompt is empty.")
        if len(ids) + most > sequence:
            raise ConfigError(
                f"{where}: the prompt has {len(ids):,} tokens, and with an answer of grpo.tokens = {most:,} is longer "
                f"than train.sequence = {sequence:,}; shorten it, or change one of the two."
            )
        return Prompt(where, text, tuple(ids), record)

    def with_answer(self, prompt: Prompt, answer: str) -> list[int]:
        """A prompt and an answer to it, a text or a chat, and its end: as preferences are written for training."""
        record, where, begin, end = prompt.record, prompt.where, self._tokenizer.begin, self._tokenizer.end
        if record.get("messages") is None:
            ids = self._tokenizer.encode(prompt.text + answer)
            ids = ids if tuple(ids[: len(begin)]) == begin else [*begin, *ids]
            return ids if end is None or ids[-1] in self.ends else [*ids, end]
        messages = with_system(record, messages_of(record["messages"], f"{where}: messages"), where)
        chat = [*messages, {"role": "assistant", "content": answer}]
        template, ends = self._judged
        text = template.render(chat, tools_of(record.get("tools"), where))[0]
        found: list[int] = tokenise_ended(self._tokenizer, template, Segments(text, ()), ends)[0].tolist()
        return found

    def _chat(self, where: str, record: Mapping[str, Any]) -> str:
        check_beside(record, where)
        messages = with_system(record, messages_of(record["messages"], f"{where}: messages"), where)
        if not messages or messages[-1]["role"] == "assistant":
            raise ConfigError(f"{where}: messages: expected a last message for the assistant to answer.")
        return self._written.render(messages, tools_of(record.get("tools"), where), generation_prompt=True)[0]

    @cached_property
    def _written(self) -> Template:
        section, key = model_files.option(self._job.hooks) or ("", "")
        path = Path(getattr(self._job.config.sections[section], key) if section else "")
        folder = path.parent if path.name == model_files.TOKENIZER else path
        try:
            template = open_template(self._config.template, folder if folder.is_dir() else None)
            end = turn_end(template, self._tokenizer)
        except ConfigError as error:
            raise ConfigError(f"grpo.template: {error}") from error
        if end is not None:
            self.ends |= {end}
        return template

    @cached_property
    def _judged(self) -> tuple[Template, frozenset[int]]:
        """The reward model's own template of chats, if it has one, and what ends them."""
        try:
            template = open_template("", model_files.folder_of(self._config.reward_model))
        except NoTemplateError:
            return self._written, self.ends
        end = turn_end(template, self._tokenizer)
        return template, frozenset(self._tokenizer.stops) | ({end} if end is not None else set())


def shown(record: Mapping[str, Any]) -> str:
    """A record's right answer, if it has one, for a table."""
    found = record.get(ANSWER)
    return found if isinstance(found, str) else "" if found is None else json.dumps(found, default=str)
