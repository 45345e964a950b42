"""Specs for splitting the tensors of a tree into parts. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..ground.errors import PluginError

Span = tuple[int, int]
"""Entries from, and up to."""


@dataclass(frozen=True, slots=True)
class Split:
    """A tensor that is cut along a dimension. A part of consecutive entries shares the tensor's memory.

    Without `sizes` and `spans`, parts are equal, and joining takes parts of any sizes.
    """

    dim: int = 0
    sizes: Sequence[int] | None = None
    """Entries of each part."""
    spans: Sequence[Sequence[Span]] | None = None
    """The entries of each part as `(start, stop)`, in the order in which the part has them; together, every entry once.
    Context parallelism gives a rank a span from the front of a sequence and one from its end."""

    def __post_init__(self) -> None:
        if self.sizes is not None and self.spans is not None:
            raise PluginError("Split: give `sizes` or `spans`, not both.")


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor whose dimension `dim` has one entry for each part, as `torch.stack` makes it: a scalar of each
    micro-batch is `[micro-batches]` when joined."""

    dim: int = 0


@dataclass(frozen=True, slots=True)
class Replicate:
    """A tensor, another value or a whole subtree that is the same in every part. Joining checks that it is."""


Leaf: TypeAlias = "Split | Stack | Replicate"
Spec: TypeAlias = "Leaf | Mapping[str, Spec] | Sequence[Spec]"
"""Spec for splitting a tree: one leaf for everything below it, or a spec for every key, field or item."""


@dataclass(frozen=True, slots=True)
class Axes:
    """Axes of a tensor that index sequences and positions."""

    batch: int | None = 0
    sequence: int | None = None

    def along(
        self,
        axis: Literal["batch", "sequence"],
        sizes: Sequence[int] | None = None,
        spans: Sequence[Sequence[Span]] | None = None,
    ) -> Split | Replicate:
        """Return how a tensor with these axes is split along one of them: replicated if it lacks that axis.

        Raises:
            PluginError: if there is no such axis.
        """
        if axis not in ("batch", "sequence"):
            raise PluginError(f"A batch is cut along its axis 'batch' or 'sequence', not {axis!r}.")
        dim: int | None = getattr(self, axis)
        return Replicate() if dim is None else Split(dim, sizes, spans)


TOKENS = Axes(batch=0, sequence=1)
ROWS = Axes(batch=0)

AxesSpec: TypeAlias = "Axes | Stack | Mapping[str, AxesSpec] | Sequence[AxesSpec]"
"""Axes of the tensors in a tree; `Stack` for values with one entry per micro-batch."""


def spec_of(axes: AxesSpec, leaf: Callable[[Axes | Stack], Leaf]) -> Spec:
    """A spec of the same structure."""
    if isinstance(axes, (Axes, Stack)):
        return leaf(axes)
    if isinstance(axes, Mapping):
        return {key: spec_of(one, leaf) for key, one in axes.items()}
    return [spec_of(one, leaf) for one in axes]
