"""Defines an update of full matrices, and the state that it keeps for each parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from forge_train.mesh.tensors import full_tensor, local

from .exchange import Piece
from .matrices import Box, Matrix, full_box, stacked

Kept = Literal["scalar", "rows", "columns", "elements"]
"""Granularity of a rule's state for a matrix: one number, or one for each row, each column or each element."""


class UpdateRule(Protocol):
    """Turns the momentum of full matrices into an update. It is called on one rank for each matrix and step."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which momenta and updates travel between ranks."""

    @property
    def keeps(self) -> Mapping[str, Kept]:
        """State by name. It is fp32, starts as zeros, and is sharded and saved with the parameter."""

    def factor(self, rows: int, columns: int) -> float:
        """A factor on the learning rate of a matrix of this shape."""

    def direction(self, momentum: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """The update, which is multiplied by the learning rate and subtracted.

        Args:
            momentum: `[matrices, rows, columns]`, in any dtype; may be overwritten.
            state: `[matrices, rows or 1, columns or 1]` by name, to be updated in place.
        """


def state_piece(matrix: Matrix, name: str, kept: Kept, part: Box) -> Piece:
    """The rule's state for a part of a matrix."""
    one = (matrix.part, matrix.part + 1)  # among the matrices stacked in the rows
    rows = (part.rows, matrix.box.rows) if kept in ("rows", "elements") else (one, one)
    columns = (part.columns, matrix.box.columns) if kept in ("columns", "elements") else ((0, 1), (0, 1))
    return Piece(matrix, name, Box(part.stack, rows[0], columns[0]), Box(matrix.box.stack, rows[1], columns[1]))


def state_beside(parameter: Any, state: Any, kept: Kept, region: Box, parts: int) -> tuple[Any, Tensor, Box]:
    """A rule's state for a whole parameter: a new one, or a loaded one, sharded for this layout.

    Args:
        parameter: the one that the state belongs to.
        state: the loaded state, or None.
        kept: what the rule keeps.
        region: this rank's part of the parameter.
        parts: number of matrices stacked in its rows.

    Returns:
        the whole state, this rank's part `[stack, rows, columns]`, and the place of that part.
    """
    own = {"rows": (-2,), "columns": (-1,), "elements": (-2, -1), "scalar": ()}[kept]
    mine = Box(region.stack, region.rows if -2 in own else (0, parts), region.columns if -1 in own else (0, 1))
    state = _spread(parameter, state, own, parts, mine)
    return state, stacked(local(state)), mine


def _spread(parameter: Any, state: Any, own: Sequence[int], parts: int, mine: Box) -> Any:
    axes = [axis % parameter.ndim for axis in own] + list(range(parameter.ndim - 2))
    sizes = {parameter.ndim - 2: parts, parameter.ndim - 1: 1}
    shape = [size if axis in axes else sizes[axis] for axis, size in enumerate(parameter.shape)]
    if not hasattr(parameter, "device_mesh"):
        return torch.zeros(shape, dtype=torch.float32, device=parameter.device) if state is None else state
    from torch.distributed.tensor import DTensor, Replicate

    placements = [one if getattr(one, "dim", -1) in axes else Replicate() for one in parameter.placements]
    if state is not None and list(getattr(state, "placements", ())) == placements:
        return state
    if state is None:
        part = torch.zeros(mine.shape, dtype=torch.float32, device=local(parameter).device)
    else:
        part = mine.of(stacked(full_tensor(state)), full_box(shape)).clone()
    stride = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return DTensor.from_local(
        part.view(mine.shape[-len(shape) :]),
        parameter.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )
