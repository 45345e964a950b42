"""The kernel of the `flex` plugin on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from forge_train_kit.layers import AttentionOptions
from forge_train_kit.model import PerBatch, TiledAttention, first_visible, is_imagined, last_visible, neighbours

BLOCK = 128
"""Queries and keys per block: FlexAttention's default."""
Facts = tuple[int, int, int, int | None, torch.device]
"""Number of queries and keys, position of the first query, window, device."""


class FlexKernel:
    """Causal grouped-query attention; see `AttentionKernel`.

    Args:
        attention: `flex_attention`, compiled.
    """

    def __init__(self, attention: Callable[..., Any] | None = None) -> None:
        self._attention = attention or torch.compile(flex_attention)
        self._block_mask: PerBatch[BlockMask] = PerBatch()
        # In a compiled graph each layer would make its own.
        self._shared_mask: Callable[..., BlockMask] = torch.compiler.disable(self._mask)  # type: ignore[no-untyped-call]
        self._imagined = TiledAttention()  # for `forge plan`: the same memory, without compiling

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Any:
        if is_imagined(query):
            return self._imagined(query, key, value, options)
        options.check(TiledAttention.capabilities, query, key)
        queries, offset, sinks = query.shape[1], options.first_query(query, key), options.sinks
        kept = key.shape[1] if options.prefix_ends is not None else min(offset + queries, key.shape[1])
        needs_sums = sinks is not None or options.log_sum_exp
        found = self._attention(
            query.transpose(1, 2),
            key[:, :kept].transpose(1, 2),
            value[:, :kept].transpose(1, 2),
            score_mod=None if options.soft_cap is None else capped(options.soft_cap),
            block_mask=self._shared_mask(
                options.document_ids,
                (queries, kept, offset, options.window, query.device),
                options.query_document_ids,
                options.prefix_ends,
            ),
            scale=options.scale,
            enable_gqa=query.shape[2] != key.shape[2],
            # Its kernel for few queries has no choice for a key block of 128 (torch 2.11 on an H200).
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True} if queries < BLOCK else None,
            return_aux=AuxRequest(lse=True) if needs_sums else None,
        )
        if not needs_sums:
            return found.transpose(1, 2)
        out, lse_BHT = found[0].transpose(1, 2), found[1].lse
        if sinks is not None:
            # A sink adds exp(sink) to the sum of exponentials that normalises each query's weights.
            total = torch.logaddexp(lse_BHT, sinks.to(lse_BHT.dtype)[:, None].expand_as(lse_BHT))
            out = out * (lse_BHT - total).exp().transpose(1, 2)[..., None].to(out.dtype)
            lse_BHT = total
        return (out, lse_BHT.float()) if options.log_sum_exp else out

    def _mask(self, ids: Tensor | None, facts: Facts, of_queries: Tensor | None, ends: Tensor | None) -> BlockMask:
        return self._block_mask(
            ids, facts, lambda: make_block_mask(ids, *facts, of_queries, ends), of_queries, prefix_ends=ends
        )


@cache
def capped(cap: float) -> Callable[..., Tensor]:
    """Returns the same function for the same cap, because FlexAttention compiles for each function."""

    def bend(score: Tensor, *indices: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return bend


def make_block_mask(
    document_ids: Tensor | None,
    queries: int,
    keys: int,
    offset: int,
    window: int | None,
    device: torch.device,
    query_document_ids: Tensor | None = None,
    prefix_ends: Tensor | None = None,
) -> BlockMask:
    """Blocks of keys that some queries of a block see, and blocks that all of them see in full.

    A query sees one run of keys, so the bounds of these runs suffice; `create_block_mask` would first make a mask of
    all queries × keys. Nothing is read from the device.
    """
    first = first_visible(
        None if document_ids is None else document_ids[:, :keys],
        queries,
        keys,
        offset=offset,
        window=window,
        device=device,
        query_document_ids=query_document_ids,
        prefix_ends=prefix_ends,
    )
    last = last_visible(
        torch.arange(offset, offset + queries, device=first.device),
        prefix_ends,
        None if document_ids is None else document_ids[:, :keys],
    )
    if document_ids is not None:
        torch._assert_async(neighbours(document_ids[:, :keys]), "the tokens of a document must be neighbours")
    lowest, highest, farthest, nearest = (
        torch.unflatten(F.pad(one, (0, -queries % BLOCK), value=beyond), 1, (-1, BLOCK))
        for one, beyond in ((first, keys), (first, -1), (last, -1), (last, offset + queries))
    )
    lowest, highest, farthest, nearest = lowest.amin(2), highest.amax(2), farthest.amax(2), nearest.amin(2)
    begin = torch.arange(0, queries, BLOCK, device=device)
    end = (begin + BLOCK).clamp(max=queries)
    key_begin = torch.arange(0, keys, BLOCK, device=device)
    key_end = key_begin + BLOCK
    seen = (key_begin <= farthest[:, :, None]) & (key_end > lowest[:, :, None])
    full = (key_begin >= highest[:, :, None]) & (key_end <= nearest[:, :, None] + 1)
    full &= (end - begin == BLOCK)[:, None]

    def visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        until = row + offset if prefix_ends is None else last[batch, row]
        return (column <= until) & (column >= first[batch if len(first) > 1 else 0, row])

    return BlockMask.from_kv_blocks(
        *_listed(seen & ~full), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(queries, keys)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The number of blocks in each row, and their indices first: `[batch, 1, rows]`, `[batch, 1, rows, columns]`."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None].contiguous()
