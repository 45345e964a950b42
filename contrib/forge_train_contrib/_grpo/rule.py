"""The distribution that tokens of an answer are drawn from: the same when they are drawn and when they are learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from forge_train_tools.generation.draws import uniform
from forge_train_tools.generation.sampling import Distribution, Sampling

LOWEST = -1e30
"""The logit of an id that can't be drawn: its probability is 0, and 0 times its logarithm is too."""


@dataclass(frozen=True)
class Rule:
    """The rule by which tokens are drawn.

    Args:
        temperature: divides the logits.
        vocabulary: of the tokenizer; a model may have logits beyond it.
        top_k: see `Sampling`, also for the others.
    """

    temperature: float
    vocabulary: int
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, config: Any, vocabulary: int) -> Rule:
        return cls(config.temperature, vocabulary, config.top_k, config.top_p, config.min_p, config.repetition_penalty)

    @property
    def truncates(self) -> bool:
        """True if some tokens can't be drawn."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def penalises(self) -> bool:
        """True if a token's logit depends on the tokens before it."""
        return self.repetition_penalty != 1

    def distribution(self, logits: Tensor, seen: Sequence[int]) -> Distribution:
        """Of the next token after some others, from `[vocabulary]` on the CPU."""
        return Distribution.of(logits[: self.vocabulary], self._sampling, seen)

    def scores(self, logits: Tensor, drawable: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        """The logits of the distribution, fp32 and of the same shape and placement; vocabulary on the last axis.

        Args:
            logits: of the model.
            drawable: the tokens that could be drawn at each place, bool of the same shape; None for all.
            seen: the tokens that were there before, likewise; None for none.
        """
        scores, size = logits.float(), logits.shape[-1]
        if seen is not None:
            penalised = torch.where(scores < 0, scores * self.repetition_penalty, scores / self.repetition_penalty)
            scores = torch.where(_placed(seen, scores), penalised, scores)
        scores = scores / self.temperature
        if drawable is None:
            if size <= self.vocabulary:
                return scores
            drawable = torch.arange(size, device=logits.device) < self.vocabulary
        return scores.masked_fill(_placed(~drawable, scores), LOWEST)

    @cached_property
    def _sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )


def _placed(values: Tensor, like: Tensor) -> Tensor:
    """Values that every rank has, sharded along their last axis as another tensor is along its own."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    if not isinstance(like, DTensor):
        return values
    theirs, last = like.dim() - 1, values.dim() - 1
    places = [Shard(last) if one.is_shard(theirs) else Replicate() for one in like.placements]
    return cast("Tensor", distribute_tensor(values, like.device_mesh, places, src_data_rank=None))


@dataclass(frozen=True)
class Drawable:
    """The tokens that could be drawn at each place of a micro-batch, as they were found when answers were drawn, and
    those that were there before.

    Args:
        entries: `[tokens, 2]` int64: a place, row · sequence + position, and an id. A place without any had them all;
            None if all had.
        places: number of places.
        vocabulary: of the tokenizer.
        inputs: `[batch, sequence]` int64, where tokens that were there before count.
    """

    entries: Tensor | None
    places: int
    vocabulary: int
    inputs: Tensor | None = None

    def seen(self, places: Tensor, size: int) -> Tensor | None:
        """The tokens that a row has up to some of its places, `[batch, places, size]` bool; None if none count.

        Args:
            places: their numbers, `[batch, places]`, row by row.
            size: number of logits.
        """
        if self.inputs is None:
            return None
        rows, length = self.inputs.shape
        first = torch.full((rows, size), length, device=places.device)
        positions = torch.arange(length, device=places.device).expand(rows, length)
        first.scatter_reduce_(1, self.inputs, positions, "amin")
        return first[:, None] <= (places % length)[..., None]

    def at(self, places: Tensor, size: int) -> Tensor | None:
        """The tokens that could be drawn at some places, `[…, size]` bool; None for all.

        Args:
            places: their numbers, `[…]`, each once.
            size: number of logits.
        """
        if self.entries is None:
            return None
        device, count = places.device, places.numel()
        asked = torch.full((self.places,), count, device=device)
        asked[places.flatten()] = torch.arange(count, device=device)
        found = torch.zeros(count + 1, size, dtype=torch.bool, device=device)  # the last row is of other places
        found[asked[self.entries[:, 0]], self.entries[:, 1]] = True
        known = torch.arange(size, device=device) < self.vocabulary
        found = found[:-1]
        return (found | (known & ~found.any(1, keepdim=True))).view(*places.shape, size)


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
        self.drawable: list[Tensor] = []
        """Ids that could be drawn in the place of each, `[ids]` int32; none if all could."""
        self._rule, self._ends, self._seed = rule, ends, seed

    @property
    def answer(self) -> list[int]:
        """Its tokens, the one that ends it included."""
        return self.ids[self.prompt :]

    def choose(self, logits: Tensor) -> tuple[int, float, Tensor | None]:
        """Draw a token: it, its log-probability, and the ids that could be drawn; None for all."""
        found = self._rule.distribution(logits, self.ids)
        token = found.draw(uniform(self._seed, self.number, len(self.ids)))
        return token, found.log_probability(token), found.ids.int() if self._rule.truncates else None

    def add(self, choice: tuple[int, float, Tensor | None]) -> None:
        token, log_probability, drawable = choice
        self.ids.append(token)
        self.drawn.append(log_probability)
        if drawable is not None:
            self.drawable.append(drawable)
        self.ended = token in self._ends
        self.done = self.ended or len(self.drawn) == self.most
