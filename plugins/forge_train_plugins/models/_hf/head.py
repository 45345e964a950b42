"""The head of a class of `transformers`: from the last hidden states to logits, by the class's own code."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn


class Answer(tuple[Any, ...]):
    """What the model without its head returns: the hidden states, and nothing else."""

    __slots__ = ()

    @property
    def last_hidden_state(self) -> Any:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Given(nn.Module):
    """Stands where the class's forward expects the model without its head, and returns the hidden states it is given.

    Args:
        paths: children of that model, which the class may call instead.
    """

    def __init__(self, paths: tuple[str, ...]) -> None:
        super().__init__()
        for path in paths:
            self.__dict__[path] = self  # not a child: that would be a circle of modules

    def forward(self, *_: Any, inputs_embeds: Tensor | None = None, **__: Any) -> Answer:
        return Answer((inputs_embeds,))


class Head:
    """Mixed into the class: its forward takes hidden states.

    Multipliers, biases and soft caps of the logits are in the forward of the class, and not in its linear layer.
    """

    @property
    def out_features(self) -> int:
        """Logits of a token, from which a loss chooses how many tokens' logits it holds at once."""
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
