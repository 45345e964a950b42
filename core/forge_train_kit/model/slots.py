"""Memory of rows that are generated side by side, each as long as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from .places import TOGETHER, Places, Run, columns_of, of_one, of_several, rounded, runs_of

if TYPE_CHECKING:
    from ..layers import AttentionKernel, AttentionOptions


class Keeper(Protocol):
    """Memory of a layer: something of each row."""

    forgets: bool
    """True if it can forget a row's newest positions."""

    def resize(self) -> None:
        """Make room for as many positions as the slots have now."""
        ...

    def move(self, source: int, target: int) -> None:
        """Have one row take the place of another."""
        ...

    def clear(self, row: int) -> None:
        """Set what is kept of a row to zero."""
        ...


class Slots:
    """The places of rows, which the caches of all layers share.

    A forward computes either the beginning of one row, `[1, sequence]`, or one more token of each of the first rows,
    `[rows, 1]`; further rows, up to a multiple of `TOGETHER`, do not count. Several more tokens of a row are as many
    rows of the forward.

    Args:
        count: most rows side by side.
        capacity: most positions of a row.
        device: of the caches.
        joint: whether the attention kernel takes rows of different lengths (`KernelCapabilities.lengths`); if not, it
            is called for each row.
        extra: most tokens of a row in a forward, beside one, each of which may be forgotten.
    """

    def __init__(self, count: int, capacity: int, device: torch.device, *, joint: bool, extra: int = 0) -> None:
        self.count, self.device, self.joint, self.extra = count, device, joint, extra
        self.capacity = rounded(capacity)
        self.lengths = [0] * count
        """Positions that each row has, those of the forward at hand included."""
        self.row: int | None = None
        """The row that begins, or None if several rows continue."""
        self.active = 0
        """Number of rows that continue, or of their tokens in the forward at hand."""
        self._several = False
        """True if the forward at hand has not one token of each row."""
        self._keepers: list[Keeper] = []
        self._made: dict[int | None, Places] = {}
        self._runs: list[Run] = []
        self._newest: list[tuple[int, int]] = []
        """Row and position of each token, of several of a row."""

    def keep(self, keeper: Keeper) -> None:
        """Have a cache follow the rows.

        Raises:
            TypeError: it can't forget tokens, and may have to.
        """
        if self.extra and not getattr(keeper, "forgets", False):
            raise TypeError(f"{type(keeper).__name__} can't forget a row's newest positions")
        self._keepers.append(keeper)

    def begin(self, row: int, positions: int) -> None:
        """The next forward is a row's first, with so many tokens."""
        self.row, self.lengths[row] = row, positions

    def advance(self, rows: int) -> None:
        """The next forward is one more token of each of the first rows."""
        self.row, self.active = None, rows
        self._made.clear()
        for row in range(rows):
            self.lengths[row] += 1
        self._check(rows)

    def advance_by(self, counts: Sequence[int], known: Sequence[int]) -> None:
        """The next forward is more tokens of the first rows, `[tokens, 1]`: those of the first row, then the next's.

        Args:
            counts: tokens of each row, at least one and no more than `extra` and one.
            known: positions that each row has before; what is in memory behind them is forgotten.
        """
        begun = list(enumerate(zip(known, counts, strict=True)))
        self._newest = [(row, start + at) for row, (start, count) in begun for at in range(count)]
        self.row, self.active = None, len(self._newest)
        self._several = any(count != 1 for count in counts)
        self._runs = []
        self._made.clear()
        for row, (start, count) in begun:
            self.lengths[row] = start + count
        self._check(len(begun))

    def _check(self, rows: int) -> None:
        if max(self.lengths[:rows]) > self.capacity:
            raise ValueError(f"A row has {max(self.lengths[:rows])} positions; there is room for {self.capacity}.")

    def places(self, window: int | None) -> Places:
        """Of the tokens of rows that continue.

        Args:
            window: most positions that a token sees, which are kept in turn.
        """
        if window not in self._made:
            turn = self.turn(window)
            columns = columns_of(self.capacity, turn)
            self._made[window] = (
                of_several(self._newest, columns, window, turn, self.device)
                if self._several or (self.extra and window is not None)
                else of_one(self.lengths[: self.active], columns, window, self.device)
            )
        return self._made[window]

    @property
    def runs(self) -> list[Run]:
        """The tokens of the forward at hand as a CPU computes them, if a row has several; none otherwise.

        A CPU takes less time for some calls of a kernel than for a copy of what each token sees.
        """
        if self.row is not None or not (self._several and self.joint and self.device.type == "cpu"):
            return []
        self._runs = self._runs or runs_of(self._newest, self.device)
        return self._runs

    def turn(self, window: int | None) -> int | None:
        """Positions that are kept in turn where tokens see those of a window; None for all."""
        return None if window is None else window + self.extra

    def grow(self, capacity: int) -> None:
        """Make room for longer rows."""
        if capacity > self.capacity:
            self.capacity = rounded(capacity)
            for one in self._keepers:
                one.resize()

    def end(self, row: int, last: int) -> None:
        """A row ends; the last one takes its place."""
        for one in self._keepers:
            if row != last:
                one.move(last, row)
            one.clear(last)
        self.lengths[row], self.lengths[last] = self.lengths[last], 0

    def outward(self, values: Tensor) -> Tensor:
        """Add zeros for the rows that do not count to `[rows, …]` of those that continue."""
        missing = -len(values) % TOGETHER
        return torch.cat((values, values.new_zeros(missing, *values.shape[1:]))) if missing else values


