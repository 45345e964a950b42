"""Dropout of attention's weights that is the same on every layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from forge_train.base.errors import PluginError

from .dropout import Salted, check_rate, mixed

if TYPE_CHECKING:
    from forge_train.plugin.job import Job


class DroppedWeights(NamedTuple):
    """Weights that an attention kernel sets to zero: its keyword `dropout`.

    The mask is a function of the four numbers that identify a weight in the run: the sample, the head, and the
    positions of the query and the key. A kernel can therefore compute any block of the weights on any rank.
    """

    rate: float
    """Share of the weights that is zeroed."""
    samples: Tensor
    """`[batch]` int32, different in each layer."""
    heads: Tensor
    """`[heads]` int32: the numbers of the query heads in the whole model."""
    start: int = 0
    """Position of the first key in its row."""

    def __call__(self, weights: Tensor, offset: int = 0) -> Tensor:
        """After the softmax: zeroes some weights, and divides the others by 1 − rate (Srivastava et al. 2014).

        Args:
            weights: `[batch, heads, queries, keys]`.
            offset: position of the first query, counted from the first key.
        """
        queries, keys = weights.shape[2:]
        return torch.where(self.kept(queries, keys, offset), weights * (1 / (1 - self.rate)), 0.0)

    def to(self, device: torch.device | str) -> DroppedWeights:
        """The same on another device."""
        return self._replace(samples=self.samples.to(device), heads=self.heads.to(device))

    def kept(self, queries: int, keys: int, offset: int = 0) -> Tensor:
        """Return a mask of the weights that are kept, `[batch, heads, queries, keys]`."""

        def places(first: int, count: int) -> Tensor:
            return torch.arange(first, first + count, dtype=torch.int32, device=self.heads.device)

        heads = mixed(self.samples[:, None] + mixed(self.heads))
        rows = mixed(heads[..., None] + places(self.start + offset, queries))
        return mixed(rows[..., None] ^ mixed(places(self.start, keys))) >= round(self.rate * 2**32) - 2**31


class AttentionDropout(Salted):
    """In training, returns the `DroppedWeights` of a layer's attention for the micro-batch that passes through it.

    The model's `tensor_plan()` declares the module as `heads`, so that each rank has the numbers of its own heads.

    Args:
        rate: share of attention's weights that is zeroed, at least 0 and less than 1.
        heads: number of query heads of the whole model.
        job: gives the seed and the numbers of the samples.
        name: modules with the same name have the same masks; usually the path of the layer's attention.

    Raises:
        ValueError: for a rate outside this range.
    """

    heads_piece = (0, 1)
    """Piece of the heads on this rank: index and number of pieces; set by tensor parallelism."""

    def __init__(self, rate: float, heads: int, job: Job, name: str) -> None:
        super().__init__(job, name)
        self.rate, self.heads = check_rate("AttentionDropout", rate), heads

    def forward(self, x: Tensor) -> DroppedWeights | None:
        """The dropped weights; None in evaluation.

        Args:
            x: `[batch, …]`, the input of the attention.

        Raises:
            PluginError: in training, outside a step, or if `x` has another size than the micro-batch.
        """
        if not self.training or not self.rate:
            return None
        _, samples = self.batch("An AttentionDropout")
        if len(samples) != len(x):
            raise PluginError(
                f"An AttentionDropout was given {len(x)} sequences, but the micro-batch has {len(samples)}."
            )
        at, pieces = self.heads_piece
        heads = torch.arange(self.heads, dtype=torch.int32, device=x.device)
        return DroppedWeights(self.rate, mixed(samples.int() ^ self.salt), heads.chunk(pieces)[at])
