"""Division of sequences over ranks, so that all have equal numbers of tokens and equal work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forge_train_kit.model.spans import check_neighbours

FINEST = 16
"""Chunks of a rank, at most: each span of queries is a call of the kernel."""
SHORTEST = 32
"""Tokens of a chunk, at least, where a rank gets more than two."""
EVEN = 1.05
"""A cut whose heaviest rank has no more than this times the mean work is even enough."""

Span = tuple[int, int]
"""Positions from, and up to."""


@dataclass(frozen=True)
class Cut:
    """The spans of each rank, in order. Together they are all positions; every rank has as many."""

    spans: tuple[tuple[Span, ...], ...]

    def of(self, ranks: Iterable[int]) -> tuple[Span, ...]:
        """Return the joined spans of some ranks."""
        return joined(span for rank in ranks for span in self.spans[rank])


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """In order, neighbours as one."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def head_tail(length: int, ranks: int) -> Cut:
    """Each rank has a chunk from the front and its mirror image: the same causal work (Brandon et al. 2023,
    arXiv:2311.09431)."""
    each = length // (2 * ranks)
    both = ((rank, 2 * ranks - 1 - rank) for rank in range(ranks))
    return Cut(tuple(joined((at * each, (at + 1) * each) for at in own) for own in both))


def cut_of(starts: Tensor | None, length: int, ranks: int) -> Cut:
    """The cut of a batch; the same wherever it is computed.

    Args:
        starts: of documents, `[batch, length]` on the CPU, as `document_starts` gives them; None for rows that are one
            text each.
        length: tokens of a row; 2 × ranks divides it.
        ranks: to cut for.
    """
    if starts is None:
        return head_tail(length, ranks)
    costs = seen_by(starts)
    found: list[tuple[float, Cut]] = []
    each = 2
    while not found or (each <= FINEST and length % (ranks * each) == 0 and length // (ranks * each) >= SHORTEST):
        cut = dealt(costs.view(ranks * each, -1).sum(1).tolist(), ranks, length)
        found.append((unevenness(cut, costs), cut))
        if found[-1][0] <= EVEN:
            break
        each *= 2
    return min(found, key=lambda one: one[0])[1]


def dealt(costs: Sequence[int], ranks: int, length: int) -> Cut:
    """Chunks of equal length, dealt out from the most costly on: in each round the rank with the least work so far gets
    the most costly of as many chunks as there are ranks (longest processing time first, Graham 1969)."""
    each = length // len(costs)
    order = sorted(range(len(costs)), key=lambda at: -costs[at])
    work, own = [0] * ranks, [list[Span]() for _ in range(ranks)]
    for first in range(0, len(order), ranks):
        free = sorted(range(ranks), key=lambda rank: work[rank])
        for rank, at in zip(free, order[first : first + ranks], strict=True):
            work[rank] += costs[at]
            own[rank].append((at * each, (at + 1) * each))
    return Cut(tuple(map(joined, own)))


def seen_by(starts: Tensor) -> Tensor:
    """Count the keys that the queries of all rows see at each position, `[length]`."""
    length = starts.shape[1]
    return (torch.arange(1, length + 1) - starts).sum(0)


def unevenness(cut: Cut, costs: Tensor) -> float:
    """The heaviest rank's work by the mean."""
    work = [sum(int(costs[start:stop].sum()) for start, stop in own) for own in cut.spans]
    return max(work) * len(work) / sum(work)


def document_starts(document_ids: Tensor) -> Tensor:
    """Documents by the position at which they begin in their row: `[batch, length]`, as ids as good as any.

    Any rank's slice of them, with those of the others, in whatever order, says where every document lies.

    Raises:
        ValueError: if a document comes back after another one.
    """
    check_neighbours(document_ids)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return filled(begins)


def gathered_starts(starts: Tensor) -> Tensor:
    """`document_starts` of whole rows, from the same in any order of tokens."""
    return filled(torch.zeros_like(starts, dtype=torch.bool).scatter(1, starts, True))


def filled(begins: Tensor) -> Tensor:
    """The position of the last beginning, at each position."""
    return torch.where(begins, torch.arange(begins.shape[1], device=begins.device), 0).cummax(1).values
