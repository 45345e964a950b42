"""Which keys a query sees, and what a batch's layers share of that."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_T = TypeVar("_T")


class PerBatch(Generic[_T]):
    """Remembers what was made for the document ids of a batch, so that all layers share one.

    It keeps one thing: the last. Masks and bounds of documents are the same in every layer, and autograd keeps what
    each call was given, so that one for each layer would cost time and memory.
    """

    def __init__(self) -> None:
        self._made: tuple[Tensor | None, Hashable, Any] | None = None

    def __call__(self, document_ids: Tensor | None, facts: Hashable, make: Callable[[], _T]) -> _T:
        """What `make` gave for these ids, in their present state, and for equal facts.

        Args:
            document_ids: of the batch; compared by identity and by how often they were changed in place.
            facts: whatever else it depends on.
            make: is called where nothing fits.
        """
        if torch.compiler.is_compiling() or (document_ids is not None and document_ids.is_inference()):
            return make()
        facts = (facts, 0 if document_ids is None else document_ids._version)
        if self._made is None or self._made[0] is not document_ids or self._made[1] != facts:
            self._made = document_ids, facts, make()
        return cast(_T, self._made[2])


def first_visible(
    document_ids: Tensor | None,
    queries: int,
    keys: int,
    *,
    offset: int,
    window: int | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """The first key that each query sees: it sees all keys from there to its own position.

    Args:
        document_ids: `[batch, keys]` int64, the tokens of a document next to each other; see `check_neighbours`.
        queries: their number.
        keys: their number.
        offset: position of the first query, counted from the first key.
        window: positions that a query sees, its own included.
        device: of the answer, where there are no document ids.

    Returns:
        `[batch, queries]` int64; `[1, queries]` without document ids.
    """
    device = device if document_ids is None else document_ids.device
    rows = torch.arange(offset, offset + queries, device=device)
    if document_ids is None:
        first = torch.zeros_like(rows)[None]
    else:
        starts = torch.where(_begins(document_ids), torch.arange(keys, device=device), 0)
        first = starts.cummax(1).values[:, offset : offset + queries]
    return first if window is None else first.maximum(rows - window + 1)


def document_bounds(document_ids: Tensor, queries: int, *, offset: int) -> tuple[Tensor, Tensor]:
    """Where each document begins among all queries, and among all keys, when the batch is one row after the other.

    Keys beyond the last query's position are left out. A document none of whose tokens is a query has no queries. The
    number of documents is read from the device: make it once a batch.

    Returns:
        Two `[documents + 1]` int64 tensors, as `cu_seqlens` of flash attention.

    Raises:
        ValueError: if a document comes back after another one.
    """
    kept = offset + queries
    ids = document_ids[:, :kept]
    check_neighbours(ids)
    row, start = _begins(ids).nonzero(as_tuple=True)
    last = row.new_tensor([len(ids)])
    of_queries = torch.cat([row * queries + (start - offset).clamp(min=0), last * queries])
    return of_queries, torch.cat([row * kept + start, last * kept])


def check_neighbours(document_ids: Tensor) -> None:
    """Whether every document is one run of tokens; reads from the device.

    Raises:
        ValueError: if a document comes back after another one.
    """
    if not is_imagined(document_ids) and not bool(neighbours(document_ids)):
        raise ValueError("the ids of a document come back after another document's; its tokens must be neighbours")


def neighbours(document_ids: Tensor) -> Tensor:
    """Whether every document is one run of tokens, as a tensor on the device."""
    return (_begins(document_ids).sum(1) == _begins(document_ids.sort(1).values).sum(1)).all()


def is_imagined(tensor: Tensor) -> bool:
    """Whether it has no values: a tensor of `forge plan`, or one on the meta device."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _begins(document_ids: Tensor) -> Tensor:
    """Whether a document begins at a token, `[batch, keys]`."""
    first = torch.ones_like(document_ids[:, :1], dtype=torch.bool)
    return torch.cat([first, document_ids[:, 1:] != document_ids[:, :-1]], dim=1)
