"""Tensors alive at each time of a step, in bytes."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from forge_train.mesh.tensors import held

from .watch import Watch


class Ledger(Watch):
    """Books every storage that an operation gives back, until nothing holds it, autograd's graph included.

    Works for fake and for real tensors. What a kernel takes in passing, and what an allocator rounds up, is not seen.
    Storages are numbered in the order in which they were first seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[int, int]] = []
        """Number of a storage, bytes it gained or lost; in order of time."""
        self.shapes: dict[int, tuple[int, ...]] = {}
        """Of the tensors that came first with the storages booked while `keep_shapes` was on."""
        self.keep_shapes = False
        self._alive: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        self._count = 0
        self._resize = torch.UntypedStorage.resize_

    def begin(self) -> None:
        ledger, original = self, self._resize

        def resize(storage: torch.UntypedStorage, size: int) -> Any:  # how FSDP2 frees and takes memory
            result = original(storage, size)
            ledger._book(storage)
            return result

        self._patch = patch.object(torch.UntypedStorage, "resize_", resize)
        self._patch.start()

    def end(self) -> None:
        self._patch.stop()

    def look(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        for tensor in [out] if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, Tensor):
                number = self._book(tensor.untyped_storage())
                if self.keep_shapes and number == self._count:
                    self.shapes.setdefault(number, tuple(tensor.shape))

    @torch.no_grad()
    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """The numbers of their storages, which are booked now if they were not before."""
        return {self._book(part.untyped_storage()) for tensor in tensors for part in held(tensor)}

    def peak(self, of: Collection[int] | None = None, *, but: Collection[int] = (), until: int | None = None) -> int:
        """The most bytes alive at once, of some storages or of all, without some, within so many changes."""
        changes = self.changes[:until]
        sizes = (size for number, size in changes if (of is None or number in of) and number not in but)
        return max(accumulate(sizes), default=0)

    def _book(self, storage: torch.UntypedStorage) -> int:
        key, size = storage._cdata, storage.nbytes()
        known = self._alive.get(key)
        if known is None:
            self._count += 1
            number, change = self._count, size
        else:
            number, change = known[1], size - known[2]
        if change or known is None:
            self.changes.append((number, change))
            reference = known[0] if known else weakref.ref(storage, lambda _: self._gone(key))
            self._alive[key] = (reference, number, size)
        return number

    def _gone(self, key: int) -> None:
        _, number, size = self._alive.pop(key)
        self.changes.append((number, -size))
