"""Attention over keys and values that go from rank to rank (Liu et al. 2023, arXiv:2310.01889)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from forge_train_kit.layers import AttentionKernel, AttentionOptions
from forge_train_kit.messages import wait_for_message
from forge_train_kit.model.spans import piece_of

from .cut import Span
from .moving import Group


class Block(NamedTuple):
    """A span of this rank's queries, and a span of keys of which they see some."""

    queries: slice
    keys: slice
    start: int
    """Position of the first key in its row."""
    offset: int
    """Position of the first query, counted from the first key."""
    document_ids: Tensor | None
    query_document_ids: Tensor | None

    def options(self, everywhere: AttentionOptions) -> AttentionOptions:
        """Return the options of the kernel call for this block."""
        dropout = everywhere.dropout
        return replace(
            everywhere,
            offset=self.offset,
            document_ids=self.document_ids,
            query_document_ids=self.query_document_ids,
            dropout=None if dropout is None else dropout._replace(start=self.start),
        )


@dataclass(frozen=True)
class Blocks:
    """Blocks of attention that a rank computes for a batch.

    Args:
        slices: the spans of every rank, in order around the ring.
        rank: this rank's place.
        starts: where the document of each token begins, `[batch, length]`, or None.
        lowest: the same on the CPU, the lowest of all rows at each position; zeros without documents.
    """

    slices: Sequence[Sequence[Span]]
    rank: int
    starts: Tensor | None
    lowest: Sequence[int]

    @cached_property
    def _pieces(self) -> dict[Span, Tensor | None]:
        spans = {span for own in self.slices for span in own}
        return {span: None if self.starts is None else piece_of(self.starts, *span) for span in spans}

    def of(self, other: int, window: int | None) -> tuple[Block, ...]:
        """Those of a rank's keys."""
        if (other, window) not in self._found:
            self._found[other, window] = tuple(self._seen(other, window))
        return self._found[other, window]

    @cached_property
    def _found(self) -> dict[tuple[int, int | None], tuple[Block, ...]]:
        return {}

    def _seen(self, other: int, window: int | None) -> Iterator[Block]:
        for queries, at in _placed(self.slices[self.rank]):
            first = self.lowest[queries[0]]
            if window is not None:
                first = max(first, queries[0] - window + 1)
            for keys, where in _placed(self.slices[other]):
                if keys[0] < queries[1] and keys[1] > first:
                    ids = self._pieces[keys], self._pieces[queries]
                    yield Block(at, where, keys[0], queries[0] - keys[0], *ids)


def _placed(spans: Sequence[Span]) -> Iterator[tuple[Span, slice]]:
    """Spans, and where they lie in a slice."""
    at = 0
    for start, stop in spans:
        yield (start, stop), slice(at, at + stop - start)
        at += stop - start


class Ring(torch.autograd.Function):
    """Output and log-sum-exp of a slice of queries.

    A step's keys and values are under way to the next rank while it computes. Partial results are merged in float32
    (or float64), weighted by their sums of exponentials. Nothing of other ranks is kept: the backward pass has keys and
    values go round again, computes each block once more, and sends the gradients of keys and values after them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kernel: AttentionKernel,
        blocks: Blocks,
        group: Group,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros(*query.shape[:3], value.shape[-1], dtype=wide, device=query.device)
        sums = query.new_full((len(query), query.shape[2], query.shape[1]), -torch.inf, dtype=wide)
        held = torch.cat([key, value], -1)
        for step in range(group.size):
            moving = Passing(group)
            coming = moving.swap(held) if step + 1 < group.size else held
            moving.start()
            keys, values = torch.split(held, [key.shape[-1], value.shape[-1]], -1)
            for one in blocks.of((group.rank - step) % group.size, options.window):
                where = one.queries
                part, part_sums = kernel(query[:, where], keys[:, one.keys], values[:, one.keys], one.options(options))
                out[:, where], sums[:, :, where] = merge(out[:, where], sums[:, :, where], part, part_sums)
            moving.wait()
            held = coming
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, sums)
        ctx.given = kernel, blocks, group, options
        return result, sums.float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        kernel, blocks, group, options = ctx.given
        grad, sums_grad = (one.to(sums.dtype) for one in gradients)
        sizes = [key.shape[-1], value.shape[-1]]
        query_grad = torch.zeros_like(query, dtype=sums.dtype)
        held = torch.cat([key, value], -1)
        own = after = torch.zeros_like(held, dtype=sums.dtype)
        for step in range(group.size):
            moving = Passing(group)
            before = moving.swap(after) if step > 1 else None
            coming = moving.swap(held) if step + 1 < group.size else held
            moving.start()
            found = torch.zeros_like(held, dtype=sums.dtype)
            for one in blocks.of((group.rank - step) % group.size, options.window):
                where = one.queries
                with torch.enable_grad():
                    inputs = [query[:, where], *torch.split(held[:, one.keys], sizes, -1)]
                    inputs = [x.detach().requires_grad_() for x in inputs]
                    part, part_sums = kernel(inputs[0], inputs[1], inputs[2], one.options(options))
                share = (part_sums - sums[:, :, where]).exp()  # of this block in each query's result
                part_grad = share.mT[..., None] * grad[:, where]
                bent = ((part.detach() - out[:, where]) * grad[:, where]).sum(-1).mT + sums_grad[:, :, where]
                outputs, given = (part, part_sums), (part_grad.to(part.dtype), (share * bent).to(part_sums.dtype))
                first, *others = torch.autograd.grad(outputs, inputs, given)
                query_grad[:, where] += first
                found[:, one.keys] += torch.cat(others, -1)
            moving.wait()
            held = coming
            if step == 0:
                own = found
            else:
                after = found if before is None else found.add_(before)
        if group.size > 1:
            moving = Passing(group)
            home = moving.swap(after)
            moving.start()
            moving.wait()
            own += home
        key_grad, value_grad = (one.to(key.dtype) for one in torch.split(own, sizes, -1))
        return query_grad.to(query.dtype), key_grad, value_grad, None, None, None, None


def merge(out: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial results as one (Milakov and Gimelshein 2018, arXiv:1805.02867).

    Args:
        out: `[batch, queries, heads, features]`.
        sums: its log-sum-exp, `[batch, heads, queries]`; −∞ where nothing was seen.
        part: as `out`.
        part_sums: as `sums`.
    """
    total = torch.logaddexp(sums, part_sums.to(sums.dtype))
    shift = total.masked_fill(total == -torch.inf, 0)
    old, new = ((one - shift).exp().mT[..., None] for one in (sums, part_sums))
    return old * out + new * part, total


class Passing:
    """Tensors on their way to the next rank, while as many come from the one before."""

    def __init__(self, group: Group) -> None:
        self._to, self._from = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        self._group = group.process_group
        self._operations: list[dist.P2POp] = []
        self._works: list[dist.Work] = []

    def swap(self, tensor: Tensor) -> Tensor:
        """Return the buffer for the peer's tensor of this shape; nothing moves before `start`."""
        tensor = tensor.contiguous()
        coming = torch.empty_like(tensor)
        for do, what, peer in ((dist.isend, tensor, self._to), (dist.irecv, coming, self._from)):
            self._operations.append(dist.P2POp(do, what, group=self._group, group_peer=peer))
        return coming

    def start(self) -> None:
        if self._operations:
            self._works = dist.batch_isend_irecv(self._operations)

    def wait(self) -> None:
        for work in self._works:
            wait_for_message(work, self._group)
        self._operations.clear()  # and with them the buffers, which had to live until here
