"""Findings of `forge debug look` about one text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BEFORE = "embedding"
"""Name of the residual stream before the first layer."""


@dataclass(frozen=True)
class Lens:
    """The head applied to the residual stream after each layer, behind the final norm (nostalgebraist 2020)."""

    top: Tensor
    """The likeliest next token at each position, `[states, tokens]` int64."""
    probability: Tensor
    """Its probability, `[states, tokens]` fp32."""
    rank: Tensor
    """The place of the token that does follow, 1 for the likeliest, and 0 before a position of an item;
    `[states, tokens - 1]` int64."""
    texts: list[list[str]]
    """The text of each of `top`."""


@dataclass(frozen=True)
class Looked:
    """Findings about one text."""

    checkpoint: str
    step: int
    ids: list[int]
    text: str
    """All of it, with a placeholder for each item."""
    texts: list[str]
    """Of each token; empty for all but the last token of a character. A position of an item has a label."""
    states: list[str]
    """Names of states of the residual stream: before the first layer, and after each."""
    norms: Tensor
    """2-norms, `[states, tokens]` fp32."""
    attention: dict[str, Tensor]
    """`L.H` → weights, `[queries, keys]` fp32."""
    without: dict[str, str]
    """Layer → why it has no attention maps."""
    lens: Lens | None
    no_lens: str = ""
    """The reason, if there is no lens."""

    def tensors(self) -> dict[str, Tensor]:
        """All numbers, by name."""
        found = {"input_ids": torch.tensor(self.ids), "norms": self.norms}
        found |= {f"attention.{name}": one for name, one in self.attention.items()}
        if self.lens is not None:
            own = {"top": self.lens.top, "probability": self.lens.probability, "rank": self.lens.rank}
            found |= {f"lens.{name}": one for name, one in own.items()}
        return found

    def plain(self) -> dict[str, Any]:
        """The same as JSON has it."""
        lens = None
        if self.lens is not None:
            numbers = {name: getattr(self.lens, name).tolist() for name in ("top", "probability", "rank")}
            lens = {**numbers, "texts": self.lens.texts}
        return {
            "checkpoint": self.checkpoint,
            "step": self.step,
            "tokens": [{"id": one, "text": text} for one, text in zip(self.ids, self.texts, strict=True)],
            "states": self.states,
            "norms": self.norms.tolist(),
            "attention": {name: one.tolist() for name, one in self.attention.items()},
            "without_attention": self.without,
            "lens": lens,
            "no_lens": self.no_lens,
        }


def lens_rows(logits: Tensor, following: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest token and its probability at each position, and the ranks of the tokens that follow.

    Args:
        logits: `[tokens, vocabulary]` fp32.
        following: the tokens after the first of these positions, `[at most tokens]`.
    """
    best = logits.log_softmax(-1).max(-1)
    asked = logits[: len(following)]
    ranks = (asked > asked.gather(1, following[:, None])).sum(1) + 1
    return best.indices, best.values.exp(), ranks
