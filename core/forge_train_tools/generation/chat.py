"""A chat with a model: its history, and answers to it."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_train.base.errors import ConfigError
from forge_train.base.strict_json import dumps
from forge_train.contract.model import Model
from forge_train.plugin.job import Job
from forge_train_kit import hookspecs
from forge_train_kit.data.items import prompts_of

from .chats import ChatPrompts, shorter
from .completion import Completion, items_of
from .drafts import drafts_of
from .rows import check, encode, longest
from .sampling import Sampling


class Chat:
    """A conversation that a model continues.

    Args:
        job: of the model.
        model: with its weights.
        prompts: its chat template.
        sampling: how to choose tokens.
        system: the system's message; empty for none.

    Raises:
        ConfigError: the model can't chat, or its template takes no system's message.
    """

    def __init__(self, job: Job, model: Model, prompts: ChatPrompts, sampling: Sampling, system: str = "") -> None:
        check(job, model)
        drafts_of(job, model, sampling)  # so that what can't be is refused before anything is typed
        self._job, self._model, self._chats, self._sampling = job, model, prompts, sampling
        self._longest = longest(model)
        self._turns: list[dict[str, Any]] = []
        self._answers = 0
        self._prompts = prompts_of(job)
        self._items: list[tuple[str, str]] = []
        """Modality and file of each item so far, in order."""
        self._next: list[tuple[str, str]] = []
        """Those that the next message begins with."""
        self.left_out = 0
        """Number of turns, the oldest, that the newest answer did without, as there was no room for them."""
        self.completion: Completion | None = None
        """The newest answer."""
        self.system = ""
        self.set_system(system)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages so far, the system's first."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self._turns]

    def set_system(self, text: str) -> None:
        """Put a system's message in the place of the one before; empty for none.

        Raises:
            ConfigError: there is an answer already, which did not follow it, or the template takes none; the one before
                stays.
        """
        if self._turns:
            raise ConfigError(
                "The system's message stands before all answers, and there are some; /reset forgets them."
            )
        before, self.system = self.system, text
        try:
            self._chats.render([*self.messages[: bool(text)], {"role": "user", "content": "?"}])
        except ConfigError:
            self.system = before
            raise

    @property
    def modalities(self) -> tuple[str, ...]:
        """Kinds of items that messages may have beside text."""
        return () if self._prompts is None else tuple(self._prompts.fields.modalities)

    def show(self, modality: str, file: Path) -> None:
        """Let the next message begin with an item, such as an image.

        Raises:
            ConfigError: the model takes no such items, or the file holds none.
        """
        path = str(file.absolute())
        prompts = items_of(self._job, {modality: [path]})
        assert prompts is not None
        mark = prompts.tokenizer.encode(prompts.fields.modalities[modality].placeholder)
        _, found = prompts.place(mark, {modality: [path]}, f"/{modality}", "")
        found.read(1 << 20)
        self._next.append((modality, path))

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self._turns.clear()
        self._items.clear()
        self._next.clear()

    def save(self, file: Path) -> None:
        """Write the messages as a record that training and `forge generate --from-file` read.

        Raises:
            ConfigError: there are none, the file is there, or can't be written.
        """
        if not self._turns:
            raise ConfigError("There is nothing to save yet.")
        try:
            out = file.open("x", encoding="utf-8")
        except FileExistsError as error:
            raise ConfigError(f"{file} exists; name a new file.") from error
        except OSError as error:
            raise ConfigError(f"{file}: can't be written: {error.strerror or error}.") from error
        try:
            with out:
                out.write(f"{dumps({'messages': self.messages, **self._fields()})}\n")
        except OSError as error:
            file.unlink(missing_ok=True)  # so that the same command can be tried again
            raise ConfigError(f"{file}: can't be written: {error.strerror or error}.") from error

    def answer(self, text: str) -> Generator[str, None, None]:
        """Yield the pieces of an answer to a user's message, as they arrive. Both become part of the history, an answer
        that is given up half-way too.

        Raises:
            ConfigError: the template refuses the message, or it is too long.
        """
        if self._prompts is not None:
            shown = (self._prompts.fields.modalities[name].placeholder for name, _ in self._next)
            text = "".join((*shown, text))
        message = {"role": "user", "content": text}
        self.completion = None
        self.completion = completion = self._completion([*self.messages, message], [*self._items, *self._next])
        try:
            yield from completion
        finally:
            if completion.text or completion.stopped:
                self._items, self._next = [*self._items, *self._next], []
                self._turns += [message, {"role": "assistant", "content": completion.text}]

    def _completion(self, messages: Sequence[Mapping[str, Any]], items: Sequence[tuple[str, str]]) -> Completion:
        prompt, given = "", dict[str, list[Any]]()
        for left_out, some in enumerate(shorter(messages)):
            prompt = self._chats.render(some)
            given = {} if self._prompts is None else self._prompts.last(prompt, _by_modality(items))
            self.left_out = left_out
            if self._fits(prompt, given):
                break
        self._answers += 1
        return Completion(
            self._job,
            self._model,
            prompt,
            self._sampling,
            whole=True,
            ends=self._chats.ends,
            request=self._answers - 1,
            items=given,
        )

    def _fields(self) -> dict[str, list[str]]:
        """The items as fields of a record."""
        return {f"{name}s": some for name, some in _by_modality(self._items).items()}

    def _fits(self, prompt: str, items: Mapping[str, Sequence[Any]]) -> bool:
        """True if there is room for an answer, or for a quarter of what the model reads at once."""
        if self._longest is None:
            return True
        if self._prompts is None:
            tokens = len(encode(hookspecs.tokenizer(self._job), prompt, whole=True))
        else:
            marked = encode(self._prompts.tokenizer, prompt, whole=True)
            tokens = len(self._prompts.place(marked, items, "The chat", "")[0])
        return tokens + min(self._sampling.tokens, self._longest // 4) <= self._longest


def _by_modality(items: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, path in items:
        found.setdefault(name, []).append(path)
    return found
