"""Chats as prompts: rendered by the model's chat template, and without their oldest turns if they are too long."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_train.base.errors import ConfigError
from forge_train.plugin.job import Job
from forge_train_kit import hookspecs, model_files
from forge_train_kit.data.chats.beside import turn_end
from forge_train_kit.data.chats.calls import tools_of
from forge_train_kit.data.chats.records import check_beside, messages_of, with_system
from forge_train_kit.data.chats.sources import advice, open_template
from forge_train_kit.data.tokenizers.special import stop_ids

TEMPLATE = "chat_template.jinja"
_HEAD = ("system", "developer")
"""Roles of messages that begin a chat and stay."""


class ChatPrompts:
    """A model's chat template.

    Args:
        job: of the model.
        path: of the model: a checkpoint, or a folder in Hugging Face layout.
        adapters: folders of PEFT that were added to the weights: they may bring a template.
        choice: another template: `chatml`, `llama3`, `plain` or a file.

    Raises:
        ConfigError: there is none, or adapters have different ones.
    """

    def __init__(self, job: Job, path: Path, adapters: Sequence[Path] = (), choice: str = "") -> None:
        folder = _folder(job, path, adapters)
        if folder is None and not choice:
            raise ConfigError(
                f"chat: this model came without a tokenizer's folder, so it has no chat template; {advice(job.config)}."
            )
        try:
            self._template = open_template(choice, folder)
        except ConfigError as error:
            raise ConfigError(f"--template: {error}") from error
        self.ends = list(stop_ids(folder)[1]) if folder else []
        """Tokens that end an answer, beside the tokenizer's."""
        if choice and (end := turn_end(self._template, hookspecs.tokenizer(job))) is not None:
            self.ends.append(end)

    @property
    def digest(self) -> str:
        found = (sorted(self._template.sources.items()), sorted(self._template.variables.items()), self.ends)
        return hashlib.sha256(repr(found).encode()).hexdigest()

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> str:
        """The text that the assistant's answer follows.

        Raises:
            ConfigError: the template refuses the messages.
        """
        return self._template.render(messages, tools, generation_prompt=True)[0]


def question(record: Mapping[str, Any], where: str) -> tuple[list[dict[str, Any]], tuple[Any, ...]]:
    """The messages of a record that the assistant is to answer, and its tools.

    Raises:
        ConfigError: they are no messages, or the assistant said the last.
    """
    check_beside(record, where)
    messages = with_system(record, messages_of(record["messages"], f"{where}: messages"), where)
    if not messages or messages[-1]["role"] in ("assistant", *_HEAD):
        last = f"is the {messages[-1]['role']}'s" if messages else "is missing"
        raise ConfigError(f"{where}: messages: expected a user's last message to answer; it {last}.")
    return messages, tools_of(record.get("tools"), where)


def shorter(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the messages, then without the oldest turn, without the two oldest, …, down to the last one. A turn begins
    with a user's message; the system's stay."""
    start = next((at for at, one in enumerate(messages) if one["role"] not in _HEAD), len(messages))
    head = list(messages[:start])
    turns = [at for at in range(start + 1, len(messages)) if messages[at]["role"] == "user"]
    for at in (start, *turns):
        yield [*head, *messages[at:]]


def _folder(job: Job, path: Path, adapters: Sequence[Path]) -> Path | None:
    """The folder whose chat template and ends of turns the model knows: an adapter's, if it has one."""
    own = {one: one / TEMPLATE for one in adapters if (one / TEMPLATE).is_file()}
    if len({file.read_bytes() for file in own.values()}) > 1:
        raise ConfigError(f"chat: {' and '.join(map(str, own))} have different chat templates; leave --chat out.")
    if own:
        return next(iter(own))
    files = model_files.of(job.config, job.hooks, path)
    name = model_files.vocabulary_of(files)
    return files[name].parent if name else None
