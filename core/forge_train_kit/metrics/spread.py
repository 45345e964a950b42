"""Distribution of values. Counts are integers, so their sum does not depend on the order of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from forge_train.contract.events import Bins, Metric


class Quantile(Metric):
    """Quantiles from a sketch that is merged without loss (DDSketch, arXiv:1908.10693).

    The q-quantile is the value at place ⌊q · (count − 1)⌋ in ascending order (numpy's method `lower`). The relative
    error is at most `accuracy` for magnitudes from 1e-9 to 1e9; smaller ones count as 0, larger ones as 1e9. The
    smallest and the largest value are exact. With a NaN among the values, all quantiles are NaN.

    Args:
        quantiles: which, between 0 and 1; logged as `p50` for 0.5.
        accuracy: relative; 0.01 keeps 4,149 numbers.
    """

    SMALLEST, LARGEST = 1e-9, 1e9

    def __init__(self, quantiles: Sequence[float] = (0.5, 0.9, 0.99), accuracy: float = 0.01) -> None:
        if not all(0 <= q <= 1 for q in quantiles) or not 0 < accuracy < 1:
            raise ValueError(f"quantiles {tuple(quantiles)} must lie in [0, 1], accuracy {accuracy} in (0, 1)")
        self._quantiles, self._log_base = tuple(quantiles), math.log1p(accuracy) - math.log1p(-accuracy)
        self._reach = math.ceil(math.log(self.LARGEST) / self._log_base)
        self._half = 2 * self._reach + 1  # buckets of one sign; one more is for 0, and one counts NaNs
        super().__init__(sums=2 * self._half + 2, maxima=2)

    def update(self, values: Tensor) -> None:
        """`values` of any shape."""
        flat = values.detach().reshape(-1).double()
        if not flat.numel():
            return
        size = flat.abs()
        bucket = size.clamp(self.SMALLEST, self.LARGEST).log_().div_(self._log_base).ceil_()
        bucket.clamp_(-self._reach, self._reach).add_(self._reach + 1).copysign_(flat).mul_(size >= self.SMALLEST)
        place = bucket.add_(self._half).nan_to_num_(nan=2 * self._half + 1).long()
        self.sums.index_add_(0, place, torch.ones_like(flat))
        least, most = flat.aminmax()
        torch.maximum(self.maxima, torch.stack([most, -least]), out=self.maxima)

    def value(self, sums: Tensor, maxima: Tensor) -> Mapping[str, float]:
        names = [f"p{100 * q:g}" for q in self._quantiles]
        if sums[-1]:
            return dict.fromkeys(names, math.nan)
        largest, smallest = float(maxima[0]), -float(maxima[1])
        below = sums[:-1].cumsum(0)
        found = {}
        for name, q in zip(names, self._quantiles, strict=True):
            rank = math.floor(q * (float(below[-1]) - 1) + 1e-9)
            place = int(torch.searchsorted(below, rank, right=True)) - self._half
            last = rank == below[-1] - 1
            found[name] = (
                largest if last else smallest if rank == 0 else min(max(self._middle(place), smallest), largest)
            )
        return found

    def _middle(self, place: int) -> float:
        """The value of a bucket that is relatively nearest to both its ends."""
        if place == 0:
            return 0.0
        upper = math.exp((abs(place) - self._reach - 1) * self._log_base)
        return math.copysign(2 * upper / (math.exp(self._log_base) + 1), place)


class Histogram(Metric):
    """Counts of values in equal bins; what lies outside is counted in the first and the last. NaNs are left out.

    Args:
        low: where the first bin begins.
        high: where the last one ends.
        bins: how many.
    """

    def __init__(self, low: float, high: float, bins: int = 64) -> None:
        if not low < high or bins < 1:
            raise ValueError(f"a histogram from {low} to {high} with {bins} bins")
        self._low, self._high, self._bins = low, high, bins
        super().__init__(sums=bins + 1)

    def update(self, values: Tensor) -> None:
        """`values` of any shape."""
        flat = values.detach().reshape(-1).double()
        place = (flat - self._low).mul_(self._bins / (self._high - self._low)).floor_().clamp_(0, self._bins - 1)
        place = place.nan_to_num_(nan=self._bins).long()
        self.sums.index_add_(0, place, torch.ones_like(flat))

    def value(self, sums: Tensor, maxima: Tensor) -> Bins:
        width = (self._high - self._low) / self._bins
        edges = (*(self._low + width * index for index in range(self._bins)), self._high)
        return Bins(edges, tuple(sums[:-1].tolist()))
