"""Choices of a model, the ties among them, and the first differences between two runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor, nn

from forge_train.config.sections import Precision as PrecisionName
from forge_train.contract.model import Precision
from forge_train_kit.model.choices import Among, Made

TIE = 1e-5
"""Two scores this near, relative to the largest beside them, are a tie: at the first step, and as much more at each
later one, as weights move apart. It is what losses may differ by, ten times and more of what another order of summation
changes in a score."""


def tie_of(precision: PrecisionName) -> float:
    """The same in a precision: its epsilon, as routers compute from hidden states that were rounded to it."""
    return max(TIE, torch.finfo(Precision.of(precision).compute).eps)


TIES = tuple(sorted(map(tie_of, get_args(PrecisionName))))
"""Of every precision. A plugin that rounds below them brings its own (the fact `verify.rounds`)."""


@dataclass
class RoutingCounts:
    """One decision of a module in one step, on one rank."""

    rows: dict[str, list[float]] = field(default_factory=dict)
    """Hash of a sequence → how often its tokens took each alternative, and last how many tokens of it there were."""
    near: dict[float, float] = field(default_factory=dict)
    """Tie tolerance → choices that could have differed."""
    among: Among = "alternatives"

    def add(self, other: RoutingCounts) -> None:
        for name, counts in other.rows.items():
            mine = self.rows.get(name, [0.0] * len(counts))
            self.rows[name] = [a + b for a, b in zip(mine, counts, strict=True)]
        self.near = {tie: self.near.get(tie, 0.0) + count for tie, count in other.near.items()}


Step = dict[str, RoutingCounts]
"""Module and what it chose → the tally, in the order of the forward pass."""


@dataclass(frozen=True)
class RoutingDifference:
    """The first choices that fell otherwise in another run."""

    step: int
    where: str
    """Module, and what it chooses."""
    moved: int
    """Choices that differ."""
    near: int
    """Choices that both sides call ties, at least."""
    allowed: float
    """Tie tolerance at the first step."""
    among: Among = "alternatives"

    @property
    def slack(self) -> float:
        """Relative tie tolerance."""
        return self.step * self.allowed

    @property
    def tie(self) -> bool:
        return self.near >= self.moved

    def as_json(self) -> dict[str, Any]:
        return {"step": self.step, "where": self.where, "moved": self.moved, "near": self.near, "tie": self.tie}


class Counter:
    """Counts the choices of a step, on one rank.

    Args:
        names: of modules.
        rows: hashes of the sequences that this rank was given in the step, kept up to date by its owner.
        micro_batch: sequences of one forward pass.
        ties: everything that may be taken for a tie.
    """

    def __init__(
        self,
        names: Iterable[tuple[str, nn.Module]],
        rows: Sequence[str],
        micro_batch: int,
        ties: Sequence[float] = TIES,
    ) -> None:
        self._names = {id(module): name for name, module in names}
        self._rows, self._micro_batch, self._ties = rows, micro_batch, ties
        self._found: Step = {}
        self._calls: dict[str, int] = {}
        self._steps = 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, what: str, made: Made, among: Among) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # recomputed within a backward pass: counted before
        with torch.no_grad():
            scores, taken = made()
            name = f"{what} of {self._names.get(id(module), type(module).__name__)}"
            call = self._calls[name] = self._calls.get(name, -1) + 1
            ties = near(scores.float(), taken, among, self._steps + 1, self._ties)
            counted = RoutingCounts(self._counts(taken, call), ties)
        self._found.setdefault(name, RoutingCounts(among=among)).add(counted)

    def _counts(self, taken: Tensor, call: int) -> dict[str, list[float]]:
        """Of each sequence; of all together where the micro-batch is not made of them."""
        size = self._micro_batch
        names = list(self._rows[call * size : (call + 1) * size])
        if len(names) != size or len(taken) % size:
            names = [""]
        by_row = taken.view(len(names), -1, taken.shape[-1])
        tally = RoutingCounts()
        for name, counts in zip(names, by_row.sum(1).tolist(), strict=True):
            tally.add(RoutingCounts({name: [*counts, by_row.shape[1]]}))
        return tally.rows

    def end(self) -> Step:
        """Return the counts of the step that ends here."""
        found, self._found, self._calls = self._found, {}, {}
        self._steps += 1
        return found


def near(
    scores: Tensor, taken: Tensor, among: Among, step: int = 1, ties: Sequence[float] = TIES
) -> dict[float, float]:
    """Count choices that could have differed, by tie tolerance; a choice of several counts as many as could change
    places with others."""
    if among == "tokens":
        scores, taken = scores.t(), taken.t()
    size = scores.abs().masked_fill(scores.isinf(), 0).amax(-1, keepdim=True)
    last = scores.masked_fill(~taken, math.inf).amin(-1, keepdim=True)
    next_best = scores.masked_fill(taken, -math.inf).amax(-1, keepdim=True)
    found = {}
    for tie in ties:
        out = (taken & (scores <= next_best + step * tie * size)).sum(-1)
        within = (~taken & (scores >= last - step * tie * size)).sum(-1)
        found[tie] = float(torch.minimum(out, within).sum())
    return found


def routing_difference(
    one: Sequence[Sequence[Step]], other: Sequence[Sequence[Step]], allowed: float
) -> RoutingDifference | None:
    """Return the first difference between two runs' choices: by step, then in the order of the forward pass.

    Args:
        one: of each rank, its steps.
        other: the same of the other run.
        allowed: tie tolerance, by the coarser of both.
    """
    for step, (ours, theirs) in enumerate(zip(_merged(one), _merged(other), strict=False), start=1):
        for where in (name for name in ours if name in theirs):
            mine, yours = ours[where], theirs[where]
            if moved := _moved(mine, yours):
                copies = _tokens(yours) / _tokens(mine)
                ties = math.floor(min(mine.near[allowed], yours.near[allowed] / copies))
                return RoutingDifference(step, where, moved, ties, allowed, mine.among)
    return None


def _merged(ranks: Sequence[Sequence[Step]]) -> list[Step]:
    """The steps of all ranks together."""
    steps: list[Step] = []
    for rank in ranks:
        for number, step in enumerate(rank):
            if number == len(steps):
                steps.append({})
            for where, tally in step.items():
                steps[number].setdefault(where, RoutingCounts(among=tally.among)).add(tally)
    return steps


def _tokens(tally: RoutingCounts) -> float:
    return sum(counts[-1] for counts in tally.rows.values())


def _moved(one: RoutingCounts, other: RoutingCounts) -> int:
    """Choices that fell otherwise. Tokens that several ranks have told of count once: by how many tokens of a sequence
    there were on all of them, and how many there are."""
    ours, theirs = one.rows, other.rows
    if "" in ours or "" in theirs:
        ours, theirs = ({"": [sum(column) for column in zip(*rows.values(), strict=True)]} for rows in (ours, theirs))
    more = less = 0.0
    for name in ours.keys() & theirs.keys():
        *mine, there_are = ours[name]
        *yours, there_were = theirs[name]
        for a, b in zip(mine, yours, strict=True):
            gap = b * there_are / there_were - a
            more, less = more + max(gap, 0.0), less + max(-gap, 0.0)
    return math.ceil(max(more, less) - 1e-6)
