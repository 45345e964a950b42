"""The kernel of the `eager` plugin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge_train_kit.layers import AttentionOptions
from forge_train_kit.model import PerBatch


class Kernel:
    """Causal grouped-query attention; see `AttentionKernel`. Everything is computed in float32 or wider."""

    def __init__(self) -> None:
        self._hidden: PerBatch[tuple[Tensor, Tensor | None]] = PerBatch()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Any:
        given, group = query.dtype, query.shape[2] // key.shape[2]
        query, key, value = (one.to(torch.promote_types(given, torch.float32)) for one in (query, key, value))
        key, value = (one.repeat_interleave(group, dim=2) for one in (key, value))
        logits = torch.einsum("bqhd,bkhd->bhqk", query, key) * options.factor(query)
        if (soft_cap := options.soft_cap) is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        queries, keys, offset = query.shape[1], key.shape[1], options.first_query(query, key)
        ids, of_queries, sinks = options.document_ids, options.query_document_ids, options.sinks
        ends = options.prefix_ends
        facts = (queries, keys, offset, options.window, query.device)
        if options.lengths is None:
            unseen, blind = self._hidden(ids, facts, lambda: hidden(ids, *facts, of_queries, ends), of_queries, ends)
        else:
            columns = torch.arange(keys, device=query.device)
            unseen, blind = (columns >= options.lengths[:, None])[:, None, None], None
        logits = logits.masked_fill(unseen, -torch.inf)
        if sinks is not None:
            column = sinks.to(logits.dtype)[None, :, None, None].expand(len(query), -1, queries, 1)
            logits = torch.cat([logits, column], dim=-1)
        elif blind is not None:  # a softmax over no keys would be NaN
            logits = logits.masked_fill(blind, 0)
        weights, sums = logits.softmax(-1)[..., :keys], logits.logsumexp(-1).float()
        if blind is not None and sinks is None:
            weights, sums = weights.masked_fill(blind, 0), sums.masked_fill(blind[..., 0], -torch.inf)
        weights = weights if options.dropout is None else options.dropout(weights, offset)
        out = torch.einsum("bhqk,bkhd->bqhd", weights, value).to(given)
        return (out, sums) if options.log_sum_exp else out


def hidden(
    document_ids: Tensor | None,
    queries: int,
    keys: int,
    offset: int,
    window: int | None,
    device: torch.device,
    query_document_ids: Tensor | None = None,
    prefix_ends: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The keys hidden from each query, `[1 or batch, 1, queries, keys]`; queries without any key, if possible."""
    rows = torch.arange(offset, offset + queries, device=device)[:, None]
    columns = torch.arange(keys, device=device)
    unseen = ((columns > rows) | (columns <= rows - (window or offset + queries)))[None, None]
    if prefix_ends is not None:
        unseen = unseen & (columns >= prefix_ends[:, None, :, None])
    if document_ids is not None:
        own = document_ids[:, offset : offset + queries] if query_document_ids is None else query_document_ids
        unseen = unseen | (own[:, None, :, None] != document_ids[:, None, None, :])
    beyond = query_document_ids is not None or offset + queries > keys
    return unseen, unseen.all(-1, keepdim=True) if beyond else None
