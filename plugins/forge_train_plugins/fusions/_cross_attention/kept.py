"""The items of texts that are generated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_train_kit.model import Slots

Pair = tuple[Tensor, Tensor]
"""Keys and values of a layer, `[rows, heads, vectors, head_dim]`."""


@dataclass
class Kept:
    """Those of texts of one length."""

    length: int = 0
    """Tokens so far; a sequence that begins again sets it to 0."""
    read: dict[str, Tensor] = field(default_factory=dict)
    """Output of `Items` for the first tokens."""
    pairs: dict[int, Pair] = field(default_factory=dict)
    """Layer → its pair."""

    def next(self, read: dict[str, Tensor], tokens: int) -> dict[str, Any]:
        """Arguments of layers for the next tokens; those after the first ones attend to what the last of these did.

        Raises:
            TypeError: if items come after tokens.
        """
        if read and self.length:
            raise TypeError("items come with the first tokens of a text, not after them; begin with a new cache")
        start, self.length, self.read = self.length, self.length + tokens, read or self.read
        if not self.read:
            return {}
        sees = self.read["sees"]
        at = torch.arange(start, self.length, device=sees.device).clamp(max=sees.shape[1] - 1)
        return {**self.read, "mask": self.read["mask"][:, :, at], "sees": sees[:, at], "kept": self}

    def pair(self, layer: int, make: Callable[[], Pair]) -> Pair:
        """A layer's pair, made once."""
        if layer not in self.pairs:
            self.pairs[layer] = make()
        return self.pairs[layer]


class KeptRows:
    """Those of rows side by side.

    Args:
        slots: places of the rows.
    """

    forgets = False

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._rows: list[Kept | None] = [None] * slots.count
        self._joined: dict[int, Pair] = {}
        slots.keep(self)

    def next(self, read: dict[str, Tensor], tokens: int) -> dict[str, Any]:
        """Arguments of layers for the first tokens of a row, or one more of each of several."""
        row = self._slots.row
        if row is not None:
            self._joined.clear()
            begun = Kept()
            given = begun.next(read, tokens)
            self._rows[row] = begun if read and bool(read["sees"][0, -1]) else None
            return {**given, "kept": begun} if given else {}
        rows = self._rows[: self._slots.active]
        some = [one.read for one in rows if one is not None]
        if not some:
            return {}
        most = max(one["mask"].shape[-1] for one in some)
        nothing = some[0]["mask"].new_zeros(1, 1, 1, most)
        masks = [nothing if one is None else _wide(one.read["mask"][:, :, -1:], most, -1, -torch.inf) for one in rows]
        mask = self._slots.outward(torch.cat(masks))
        sees = torch.tensor([[one is not None] for one in rows], device=mask.device)
        return {
            "features": some[0]["features"],
            "mask": mask,
            "sees": F.pad(sees, (0, 0, 0, len(mask) - len(rows))),
            "kept": self,
        }

    def pair(self, layer: int, make: Callable[[], Pair]) -> Pair:
        """The pairs of all rows, joined again when these have changed."""
        if layer not in self._joined:
            rows = self._rows[: self._slots.active]
            some = [one.pairs[layer] for one in rows if one is not None]
            most = max(key.shape[2] for key, _ in some)
            none = tuple(torch.zeros_like(one) for one in some[0])
            pairs = [none if one is None else one.pairs[layer] for one in rows]
            key, value = (torch.cat([_wide(pair[at], most, 2, 0.0) for pair in pairs]) for at in range(2))
            self._joined[layer] = self._slots.outward(key), self._slots.outward(value)
        return self._joined[layer]

    def resize(self) -> None:
        """Items take no positions."""

    def move(self, source: int, target: int) -> None:
        self._rows[target] = self._rows[source]

    def clear(self, row: int) -> None:
        self._rows[row] = None
        self._joined.clear()


def _wide(x: Tensor, vectors: int, axis: int, value: float) -> Tensor:
    """With so many vectors."""
    missing = vectors - x.shape[axis]
    return F.pad(x, [0, 0] * (x.ndim - 1 - axis % x.ndim) + [0, missing], value=value) if missing else x
