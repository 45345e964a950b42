"""The distribution that tokens of an answer are drawn from: the same when they are drawn and when they are learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from forge_train_tools.generation.draws import uniform

LOWEST = -1e30
"""The logit of an id that is no token: its probability is 0, and 0 times its logarithm is too."""


@dataclass(frozen=True)
class Rule:
    """The rule by which tokens are drawn.

    Args:
        temperature: divides the logits.
        vocabulary: of the tokenizer; a model may have logits beyond it.
    """

    temperature: float
    vocabulary: int

    def scores(self, logits: Tensor) -> Tensor:
        """The logits of the distribution, fp32 and of the same shape and placement; vocabulary on the last axis."""
        scores = logits.float() / self.temperature
        if (size := logits.shape[-1]) <= self.vocabulary:
            return scores
        outside = torch.zeros(size, device=logits.device)
        outside[self.vocabulary :] = LOWEST
        return scores + _placed(outside, scores)


def _placed(row: Tensor, like: Tensor) -> Tensor:
    """A row that every rank has, sharded as the last axis of another tensor is."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    if not isinstance(like, DTensor):
        return row
    last = like.dim() - 1
    places = [Shard(0) if one.is_shard(last) else Replicate() for one in like.placements]
    return cast("Tensor", distribute_tensor(row, like.device_mesh, places, src_data_rank=None))


class Answer:
    """A prompt and the answer that is being drawn: a row of `forge_train_tools.generation.engine`.

    Args:
        number: its number among all answers of the run, for the draws.
        ids: tokens of the prompt.
        most: longest answer.
        rule: how tokens are drawn.
        ends: tokens that end an answer.
        seed: of the draws.
    """

    def __init__(
        self, number: int, ids: tuple[int, ...], most: int, rule: Rule, ends: frozenset[int], seed: int
    ) -> None:
        self.number, self.ids, self.prompt, self.most = number, list(ids), len(ids), most
        self.done = self.ended = False
        self.drawn: list[float] = []
        """Log-probabilities of the tokens of the answer."""
        self._rule, self._ends, self._seed = rule, ends, seed

    @property
    def answer(self) -> list[int]:
        """Its tokens, the one that ends it included."""
        return self.ids[self.prompt :]

    def choose(self, logits: Tensor) -> tuple[int, float]:
        """Draw a token: the first whose sum of probabilities, in the order of ids, exceeds the number of its place."""
        known = self._rule.scores(logits).double().log_softmax(0)
        sums = known.exp().cumsum(0)
        place = uniform(self._seed, self.number, len(self.ids)) * float(sums[-1])
        token = min(int(torch.searchsorted(sums, place, right=True)), self._rule.vocabulary - 1)
        return token, float(known[token])

    def add(self, choice: tuple[int, float]) -> None:
        self.ids.append(choice[0])
        self.drawn.append(choice[1])
        self.ended = choice[0] in self._ends
        self.done = self.ended or len(self.drawn) == self.most
