"""Division of a step's samples among micro-batches and ranks by what they are predicted to cost."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from .documents import Int64

Costs = NDArray[np.float64]
"""`[k]`, in any unit: work that differs from sample to sample."""


def spread(costs: Costs, micro_batch: int, ranks: int) -> Int64:
    """Divide samples so that ranks cost about the same, and micro-batches too.

    The samples of a micro-batch are a function of the costs and of its size, not of the number of ranks. Those of equal
    costs are divided in their order.

    Args:
        costs: of a number of samples that `micro_batch` × `ranks` divides.
        micro_batch: samples of each.
        ranks: data-parallel ranks.

    Returns:
        `[ranks, micro-batches, micro_batch]`, indices of samples; a rank's micro-batches from the costliest on, so that
        those which ranks compute at the same time are alike.
    """
    count = len(costs) // micro_batch
    if costs.min() == costs.max():
        return np.arange(len(costs), dtype=np.int64).reshape(-1, ranks, micro_batch).swapaxes(0, 1)
    batches = _divided(costs, np.arange(len(costs), dtype=np.int64), count)
    cost = costs[batches].sum(1)
    # Every 2nd, 4th, … micro-batch belongs to one part of the division; other numbers of ranks are dealt whole ones.
    shares = np.arange(count, dtype=np.int64).reshape(-1, ranks).T, _dealt(cost, ranks)
    best = min(shares, key=lambda share: cost[share].sum(1).max())
    ordered = np.take_along_axis(best, np.argsort(-cost[best], axis=1, kind="stable"), axis=1)
    return batches[ordered]


def _divided(costs: Costs, samples: Int64, parts: int) -> Int64:
    """Divide samples into parts of equal size, `[parts, each]`, by the smallest prime factor of the number of parts,
    and each of these again: parts i, i + 2, i + 4, … are together as even as parts of half the number would be."""
    if parts == 1:
        return samples[None]
    prime = next(factor for factor in range(2, parts + 1) if parts % factor == 0)
    dealt = samples[_dealt(costs[samples], prime)]
    return np.stack([_divided(costs, one, parts // prime) for one in dealt], axis=1).reshape(parts, -1)


def _dealt(costs: Costs, hands: int) -> Int64:
    """Deal samples to hands of equal size, `[hands, each]`: the costliest first, always to the hand that has cost least
    of those which are not full."""
    each = len(costs) // hands
    dealt = np.empty((hands, each), np.int64)
    waiting = [(0.0, 0, hand) for hand in range(hands)]
    for sample in np.argsort(-costs, kind="stable").tolist():
        cost, count, hand = heapq.heappop(waiting)
        dealt[hand, count] = sample
        if count + 1 < each:
            heapq.heappush(waiting, (cost + float(costs[sample]), count + 1, hand))
    return dealt
