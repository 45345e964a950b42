"""Positions of items among text along three axes: time, height and width (M-RoPE, arXiv:2409.12191, §2.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_train.base.errors import PluginError
from forge_train.contract.batch import TOKENS, Batch

from ..modalities import Grid, Modality, extras_of, paces_of
from .slots import RowMemory
from .whole_rows import rows_are_whole

if TYPE_CHECKING:
    from .slots import Slots

ITEM_POSITIONS = "item_positions"
"""The extra of a batch with positions along three axes, `[batch, sequence, 3]` int64."""


class ItemPositions:
    """Positions of rows with items, whose vectors stand among the tokens.

    A token's three positions are equal, and count on by one. The vectors of an item that is `spread` begin at the next
    position, and differ from it by their frame (times its pace), row and column; the text after them goes on behind
    their largest position. Those of other items count like tokens.

    Args:
        modalities: of the model.
        sliced: whether batches hold slices of rows, whose positions must have been prepared.
    """

    def __init__(self, modalities: Mapping[str, Modality], *, sliced: bool = False) -> None:
        self._sliced = sliced
        self._modalities = {name: one for name, one in modalities.items() if hasattr(one, "spread")}
        self._known: dict[tuple[str, Grid], tuple[int, ...]] = {}

    def prepared(self, batch: Batch) -> Batch:
        """The batch with positions along three axes, from whole rows; unchanged if it holds no items."""
        found = self._of_rows(batch.extras, batch.position_ids, batch.document_ids)
        if found is None:
            return batch
        extras, axes = {**batch.extras, ITEM_POSITIONS: found[0]}, {**batch.axes, ITEM_POSITIONS: TOKENS}
        return replace(batch, extras=extras, axes=axes)

    def __call__(
        self, extras: Mapping[str, Tensor], position_ids: Tensor | None, document_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Positions `[batch, sequence, 3]`, and what to add to the position of tokens that follow, `[batch, 1]`.

        None without the extras of a modality. The host waits for grids that are on a device.

        Args:
            extras: of a batch of whole rows.
            position_ids: as in a batch; 0, 1, … by default.
            document_ids: as in a batch.

        Raises:
            PluginError: rows are slices.
        """
        found = self._of_rows(extras, position_ids, document_ids)
        if self._sliced and not rows_are_whole() and found is not None:
            raise PluginError(
                f"The positions of items depend on whole rows, and this rank has slices of them: {ITEM_POSITIONS!r} "
                "must be among the extras of its batches, which the model's plugin prepares."
            )
        return found

    def _of_rows(
        self, extras: Mapping[str, Tensor], position_ids: Tensor | None, document_ids: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """Positions, and what follows from them."""
        names = {name: extras_of(name)[1:] for name in self._modalities}
        given = {name: (extras[a], extras[b]) for name, (a, b) in names.items() if a in extras and b in extras}
        if not given:
            return None
        like = next(iter(given.values()))[1]
        if position_ids is None:
            position_ids = torch.arange(like.shape[1], device=like.device).expand(like.shape[0], -1)
        inside, after = position_ids.new_zeros(*like.shape, 3), torch.zeros_like(like)
        for name, (grids, places) in given.items():
            own, behind = self._of(name, grids, places, extras.get(paces_of(name)))
            inside, after = inside + own, after + behind
        through = after.cumsum(1)
        before = through - after
        begins = torch.where(_begins(position_ids, document_ids), torch.arange(like.shape[1], device=like.device), 0)
        base = before.gather(1, begins.cummax(1).values)
        return (position_ids + before - base)[..., None] + inside, (through - base)[:, -1:]

    def _of(self, name: str, grids: Tensor, places: Tensor, paces: Tensor | None) -> tuple[Tensor, Tensor]:
        """Summands of the positions of a modality's vectors, `[batch, sequence, 3]`, and of all positions after each
        item, `[batch, sequence]` at its last vector."""
        if not grids.shape[1]:
            return places.new_zeros(*places.shape, 3), torch.zeros_like(places)
        sides = [[self._sides(name, (one[0], one[1], one[2])) for one in row] for row in grids.tolist()]
        table = torch.tensor(sides, device=places.device)
        here, at = places >= 0, places.clamp(min=0)
        ends = table[..., 0].cumsum(-1)
        item = torch.searchsorted(ends, at, right=True).clamp(max=table.shape[1] - 1)
        number = at - (ends - table[..., 0]).gather(1, item)
        _, frames, rows, columns = table.gather(1, item[..., None].expand(-1, -1, 4)).unbind(-1)
        spread, rows, columns = here & (frames > 0), rows.clamp(min=1), columns.clamp(min=1)
        time, last_time = number // (rows * columns), frames - 1
        if paces is not None:
            pace = paces.gather(1, item)
            time, last_time = (time * pace).long(), (last_time * pace).long()
        along = torch.stack((time, number // columns % rows, number % columns), -1)
        follows = (places[:, 1:] == places[:, :-1] + 1) & (item[:, 1:] == item[:, :-1])
        last = spread & ~F.pad(follows, (0, 1), value=False)
        largest = torch.stack((last_time + 1, rows, columns), -1).amax(-1)
        return (along - number[..., None]).where(spread[..., None], 0), (largest - number - 1).where(last, 0)

    def _sides(self, name: str, grid: Grid) -> tuple[int, ...]:
        """The number of an item's vectors, and how many there are along each axis; zeros if they count like tokens."""
        if (name, grid) not in self._known:
            modality: Any = self._modalities[name]
            count, spread = (modality.positions(grid), modality.spread(grid)) if all(grid) else (0, None)
            if spread is not None and spread[0] * spread[1] * spread[2] != count:
                raise PluginError(
                    f"Modality {name!r}: an item with the grid {grid} takes {count} positions, and spread(grid) is "
                    f"{tuple(spread)}; their product must be the same."
                )
            self._known[name, grid] = count, *(spread or (0, 0, 0))
        return self._known[name, grid]


class Shift:
    """Summand of the positions of tokens after a text's items, while it is generated."""

    def __init__(self) -> None:
        self._shift: Tensor | None = None

    def put(self, shift: Tensor) -> None:
        """Keep it for the tokens that follow the first ones, `[rows, 1]`."""
        self._shift = shift

    def get(self) -> Tensor | int:
        """It, or 0 before the first tokens."""
        return 0 if self._shift is None else self._shift


class SlotShift:
    """The same of rows side by side, with 0 for those whose first tokens had no items.

    Args:
        slots: places of the rows.
    """

    def __init__(self, slots: Slots) -> None:
        self._memory = RowMemory(slots)

    def put(self, shift: Tensor) -> None:
        """Keep that of the row that begins, `[1, 1]`."""
        self._memory.put(shift)

    def get(self) -> Tensor | int:
        """Those of the rows that continue, `[rows, 1]`."""
        found = self._memory.take()
        return found[0] if found else 0


def _begins(position_ids: Tensor, document_ids: Tensor | None) -> Tensor:
    """Mark positions at which another document begins, or another part of a row."""
    begins = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if document_ids is not None:
        begins = begins | (document_ids[:, 1:] != document_ids[:, :-1])
    return F.pad(begins, (1, 0), value=True)
