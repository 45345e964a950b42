"""Work of each pipeline rank, in order."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias, runtime_checkable

from forge_train.base.errors import ConfigError
from forge_train.base.format import format_list


class Work(enum.Enum):
    """Kind of work on a micro-batch in a part of the model; the letters are torch.distributed.pipelining's."""

    FORWARD = "F"
    BACKWARD = "B"
    """Both gradients at once."""
    INPUT_GRADIENT = "I"
    """The half of a backward pass that the part before waits for."""
    WEIGHT_GRADIENT = "W"
    """The other half, which may wait."""

    __hash__ = object.__hash__  # enum's own is Python code, and a timetable looks up thousands of actions


_BACKWARD = (Work.BACKWARD, Work.INPUT_GRADIENT)


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one micro-batch through one part."""

    work: Work
    part: int
    """Number of the part among all parts of the pipeline, in the order of the forward pass."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.part}{self.work.value}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and a backward pass in one slot: they may run at the same time (DualPipe, arXiv:2412.19437)."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Slot: TypeAlias = Action | Overlap | None
"""Work of a rank in one slot of its row; None if the schedule leaves the rank idle."""


def actions_of(slot: Slot) -> tuple[Action, ...]:
    """The actions of a slot: none, one or two."""
    if slot is None:
        return ()
    return (slot,) if isinstance(slot, Action) else (slot.forward, slot.backward)


