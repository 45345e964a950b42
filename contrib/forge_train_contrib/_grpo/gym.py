"""Tasks of reasoning-gym: prompts that it makes, and answers that it scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forge_train import ConfigError
from forge_train.base.errors import describe, nearest

KEY = "grpo.gym"


class Gym:
    """A task.

    Args:
        name: of the task.
        options: of the task, which may name a seed.
        seed: of the entries.

    Raises:
        ConfigError: reasoning-gym is not installed, or has no such task or options.
    """

    def __init__(self, name: str, options: Mapping[str, Any], seed: int) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ConfigError(f"{KEY} needs reasoning-gym: pip install 'forge-train[rl]'.") from error
        if name not in DATASETS:
            raise ConfigError(f"{KEY}: reasoning-gym has no task {name!r}.{nearest(name, DATASETS)}")
        try:
            self._entries = reasoning_gym.create_dataset(name, **{"seed": seed, **options})
        except Exception as error:  # its tasks check their options by assertions
            raise ConfigError(f"grpo.gym_options: {name} refuses {dict(options)}: {describe(error)}") from error
        self._name = name

    def records(self, *, chat: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield each entry with its place.

        Args:
            chat: whether the question is a user's message, and not a text.
        """
        for at in range(len(self._entries)):
            entry = dict(self._entries[at])
            question = entry["question"]
            asked = {"messages": [{"role": "user", "content": question}]} if chat else {"prompt": question}
            yield f"{self._name}, entry {at}", {**entry, **asked}

    def __call__(
        self, prompts: Sequence[str], answers: Sequence[str], records: Sequence[Mapping[str, Any]], where: Sequence[str]
    ) -> list[float]:
        """The score of each answer, white space at both ends aside."""
        pairs = zip(answers, records, strict=True)
        return [float(self._entries.score_answer(answer=answer.strip(), entry=record)) for answer, record in pairs]
