"""Agreement of ranks: the same calls in every group, messages that fit, and no circle of ranks that wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .classes import Places, RankClass, words
from .record import MESSAGES, WAIT, Called, Group


@dataclass(frozen=True)
class Side:
    """Ranks of one class, and the call that they are at."""

    ranks: str
    """In words."""
    count: int
    first: int
    """The lowest of them."""
    call: str
    """Empty if there is none."""
    part: str = ""
    place: str = ""
    plugin: str = ""


@dataclass(frozen=True)
class Fault:
    """Ranks that do not agree."""

    kind: str
    """`skipped`, `group`, `order`, `shape`, `dtype`, `reduction`, `root`, `call`, `message` or `deadlock`."""
    message: str
    sides: tuple[Side, ...]
    alike: int = 1
    """Times that classes differ in this way, at these lines; the first one is described."""


@dataclass(frozen=True)
class _Together:
    """Classes that share a group."""

    group: Group
    members: frozenset[int]


class Agreement:
    """Compares classes of ranks.

    Args:
        places: of the layout.
        classes: of all its ranks.
    """

    def __init__(self, places: Places, classes: Sequence[RankClass]) -> None:
        self._places, self._classes = places, classes
        self._class_of: dict[tuple[object, ...], int] = {}
        self._axes = list(classes[0].labels)
        self._numbered = [axis for axis in self._axes if isinstance(classes[0].labels[axis], int)]
        for number, one in enumerate(classes):
            self._class_of[tuple(one.labels.values())] = number
        self._groups = self._shared()

    def faults(self) -> list[Fault]:
        """Every fault; circles are looked for only where all calls and messages fit."""
        found: dict[object, Fault] = {}
        for one in (*self._different(), *self._messages()):
            key = (one.kind, tuple((side.call, side.place) for side in one.sides))
            found[key] = replace(found[key], alike=found[key].alike + 1) if key in found else one
        return [*found.values()] or [*self._circles()]

    # -- who shares a group -------------------------------------------------------------------------------------------

    def _number(self, rank: int) -> int:
        labels = self._places.labels(rank, self._numbered)
        return self._class_of[tuple(labels[axis] for axis in self._axes)]

    def _shared(self) -> dict[tuple[int, Group], _Together]:
        """Class and group → the classes that are in it. Where these differ from rank to rank, they are taken as one."""
        sets: dict[Group, list[set[int]]] = {}
        known: dict[tuple[Group, int], set[int]] = {}
        for number, one in enumerate(self._classes):
            for group in {call.group for call in one.calls if call.group.axes}:
                members = self._places.members(one.first, group)
                key = (group, min(members))
                if key not in known:
                    known[key] = {self._number(one) for one in members}
                sets.setdefault(group, []).append(known[key] | {number})
        found = {}
        for group, some in sets.items():
            for joined in _joined(some):
                together = _Together(group, frozenset(joined))
                found.update({(number, group): together for number in joined})
        return found

    # -- the same calls in every group --------------------------------------------------------------------------------

    def _different(self) -> Iterator[Fault]:
        for together in dict.fromkeys(self._groups.values()):
            rows = {number: self._calls(number, together.group) for number in sorted(together.members)}
            ranks: Counter[tuple[Called, ...]] = Counter()
            for number, row in rows.items():
                ranks[row] += self._classes[number].ranks
            usual = max(ranks, key=lambda row: ranks[row])
            reference = next(number for number, row in rows.items() if row == usual)
            for number, row in rows.items():
                if row != usual:
                    yield self._difference(reference, usual, number, row)

    def _calls(self, number: int, group: Group) -> tuple[Called, ...]:
        return tuple(one for one in self._classes[number].calls if one.group == group and one.kind not in MESSAGES)

    def _difference(self, one: int, usual: Sequence[Called], other: int, row: Sequence[Called]) -> Fault:
        """The first difference between two sequences on one group."""
        pairs = enumerate(zip(usual, row, strict=False))
        lost = len(usual) != len(row)  # whose place tells it from equal ones after it
        apart = (at for at, (a, b) in pairs if a != b or (lost and a.place != b.place))
        at = next(apart, min(len(usual), len(row)))
        a, b = (rest[0] if (rest := calls[at:]) else None for calls in (usual, row))
        sides = (self._side(one, a), self._side(other, b))
        ours, theirs = usual[at + 1 :], row[at + 1 :]
        if a and b and a != b:
            for name, field in (("shape", "shape"), ("dtype", "dtype"), ("reduction", "op"), ("root", "root")):
                if replace(a, **{field: getattr(b, field)}) == b:
                    return Fault(name, f"{sides[0].ranks}: {a}; {sides[1].ranks}: {b}.", sides)
            if ours[:1] == (b,) and theirs[:1] == (a,):
                return Fault("order", f"{sides[0].ranks}: {a}, then {b}; {sides[1].ranks} in the other order.", sides)
        if a and (b is None or len(usual) > len(row)):
            return self._skipped(other, a, one)
        if b and (a is None or len(row) > len(usual)):
            return self._skipped(one, b, other)
        return Fault("call", f"{sides[0].ranks}: {a}; {sides[1].ranks}: {b}.", sides)

    def _skipped(self, number: int, call: Called, other: int) -> Fault:
        """A class leaves out a call that another one makes, or makes it in another group."""
        calls = Counter((one, one.place) for one in self._classes[number].calls)
        calls.subtract((one, one.place) for one in self._classes[other].calls)
        for (own, _), times in calls.items():
            if times > 0 and own.part == call.part and own != call and replace(own, group=call.group) == call:
                sides = (self._side(other, call), self._side(number, own))
                return Fault("group", f"{sides[0].ranks}: {call}; {sides[1].ranks}: it is along {own.group}.", sides)
        sides = (self._side(other, call), self._side(number, None))
        return Fault("skipped", f"{sides[0].ranks}: {call}; {sides[1].ranks} skips it.", sides)

    def _side(self, number: int, call: Called | None) -> Side:
        one = self._classes[number]
        named = words(one.labels, self._places.stages)
        if call is None:
            return Side(named, one.ranks, one.first, "")
        return Side(named, one.ranks, one.first, str(call), call.part, call.place, call.plugin)

    # -- messages -----------------------------------------------------------------------------------------------------

    def _channels(self, number: int) -> Iterator[tuple[Called, tuple[int, int, Group]]]:
        """The messages of a class, with the channel of each: sender, receiver and group."""
        for one in self._classes[number].calls:
            if one.kind in MESSAGES:
                peer = self._number(self._places.peer(self._classes[number].first, one.peer))
                ends = (number, peer) if one.kind == "send" else (peer, number)
                yield one, (*ends, one.group)

    def _messages(self) -> Iterator[Fault]:
        both: dict[tuple[int, int, Group], tuple[list[Called], list[Called]]] = {}
        for number in range(len(self._classes)):
            for one, channel in self._channels(number):
                both.setdefault(channel, ([], []))[one.kind == "recv"].append(one)
        for (sender, receiver, _), (sent, received) in both.items():
            for at in range(max(len(sent), len(received))):
                a, b = (row[at] if at < len(row) else None for row in (sent, received))
                if a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
                    sides = (self._side(sender, a), self._side(receiver, b))
                    said = [one.call or "no call for it" for one in sides]
                    told = f"Message {at + 1} from {sides[0].ranks} to {sides[1].ranks}: {said[0]}; {said[1]}."
                    yield Fault("message", told, sides)
                    break

    # -- circles ------------------------------------------------------------------------------------------------------

    def _circles(self) -> Iterator[Fault]:
        """Let all classes make their calls, in order; a circle of those that are left.

        A collective blocks until all have called it, as NCCL asks for: several groups are safe only if all ranks call
        in one order. A message is on its way at once, and waiting for it blocks until the other end has called.
        """
        at = [0] * len(self._classes)
        told: Counter[tuple[tuple[int, int, Group], str]] = Counter()
        numbers: list[list[tuple[tuple[int, int, Group], str, int]]] = [[] for _ in self._classes]
        channels = [[channel for _, channel in self._channels(number)] for number in range(len(self._classes))]

        def awaits(number: int) -> set[int]:
            """The classes that one waits for; nothing if it may go on."""
            call = self._classes[number].calls[at[number]]
            if call.kind in MESSAGES:
                return set()
            if call.kind == WAIT:
                channel, other, count = numbers[number][call.message]
                sender, receiver, _ = channel
                return set() if told[channel, other] > count else {receiver if sender == number else sender}
            members = self._groups[number, call.group].members
            return {one for one in members if self._head(one, at) != call}

        moved = True
        while moved:
            moved = False
            for number, one in enumerate(self._classes):
                while at[number] < len(one.calls) and not awaits(number):
                    call = one.calls[at[number]]
                    if call.kind in MESSAGES:
                        channel = channels[number][len(numbers[number])]
                        other = "recv" if call.kind == "send" else "send"
                        numbers[number].append((channel, other, told[channel, call.kind]))
                        told[channel, call.kind] += 1
                    alone = call.kind in (*MESSAGES, WAIT)
                    for member in (number,) if alone else self._groups[number, call.group].members:
                        at[member] += 1
                    moved = True
        left = {number: awaits(number) for number, one in enumerate(self._classes) if at[number] < len(one.calls)}
        if left:
            circle = _circle(left)
            sides = tuple(self._side(number, self._head(number, at)) for number in circle)
            told_of = "; ".join(f"{one.ranks}: {one.call or 'has ended'}" for one in sides)
            yield Fault("deadlock", f"They wait for each other: {told_of}.", sides)

    def _head(self, number: int, at: Sequence[int]) -> Called | None:
        calls = self._classes[number].calls
        return calls[at[number]] if at[number] < len(calls) else None


def _joined(sets: Sequence[set[int]]) -> list[set[int]]:
    found: list[set[int]] = []
    for one in sets:
        apart = [other for other in found if not other & one]
        found = [*apart, one.union(*(other for other in found if other & one))]
    return found


def _circle(left: Mapping[int, set[int]]) -> list[int]:
    """A circle among those that wait; where there is none, the way to one that has ended."""
    way = [next(iter(left))]
    while True:
        following = min(left.get(way[-1], ()), default=None)
        if following is None or following in way:
            return way[way.index(following) :] if following is not None else way
        way.append(following)
