"""The caches of the rows that are generated, and the forwards that fill them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from forge_train.contract.model import Model
from forge_train.plugin.job import Job
from forge_train_kit.capabilities import capabilities_of
from forge_train_kit.model import Slots, filled

from ..offline.logits import continues, new_cache
from .forwards import Call


class Memory(Protocol):
    """The rows of one data-parallel rank, at places from 0. A rank without work makes its calls, too."""

    def begin(self, place: int, ids: Sequence[int], length: int) -> Call:
        """The first forward of a row that may grow to a length."""
        ...

    def advance(self, rows: Sequence[Sequence[int]], most: int) -> list[Call]:
        """The forwards for the next token of all rows.

        Args:
            rows: tokens of each.
            most: rows of the data-parallel rank that has the most.
        """
        ...

    def idle(self) -> Call:
        """A forward of nothing that counts."""
        ...

    def end(self, place: int, last: int) -> None:
        """A row ends; the last one takes its place."""
        ...


def memory_for(job: Job, model: Model, places: int, capacity: int) -> Memory:
    """The memory that a model can have; every rank has the same kind.

    Args:
        job: whose attention kernel decides, too.
        model: makes its caches with `new_slots`, or `new_cache`.
        places: most rows side by side.
        capacity: length of the longest row so far.
    """
    slots = Slots(places, capacity, job.device, joint=joint(job))
    caches: dict[int, Any] = {}
    if continues(job):
        for number, part in enumerate(model.parts):
            make = getattr(part, "new_slots", None)
            try:
                found = None if make is None else make(slots)
            except TypeError:
                found = None
            if found is not None:
                caches[number] = found
    together = all(job.dist.gather_objects(len(caches) == len(model.parts)))
    return SideBySide(slots, caches) if together else OneByOne(job, model)


def joint(job: Job) -> bool:
    """Return True if the attention kernel takes rows of different lengths."""
    name = job.hooks.provider("attention_kernel")
    return name is not None and capabilities_of(job.hooks.enabled[name].cls).lengths


class SideBySide:
    """Caches that take one token of each row."""

    def __init__(self, slots: Slots, caches: Mapping[int, Any]) -> None:
        self._slots, self._caches = slots, caches

    def begin(self, place: int, ids: Sequence[int], length: int) -> Call:
        self._slots.grow(length)
        self._slots.begin(place, len(ids))
        given = _tensor([ids], self._slots.device)
        positions = torch.arange(len(ids), device=self._slots.device)[None]
        return Call(given, positions, self._caches)

    def advance(self, rows: Sequence[Sequence[int]], most: int) -> list[Call]:
        if not rows:
            return [self.idle()]
        self._slots.advance(len(rows))
        last = filled([one[-1] for one in rows], 0), filled([len(one) - 1 for one in rows], 0)
        ids, positions = _tensor(last, self._slots.device).unsqueeze(-1)
        return [Call(ids, positions, self._caches, len(rows))]

    def idle(self) -> Call:
        zero = _tensor([[0]], self._slots.device)
        return Call(zero, zero)

    def end(self, place: int, last: int) -> None:
        self._slots.end(place, last)


class OneByOne:
    """A cache for each row, or none: every forward is then given the whole row."""

    def __init__(self, job: Job, model: Model) -> None:
        self._job, self._model = job, model
        self._caches: list[dict[int, Any] | None] = []

    def begin(self, place: int, ids: Sequence[int], length: int) -> Call:
        caches = None
        if continues(self._job):
            made = {at: new_cache(part, length) for at, part in enumerate(self._model.parts)}
            caches = None if any(one is None for one in made.values()) else made
        self._caches[place:] = [caches]
        return self._call(ids, 0, caches)

    def advance(self, rows: Sequence[Sequence[int]], most: int) -> list[Call]:
        pairs = zip(rows, self._caches, strict=True)
        calls = [self._call(ids, 0 if caches is None else len(ids) - 1, caches) for ids, caches in pairs]
        return calls + [self.idle()] * (most - len(calls))

    def idle(self) -> Call:
        return self._call([0], 0, None)

    def end(self, place: int, last: int) -> None:
        self._caches[place] = self._caches[last]
        del self._caches[last]

    def _call(self, ids: Sequence[int], start: int, caches: dict[int, Any] | None) -> Call:
        """A forward of the tokens from a place on. Parts of a pipeline without ids know its length by positions."""
        device, positions = self._job.device, None
        if self._job.dist.layout.pp > 1:
            positions = torch.arange(start, len(ids), device=device)[None]
        return Call(_tensor([ids[start:]], device), positions, caches)


def _tensor(ids: Any, device: torch.device) -> Tensor:
    return torch.tensor(ids, device=device)