@dataclass(frozen=True)
class Timetable:
    """The order of work in a step of a pipeline. A rank does its row from left to right, and each action waits for
    what it needs of others; idle slots show a schedule's intention and delay nothing.

    Raises:
        ConfigError: where the rows are no pipeline's step: a part on two ranks, an action that is missing, there twice
            or before what it needs, or ranks that wait for each other.
    """

    ranks: tuple[tuple[Slot, ...], ...]
    """One row for each pipeline rank."""

    def __post_init__(self) -> None:
        if not any(self.actions(rank) for rank in range(len(self.ranks))):
            raise ConfigError("A timetable needs at least one action.")
        self._check_placement()
        self._check_complete()
        self._check_order()

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """Part → its rank."""
        found = {one.part: rank for rank in range(len(self.ranks)) for one in self.actions(rank)}
        return tuple(found[part] for part in sorted(found))

    @property
    def parts(self) -> int:
        """Number of parts the model is cut into."""
        return len(self.placement)

    @cached_property
    def micro_batches(self) -> int:
        """Number of micro-batches in a step."""
        return 1 + max(one.micro_batch for rank in range(len(self.ranks)) for one in self.actions(rank))

    def actions(self, rank: int) -> list[Action]:
        """Return a rank's actions, in order; the forward pass of an overlapped pair first."""
        return [one for slot in self.ranks[rank] for one in actions_of(slot)]

    def parts_of(self, rank: int) -> list[int]:
        """The parts that lie on a rank."""
        return [part for part, whose in enumerate(self.placement) if whose == rank]

    def needs(self, action: Action) -> Iterator[Action]:
        """The actions whose results one waits for, on whatever rank they are. A backward pass of the part behind is
        named as the timetable has it, whole or split."""
        part, micro_batch = action.part, action.micro_batch
        if action.work is Work.FORWARD:
            if part:
                yield Action(Work.FORWARD, part - 1, micro_batch)
        elif action.work is Work.WEIGHT_GRADIENT:
            yield Action(Work.INPUT_GRADIENT, part, micro_batch)
        else:
            yield Action(Work.FORWARD, part, micro_batch)
            if part + 1 < self.parts:
                split = Action(Work.INPUT_GRADIENT, part + 1, micro_batch)
                yield split if split in self._all else Action(Work.BACKWARD, part + 1, micro_batch)

    @cached_property
    def _all(self) -> frozenset[Action]:
        return frozenset(one for rank in range(len(self.ranks)) for one in self.actions(rank))

    def short(self, micro_batches: int) -> Timetable:
        """The same parts on the same ranks with so many micro-batches: all go forward before the first comes back,
        with the backward passes whole or split as they are here."""
        rows: list[tuple[Action, ...]] = []
        for rank in range(len(self.ranks)):
            parts = self.parts_of(rank)
            row = [Action(Work.FORWARD, part, index) for part in parts for index in range(micro_batches)]
            for part in reversed(parts):
                split = any(one.part == part and one.work is Work.INPUT_GRADIENT for one in self.actions(rank))
                works = (Work.INPUT_GRADIENT, Work.WEIGHT_GRADIENT) if split else (Work.BACKWARD,)
                row += [Action(work, part, index) for index in range(micro_batches) for work in works]
            rows.append(tuple(row))
        return Timetable(tuple(rows))

    # -- checks --

    def _check_placement(self) -> None:
        homes: dict[int, int] = {}
        for rank in range(len(self.ranks)):
            for one in self.actions(rank):
                if min(one.part, one.micro_batch) < 0:
                    raise ConfigError(f"Action {one} of rank {rank}: parts and micro-batches are counted from 0.")
                if homes.setdefault(one.part, rank) != rank:
                    raise ConfigError(f"Part {one.part} is on rank {homes[one.part]} and on rank {rank} ({one}).")
        if (last := max(homes)) >= len(homes):
            missing = next(part for part in range(last) if part not in homes)
            raise ConfigError(f"The timetable has part {last}, but nothing for part {missing}.")
        if idle := sorted(set(range(len(self.ranks))) - set(homes.values())):
            raise ConfigError(f"Nothing is to be done on rank {format_list(idle)}.")

    def _check_complete(self) -> None:
        seen: set[Action] = set()
        for rank, row in enumerate(self.ranks):
            for slot in row:
                if isinstance(slot, Overlap) and (
                    slot.forward.work is not Work.FORWARD or slot.backward.work not in _BACKWARD
                ):
                    raise ConfigError(f"{slot} on rank {rank}: a pair is a forward pass and a backward pass.")
            for one in self.actions(rank):
                if one in seen:
                    raise ConfigError(f"{one} is twice on rank {rank}.")
                seen.add(one)
        for part in range(self.parts):
            for micro_batch in range(self.micro_batches):
                works = "".join(w.value for w in Work if Action(w, part, micro_batch) in seen)
                if works not in ("FB", "FIW"):
                    raise ConfigError(
                        f"Micro-batch {micro_batch} in part {part} (rank {self.placement[part]}) has "
                        f"{', '.join(works) or 'nothing'}; it needs F, and B or both I and W."
                    )

    def _check_order(self) -> None:
        order = self.run(lambda rank, slot: None)
        for rank, at in enumerate(order):
            if at < len(self.ranks[rank]):
                slot = self.ranks[rank][at]
                missing = [
                    f"{need} of rank {self.placement[need.part]}" for need in self._missing(slot, self._before(order))
                ]
                raise ConfigError(
                    f"The timetable never ends: rank {rank} waits at {slot} for {format_list(missing)}, "
                    "which can't come before it."
                )

    def _before(self, order: Sequence[int]) -> set[Action]:
        return {one for row, at in zip(self.ranks, order, strict=True) for slot in row[:at] for one in actions_of(slot)}

    def _missing(self, slot: Slot, done: set[Action]) -> list[Action]:
        return [need for one in actions_of(slot) for need in self.needs(one) if need not in done]

    def run(self, do: Callable[[int, Action | Overlap], None]) -> list[int]:
        """Call `do(rank, slot)` for every slot that is not idle, in an order in which what a slot waits for came
        before. Gives for each rank how many slots of its row came to be done."""
        done: set[Action] = set()
        at = [0] * len(self.ranks)
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(self.ranks):
                while at[rank] < len(row) and not self._missing(row[at[rank]], done):
                    slot = row[at[rank]]
                    if slot is not None:
                        do(rank, slot)
                        done.update(actions_of(slot))
                    at[rank] += 1
                    moved = True
        return at

    # -- torch's CSV --

    @classmethod
    def from_csv(cls, text: str) -> Timetable:
        """A timetable in torch's format of computation only: a line for each rank, `0F0,,1I2,(0F1;3B0)OVERLAP_F_B`.

        Raises:
            ConfigError: for a cell that is none, and for a timetable that can't be.
        """
        rows = [line.split(",") for line in text.splitlines() if line.strip()]
        return cls(
            tuple(
                tuple(_slot(cell.strip(), f"line {rank + 1}, cell {at + 1}") for at, cell in enumerate(row))
                for rank, row in enumerate(rows)
            )
        )

    def to_csv(self) -> str:
        """The same in that format, which `_PipelineScheduleRuntime._load_csv` of torch reads."""
        return "".join(",".join(str(slot or "") for slot in row) + "\n" for row in self.ranks)


_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


def _slot(cell: str, where: str) -> Slot:
    if not cell:
        return None
    if pair := _PAIR.fullmatch(cell):
        return Overlap(_action(pair[1], where), _action(pair[2], where))
    return _action(cell, where)


def _action(text: str, where: str) -> Action:
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"Timetable, {where}: {text!r} is not an action; an action is part, one of F, B, I and W, and micro-batch, "
            "as in 2F0. What is sent and gathered follows from these and is not written."
        )
    return Action(Work(match[2]), int(match[1]), int(match[3]))


@runtime_checkable
class PipelineExecutor(Protocol):
    """An executor of several stages, which can tell what every rank does; `forge plan` draws it."""

    def timetable(self, micro_batches: int) -> Timetable:
        """A step of so many micro-batches. Equal on all ranks."""
        ...

    def alternatives(self, micro_batches: int) -> Mapping[str, Timetable | str]:
        """Name of a schedule that the executor could follow with the same ranks → its timetable, which may cut the
        model into other parts, or one sentence on why it can't."""
        ...

    def follow(self, timetable: Timetable) -> None:
        """Have `train` follow a timetable of the same parts on the same ranks, for as many micro-batches as it has:
        `forge plan` rehearses a few of many."""
        ...
