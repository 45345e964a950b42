"""The head of a `transformers` class: the class's own code turns the last hidden states into logits."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn


class Answer(tuple[Any, ...]):
    """The result of the model without its head: the hidden states, and nothing else."""

    __slots__ = ()

    @property
    def last_hidden_state(self) -> Any:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Given(nn.Module):
    """Takes the place of the model without its head in the class's forward, and returns the hidden states it is given.

    Args:
        paths: children of that model that the class may call directly.
    """

    def __init__(self, paths: tuple[str, ...]) -> None:
        super().__init__()
        for path in paths:
            self.__dict__[path] = self  # not a child module, which would form a cycle

    def forward(self, *_: Any, inputs_embeds: Tensor | None = None, **__: Any) -> Answer:
        return Answer((inputs_embeds,))


class Head:
    """Mixed into the class, so that its forward takes hidden states.

    Multipliers, biases and soft caps of the logits are in the class's forward, not in its linear layer.
    """

    @property
    def out_features(self) -> int:
        """Logits per token; a loss uses it to choose for how many tokens it holds logits at once."""
        return int(self.config.get_text_config().vocab_size)  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """`[batch, sequence, dim]` → logits `[batch, sequence, vocabulary]`."""
        logits: Tensor = super().forward(inputs_embeds=hidden, use_cache=False).logits  # type: ignore[misc]
        return logits


def head_of(model: Any, base: str) -> nn.Module:
    """A model's head, which shares the model's modules."""
    inner = getattr(model, base)
    head = copy.copy(model)
    head.__dict__ = {**vars(model), "_modules": {**model._modules}}
    head._modules[base] = Given(tuple(inner._modules))
    head.__class__ = type(f"{type(model).__name__}Head", (Head, type(model)), {})
    made: nn.Module = head
    return made
