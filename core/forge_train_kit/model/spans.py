"""Keys that each query sees, and the values derived from them that a batch's layers share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_T = TypeVar("_T")


class PerBatch(Generic[_T]):
    """Remembers what was made for a batch's document ids, so that all layers share it.

    It keeps results for the last batch only. Masks and bounds of documents are the same in every layer, and autograd
    keeps each call's inputs, so a separate copy for each layer would cost time and memory.
    """

    def __init__(self) -> None:
        self._ids: tuple[Tensor | None, int] = None, 0
        self._made: dict[Hashable, tuple[Any, Tensor | None]] = {}

    def __call__(
        self,
        document_ids: Tensor | None,
        facts: Hashable,
        make: Callable[[], _T],
        of_queries: Tensor | None = None,
        prefix_ends: Tensor | None = None,
    ) -> _T:
        """The result of `make` for these ids, in their present state, and for equal facts.

        Args:
            document_ids: the batch's; compared by identity and by how often they were changed in place.
            facts: everything else that the result depends on.
            make: called if there is no result yet.
            of_queries: document ids of the queries, if they are given separately.
            prefix_ends: where their prefixes end, if they have some. Not beside `of_queries`.
        """
        of_queries = prefix_ends if of_queries is None else of_queries
        document_ids = prefix_ends if document_ids is None else document_ids
        given = (one for one in (document_ids, of_queries) if one is not None)
        if torch.compiler.is_compiling() or any(one.is_inference() for one in given):
            return make()
        whole, piece = getattr(document_ids, PIECE, (document_ids, None))
        version = 0 if whole is None else whole._version
        if self._ids[0] is not whole or self._ids[1] != version:
            self._made.clear()
        self._ids = whole, version
        queries = None if of_queries is None else (id(of_queries), of_queries._version)
        facts = facts, piece, queries, torch.is_inference_mode_enabled()  # autograd takes nothing that was made there
        if facts not in self._made:
            made = make()
            if len(self._made) == KEPT:
                del self._made[next(iter(self._made))]
            self._made[facts] = made, of_queries  # kept alive, so that no other tensor gets its id
        return cast(_T, self._made[facts][0])


KEPT = 256
"""The most results that `PerBatch` keeps for a batch: attention may cover several spans of queries and keys."""
PIECE = "_forge_piece_of"


def piece_of(document_ids: Tensor, start: int, stop: int) -> Tensor:
    """Some tokens' ids, which `PerBatch` treats as the batch of the whole ids."""
    piece = document_ids[:, start:stop]
    setattr(piece, PIECE, (document_ids, (start, stop)))
    return piece


def first_visible(
    document_ids: Tensor | None,
    queries: int,
    keys: int,
    *,
    offset: int,
    window: int | None = None,
    device: torch.device | None = None,
    query_document_ids: Tensor | None = None,
    prefix_ends: Tensor | None = None,
) -> Tensor:
    """The first key that each query sees: it sees all keys from there to the last one (`last_visible`).

    Args:
        document_ids: `[batch, keys]` int64, the tokens of a document next to each other; see `check_neighbours`.
        queries: number of queries.
        keys: number of keys.
        offset: position of the first query, counted from the first key.
        window: number of positions that a query sees, including its own.
        device: of the result, if there are no document ids.
        query_document_ids: `[batch, queries]`, if the keys are a block before or around the queries' positions.
        prefix_ends: `[batch, queries]`, as in `AttentionOptions`.

    Returns:
        `[batch, queries]` int64, `keys` or more for a query that sees no key; `[1, queries]` without document ids.
    """
    device = device if document_ids is None else document_ids.device
    rows = torch.arange(offset, offset + queries, device=device)
    if document_ids is None:
        first = torch.zeros_like(rows)[None]
    else:
        starts = torch.where(_begins(document_ids), torch.arange(keys, device=device), 0)
        nearest = rows.clamp(max=keys - 1)
        first = starts.cummax(1).values[:, nearest]
        if query_document_ids is not None:
            first = first.masked_fill(query_document_ids != document_ids[:, nearest], keys)
    if window is None:
        return first
    near = first.maximum(rows - window + 1)
    return near if prefix_ends is None else torch.where(prefix_ends > 0, first, near)


def last_visible(rows: Tensor, prefix_ends: Tensor | None, document_ids: Tensor | None = None) -> Tensor:
    """The last key that each query sees, if there are so many.

    Args:
        rows: `[queries]`, their positions, counted from the first key.
        prefix_ends: `[batch, queries]`, as in `AttentionOptions`.
        document_ids: `[batch, keys]`, of keys that are no block.

    Returns:
        `[batch, queries]`; `[1, queries]` without prefixes.
    """
    if prefix_ends is None:
        return rows[None]
    if document_ids is None:
        return rows.maximum(prefix_ends - 1)
    keys = document_ids.shape[1]
    lasts = torch.where(_begins(document_ids.flip(1)), torch.arange(keys, device=rows.device), 0).cummax(1).values
    return rows.maximum(prefix_ends - 1).minimum((keys - 1 - lasts.flip(1))[:, rows])


def document_bounds(document_ids: Tensor, queries: int, *, offset: int) -> tuple[Tensor, Tensor]:
    """Return where each document begins among all queries and all keys, with the batch's rows concatenated.

    Keys beyond the last query's position are left out. A document without query tokens has an empty range of queries.
    The number of documents is read from the device, so call this once per batch.

    Returns:
        Two `[documents + 1]` int64 tensors, like `cu_seqlens` of flash attention.

    Raises:
        ValueError: if a document reappears after another one.
    """
    kept = offset + queries
    ids = document_ids[:, :kept]
    check_neighbours(ids)
    row, start = _begins(ids).nonzero(as_tuple=True)
    last = row.new_tensor([len(ids)])
    of_queries = torch.cat([row * queries + (start - offset).clamp(min=0), last * queries])
    return of_queries, torch.cat([row * kept + start, last * kept])


def check_neighbours(document_ids: Tensor) -> None:
    """Check that every document is one run of tokens; reads from the device.

    Raises:
        ValueError: if a document reappears after another one.
    """
    if not is_imagined(document_ids) and not bool(neighbours(document_ids)):
        raise ValueError("the ids of a document come back after another document's; its tokens must be neighbours")


def neighbours(document_ids: Tensor) -> Tensor:
    """Return a tensor on the device: True if every document is one contiguous run of tokens."""
    return (_begins(document_ids).sum(1) == _begins(document_ids.sort(1).values).sum(1)).all()


def is_imagined(tensor: Tensor) -> bool:
    """Return True if a tensor has no values: a fake one of `forge plan`, or one on the meta device."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _begins(document_ids: Tensor) -> Tensor:
    """Mark each token at which a document begins, `[batch, keys]`."""
    first = torch.ones_like(document_ids[:, :1], dtype=torch.bool)
    return torch.cat([first, document_ids[:, 1:] != document_ids[:, :-1]], dim=1)