class RowMemory:
    """Tensors of each row, such as a state, which every forward replaces. Rows that do not count have some, too."""

    forgets = False

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._held: list[Tensor] = []
        slots.keep(self)

    def take(self) -> list[Tensor]:
        """Return what is kept of the rows of a forward, `[rows, …]` each; nothing of a row that begins."""
        return [one[self._rows] for one in self._held] if self.slots.row is None else []

    def put(self, *values: Tensor) -> None:
        """Keep these, with the same axes."""
        if not self._held:
            self._held = [_memory(one, rounded(self.slots.count, TOGETHER), *one.shape[1:]) for one in values]
        for held, value in zip(self._held, values, strict=True):
            held[self._rows] = value

    @property
    def _rows(self) -> slice:
        row = self.slots.row
        return slice(rounded(self.slots.active, TOGETHER)) if row is None else slice(row, row + 1)

    def resize(self) -> None:
        """Sizes do not depend on the number of positions."""

    def move(self, source: int, target: int) -> None:
        for one in self._held:
            one[target] = one[source]

    def clear(self, row: int) -> None:
        for one in self._held:
            one[row] = 0


class PositionMemory(RowMemory):
    """Tensors of each position, such as keys and values. What no position has filled is zero.

    Args:
        slots: places of the rows.
        window: number of last positions that later ones see, which are kept in turn; None for all.
    """

    forgets = True

    def __init__(self, slots: Slots, window: int | None = None) -> None:
        super().__init__(slots)
        self.window, self._turn = window, slots.turn(window)

    def add(self, *values: Tensor) -> tuple[Sequence[Tensor], Tensor] | None:
        """Keep the newest positions, `[batch, sequence, …]`.

        Returns:
            Of rows that continue, all positions, `[rows, columns, …]`, and how many of these columns each row fills; in
            their order, unless there is a window. None for a row that begins, which has no others.
        """
        return self._read() if self._keep(*values) else None

    def _keep(self, *values: Tensor) -> bool:
        """Keep the newest positions; True if rows continue."""
        slots, columns = self.slots, columns_of(self.slots.capacity, self._turn)
        if not self._held:
            self._held = [_memory(one, slots.count, columns, *one.shape[2:]) for one in values]
        if slots.row is not None:
            first = max(values[0].shape[1] - (self._turn or columns), 0)
            for held, value in zip(self._held, values, strict=True):
                if self._turn is None:
                    held[slots.row, : value.shape[1]] = value[0]
                else:
                    at = torch.arange(first, value.shape[1], device=slots.device) % self._turn
                    held[slots.row].index_copy_(0, at, value[0, first:])
            return False
        places = slots.places(self.window)
        for held, value in zip(self._held, values, strict=True):
            held.flatten(0, 1).index_copy_(0, places.newest, value[: slots.active, 0])
        return True

    def _read(self) -> tuple[Sequence[Tensor], Tensor]:
        places = self.slots.places(self.window)
        if places.reads is not None:  # `index_select` takes a fifth of the time of an index (torch 2.13, CPU)
            at, shape = places.reads.flatten(), places.reads.shape
            found = [held.flatten(0, 1).index_select(0, at).view(*shape, *held.shape[2:]) for held in self._held]
            return found, places.held
        return [held[: self.slots.active, : places.seen] for held in self._held], places.held

    def _read_by(self, run: Run) -> list[Tensor]:
        """Positions that the tokens of a run see, `[tokens, columns, …]`, without a copy."""
        several = run.tokens.stop - run.tokens.start
        return [held[run.rows, : run.seen].expand(several, *[-1] * (held.ndim - 1)) for held in self._held]

    def resize(self) -> None:
        columns = columns_of(self.slots.capacity, self._turn)
        for at, one in enumerate(self._held):
            if columns > one.shape[1]:
                self._held[at] = _memory(one, len(one), columns, *one.shape[2:])
                self._held[at][:, : one.shape[1]] = one


class SlotCache(PositionMemory):
    """Keys and values of one attention layer."""

    def attend(
        self, kernel: AttentionKernel, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Any:
        """Add the newest positions, and have a kernel attend to all; as the kernel itself."""
        if self.window is None and (runs := self.slots.runs):
            self._keep(key, value)
            each = ((query[one.tokens], self._read_by(one), _of_last(options, one.lengths)) for one in runs)
            return self.slots.outward(torch.cat([kernel(some, seen[0], seen[1], own) for some, seen, own in each]))
        if (found := self.add(key, value)) is None:
            return kernel(query, key, value, options)
        (keys, values), lengths = found
        query = query[: len(keys)]
        if self.slots.joint:
            return self.slots.outward(kernel(query, keys, values, _of_last(options, lengths)))
        options, out = _of_last(options), []
        for row, length in enumerate(lengths.tolist()):
            some = slice(row, row + 1)
            out.append(kernel(query[some], keys[some, :length], values[some, :length], options))
        return self.slots.outward(torch.cat(out))


def _of_last(options: AttentionOptions, lengths: Tensor | None = None) -> AttentionOptions:
    """Options of a query that sees all keys in memory."""
    return type(options)(scale=options.scale, soft_cap=options.soft_cap, sinks=options.sinks, lengths=lengths)


def _memory(like: Tensor, *shape: int) -> Tensor:
    """Zeros that can be written to outside torch's inference mode, too."""
    with torch.inference_mode(False):
        return like.new_zeros(shape)
