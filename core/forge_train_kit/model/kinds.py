"""Modules that compute by modality: where in a micro-batch the positions of each are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train.base.errors import PluginError

from ..modalities import extras_of
from .spans import is_imagined

if TYPE_CHECKING:
    from forge_train.contract.batch import CurrentStep

Piece = tuple[int, int]
"""Index of a piece of each sequence, and number of pieces."""


@dataclass(frozen=True)
class Rows:
    """The positions of a micro-batch, `batch × sequence`, sorted by kind."""

    of: tuple[Tensor, ...]
    """Kind → its positions, int64."""
    back: Tensor
    """Index of each position among the sorted ones."""


class Kinds(nn.Module):
    """Tells the kind of each position of the micro-batch at hand: 0 is text, k the k-th modality.

    All layers share it. In a step, the extras of `job.step.batch` say it, also while a layer is recomputed; outside of
    one, those that the model was called with, which a `Note` before the layer passes on.

    Args:
        names: of the modalities.
        step: `job.step`.
    """

    def __init__(self, names: Sequence[str], step: CurrentStep) -> None:
        super().__init__()
        self.names, self._step = tuple(names), step
        self.given: Mapping[str, Tensor] = {}
        self._places: list[Tensor] = []
        self._made: dict[Any, Any] = {}

    @torch.compiler.disable(reason="how many positions there are of a kind depends on data")  # type: ignore[untyped-decorator,no-untyped-call]
    def forward(self, x: Tensor, piece: Piece = (0, 1)) -> Tensor:
        """The kind of each position, `[batch, sequence]` int64, for `x [batch, sequence, …]`, a piece of the sequences.

        Raises:
            PluginError: if `x` has another size than the micro-batch.
        """
        kinds: Tensor = self._once("kinds", piece, x, lambda: self._kinds(x, piece))
        if x.shape[:2] != kinds.shape:
            raise PluginError(
                f"A module that computes by modality was given {list(x.shape[:2])} sequences and positions, but the "
                f"micro-batch has {list(kinds.shape)}; where tensor parallelism splits sequences, the model's "
                "tensor_plan() must name it as 'sequence' or 'tokens'."
            )
        return kinds

    @torch.compiler.disable(reason="how many positions there are of a kind depends on data")  # type: ignore[untyped-decorator,no-untyped-call]
    def rows(self, x: Tensor, piece: Piece = (0, 1)) -> Rows:
        """The same, sorted; the host waits for the number of each, once for a micro-batch."""
        kinds = self(x, piece)
        rows: Rows = self._once("rows", piece, x, lambda: sort(kinds, len(self.names) + 1))
        return rows

    def apply_each(self, x: Tensor, functions: Sequence[Callable[[Tensor], Any]], piece: Piece = (0, 1)) -> Any:
        """Have the function of its kind compute each position of `x [batch, sequence, …]`.

        Each is given `[1, positions, …]`, and gives the same, or a tuple of such tensors. It is called for no positions
        too, so that its weights have gradients in every step, unless nothing is learned.
        """
        if not torch.is_grad_enabled() and not self._found():
            return functions[0](x)
        rows, flat = self.rows(x, piece), x.flatten(0, 1)
        parts = [one(flat.index_select(0, index)[None]) for one, index in zip(functions, rows.of, strict=True)]

        def joined(*some: Tensor) -> Tensor:
            found = torch.cat([part.flatten(0, 1) for part in some]).index_select(0, rows.back)
            return found.view(*x.shape[:2], *found.shape[1:])

        if isinstance(parts[0], tuple):
            return tuple(joined(*some) for some in zip(*parts, strict=True))
        return joined(*parts)

    def _found(self) -> list[tuple[int, Tensor]]:
        """Kinds that the micro-batch says something of, with their places."""
        batch = self._step.batch
        extras = self.given if batch is None else batch.extras
        named = ((kind, extras.get(extras_of(name)[2])) for kind, name in enumerate(self.names, 1))
        return [(kind, places) for kind, places in named if places is not None]

    def _kinds(self, x: Tensor, piece: Piece) -> Tensor:
        found = self._found()
        if not found:
            return torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
        kinds = torch.zeros_like(found[0][1])
        for kind, places in found:
            kinds = kinds.masked_fill(places >= 0, kind)
        return piece_of_places(kinds, piece, missing=0)

    def _once(self, what: str, piece: Piece, x: Tensor, make: Callable[[], Any]) -> Any:
        """The result of `make`, once for a micro-batch."""
        found = [places for _, places in self._found()]
        if len(found) != len(self._places) or any(a is not b for a, b in zip(found, self._places, strict=True)):
            self._made.clear()
            self._places = found
        # Autograd takes nothing that was made in inference mode.
        facts = what, piece, torch.is_inference_mode_enabled(), None if found else x.shape[:2]
        if facts not in self._made:
            self._made[facts] = make()
        return self._made[facts]


class Note(nn.Module):
    """Tells `Kinds` what a forward was given, before the layer that it stands at; hidden states pass through."""

    def __init__(self, kinds: Kinds) -> None:
        super().__init__()
        self.kinds = kinds

    def forward(self, hidden: Tensor, **extras: Tensor) -> Tensor:
        self.kinds.given = extras
        return hidden


def sort(kinds: Tensor, count: int) -> Rows:
    """Sort positions by kind, in their order.

    Args:
        kinds: of each position.
        count: of kinds.
    """
    flat = kinds.flatten()
    order = flat.argsort(stable=True)
    sizes = [len(flat), *[0] * (count - 1)]  # without values, all is text
    if not is_imagined(flat):
        sizes = flat.bincount(minlength=count).tolist()
    return Rows(
        torch.split(order, sizes),
        torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device)),
    )


def piece_of_places(places: Tensor, piece: Piece, *, missing: int = -1) -> Tensor:
    """A piece of `[batch, sequence]` along the sequence; pieces are equal, and the last may be filled up."""
    at, pieces = piece
    if pieces == 1:
        return places
    each = -(-places.shape[1] // pieces)
    return F.pad(places, (0, each * pieces - places.shape[1]), value=missing).narrow(1, at * each, each)
