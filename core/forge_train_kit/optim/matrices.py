"""Placement of each matrix's parts on ranks, for sharded parameters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import _disable_current_modes

from forge_train.base.errors import PluginError
from forge_train.mesh.tensors import local

if TYPE_CHECKING:
    from torch import Tensor

    from forge_train.contract.model import Model

Span = tuple[int, int]
"""Start and end of a range of indices."""


@dataclass(frozen=True)
class Box:
    """A part of a parameter, which is treated as a stack of matrices `[stack, rows, columns]`."""

    stack: Span
    rows: Span
    columns: Span

    def __and__(self, other: Box) -> Box:
        pairs = zip(self.spans, other.spans, strict=True)
        return Box(*((max(a[0], b[0]), max(a[0], b[0], min(a[1], b[1]))) for a, b in pairs))

    @property
    def spans(self) -> tuple[Span, Span, Span]:
        return self.stack, self.rows, self.columns

    @property
    def shape(self) -> tuple[int, int, int]:
        sizes = tuple(end - start for start, end in self.spans)
        return sizes[0], sizes[1], sizes[2]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, tensor: Tensor, origin: Box) -> Tensor:
        """The part of a tensor `[stack, rows, columns]` whose first element is `origin`'s."""
        for axis, (own, first) in enumerate(zip(self.spans, origin.spans, strict=True)):
            tensor = tensor.narrow(axis, own[0] - first[0], own[1] - own[0])
        return tensor


@dataclass(frozen=True)
class Matrix:
    """A full matrix, or several matrices of a stack that one rank holds together."""

    parameter: int
    """Its index."""
    box: Box
    part: int = 0
    """Index among the matrices that are stacked in the parameter's rows."""

    @property
    def cost(self) -> int:
        """Cost of the matrix's products: rows × columns × the smaller of the two."""
        return self.box.numel * min(self.box.shape[1:])


def stacked(tensor: Tensor) -> Tensor:
    """View a matrix or a stack of matrices as `[stack, rows, columns]`."""
    return tensor if tensor.ndim == 3 else tensor.unsqueeze(0)


def full_box(shape: Sequence[int]) -> Box:
    stack, rows, columns = (1, *shape)[-3:]
    return Box((0, stack), (0, rows), (0, columns))


def sharded_axes(parameter: Any) -> list[int]:
    """The axes of a parameter's mesh along which ranks hold different parts of it."""
    placements = getattr(parameter, "placements", ())
    if any(placement.is_partial() for placement in placements):
        raise PluginError(f"A parameter of shape {tuple(parameter.shape)} lies on the ranks in parts to be summed.")
    return [axis for axis, one in enumerate(placements) if hasattr(one, "dim") and parameter.device_mesh.size(axis) > 1]


def regions(parameter: Any, rank: int) -> dict[int, Box]:
    """Global rank → its part, for the ranks that together hold one copy of a parameter, including this rank.

    Raises:
        PluginError: for a placement that is not a box, or that does not match the local tensor.
    """
    whole, axes = full_box(parameter.shape), sharded_axes(parameter)
    if not axes:
        return {rank: whole}
    mesh, placements = parameter.device_mesh, parameter.placements
    with _disable_current_modes():  # under fake tensors (`forge plan`), torch (2.13) makes the table a fake one
        table, here = mesh.mesh.tolist(), list(mesh.get_coordinate())
    # A strided shard divides the shard of an axis further in, as FSDP2's does with tensor parallelism's.
    strided = [axis for axis in axes if getattr(placements[axis], "split_factor", 1) > 1]
    order = [axis for axis in axes if axis not in strided] + strided[::-1]
    found: dict[int, Box] = {}
    for places in itertools.product(*(range(mesh.size(axis)) for axis in axes)):
        at = dict(zip(axes, places, strict=True))
        spans = list(whole.spans)
        for axis in order:
            dim = placements[axis].dim + 3 - parameter.ndim
            spans[dim] = _chunk(spans[dim], at[axis], mesh.size(axis))
        holder: Any = table
        for axis, place in enumerate(here):
            holder = holder[at.get(axis, place)]
        found[int(holder)] = Box(*spans)
    mine = (1, *local(parameter).shape)[-3:]
    if found[rank].numel != math.prod(mine) or (found[rank].numel and found[rank].shape != mine):
        raise PluginError(
            f"A parameter of shape {tuple(parameter.shape)}, placed as {placements}, has the local shape {mine}; "
            f"{found[rank].shape} was expected. An optimizer of full matrices can't gather it."
        )
    return found


def _chunk(span: Span, index: int, count: int) -> Span:
    """Splits like torch.chunk: the last parts may be shorter, or empty."""
    start, end = span
    size = -(-(end - start) // count)
    return min(start + index * size, end), min(start + (index + 1) * size, end)


def hidden_matrices(model: Model) -> set[str]:
    """Names of the parameters that are matrices between hidden states: those without a role (embedding, head), and the
    stacks `[experts, out, in]` of modules whose `domain` is "expert". Vectors, including the stacked
    biases of experts, and convolutions are not matrices."""
    experts = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if getattr(module, "domain", "") == "expert"
        for name, _ in module.named_parameters()
    }
    roles = model.roles
    return {
        name
        for name, parameter in model.named_parameters()
        if name not in roles and parameter.ndim == (3 if name in experts else 2)
    }


def fused_rows(model: Model) -> dict[int, tuple[int, ...]]:
    """Id of a parameter → rows of each matrix that is stacked in it, as modules declare in `fused_rows()`.

    Raises:
        PluginError: if the rows do not match the parameter's.
    """
    found: dict[int, tuple[int, ...]] = {}
    for prefix, module in model.named_modules():
        declares = getattr(type(module), "fused_rows", None)  # its own, not a wrapped module's
        declared: Mapping[str, Sequence[int]] = declares(module) if declares else {}
        for name, rows in declared.items():
            parameter = module.get_parameter(name)
            if sum(rows) != parameter.shape[-2] or min(rows) <= 0:
                raise PluginError(
                    f"{type(module).__name__} at {prefix!r}: fused_rows() gives {tuple(rows)} for {name!r}, which has "
                    f"{parameter.shape[-2]} rows."
                )
            found[id(parameter)] = tuple(rows)
    return found


def matrices_of(index: int, shape: Sequence[int], rows: Sequence[int] = ()) -> Iterator[Matrix]:
    """Every full matrix of a parameter.

    Args:
        index: of the parameter.
        shape: `[rows, columns]` or `[stack, rows, columns]`.
        rows: the number of rows of each matrix stacked in its rows, if there are several.
    """
    whole = full_box(shape)
    bounds = list(itertools.accumulate(rows or whole.shape[1:2], initial=0))
    for one in range(whole.shape[0]):
        for part, span in enumerate(itertools.pairwise(bounds)):
            yield Matrix(index, Box((one, one + 1), span, whole.columns), part)
