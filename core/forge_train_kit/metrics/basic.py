"""Sums, ratios of sums, and extremes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forge_train.contract.events import Metric

Numbers = Tensor | float


class Sum(Metric):
    """The sum of all values."""

    def __init__(self) -> None:
        super().__init__(sums=2)

    def update(self, values: Numbers) -> None:
        """`values` of any shape."""
        self.sums[0].add_(_total(values))
        self.sums[1].add_(1)  # so that a sum of zero is something observed

    def value(self, sums: Tensor, maxima: Tensor) -> float:
        return float(sums[0])


class Ratio(Metric):
    """The sum of some values over the sum of others: tokens per document, errors per symbol."""

    def __init__(self) -> None:
        super().__init__(sums=2)

    def update(self, above: Numbers, below: Numbers) -> None:
        """Two tensors of any shapes, each summed."""
        self.sums[0].add_(_total(above))
        self.sums[1].add_(_total(below))

    def value(self, sums: Tensor, maxima: Tensor) -> float:
        return float(sums[0] / sums[1])


class Mean(Ratio):
    """The mean of all values, weighted if asked."""

    def update(self, values: Numbers, weights: Numbers | None = None) -> None:
        """`values` of any shape; `weights`, of a shape that broadcasts to it, are 1 where none are given."""
        if weights is None:
            count = values.numel() if isinstance(values, Tensor) else 1
            super().update(values, count)
            return
        weights = torch.as_tensor(weights).double()
        weighted = torch.as_tensor(values) * weights
        super().update(weighted, weights.expand_as(weighted))


class Perplexity(Ratio):
    """e to the mean loss of a token."""

    def update(self, losses: Numbers, tokens: Numbers) -> None:
        """Losses in nats, summed here or before, and how many tokens they are of."""
        super().update(losses, tokens)

    def value(self, sums: Tensor, maxima: Tensor) -> float:
        mean = super().value(sums, maxima)
        return math.exp(mean) if mean < 700 else math.inf


class Max(Metric):
    """The largest value."""

    def __init__(self) -> None:
        super().__init__(maxima=1)

    def update(self, values: Tensor) -> None:
        """`values` of any shape; an empty tensor observes nothing."""
        if values.numel():
            torch.maximum(self.maxima, values.detach().amax().to(self.maxima), out=self.maxima)

    def value(self, sums: Tensor, maxima: Tensor) -> float:
        return float(maxima[0])


class Min(Max):
    """The smallest value."""

    def update(self, values: Tensor) -> None:
        """`values` of any shape; an empty tensor observes nothing."""
        super().update(-values.detach().double())

    def value(self, sums: Tensor, maxima: Tensor) -> float:
        return -float(maxima[0])


def _total(values: Numbers) -> Numbers:
    return values.detach().sum(dtype=torch.float64) if isinstance(values, Tensor) else values
