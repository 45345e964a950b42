"""Attention weights, computed apart from the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..layers import AttentionOptions


def attention_weights(query: Tensor, key: Tensor, options: AttentionOptions, heads: Sequence[int]) -> Tensor:
    """The weights of some heads, in fp32 or wider, whatever the kernel: `[batch, heads, queries, keys]`. Those of a
    query add up to 1, or to less where the layer has sinks.

    Args:
        query: `[batch, queries, heads, head_dim]`, as a kernel is given it; so are `key` and `options`. Dropout is left
            out.
        key: `[batch, keys, kv_heads, head_dim]`.
        options: of the call.
        heads: numbers of query heads.
    """
    options = replace(options, dropout=None)
    wide = torch.promote_types(query.dtype, torch.float32)
    chosen = torch.tensor(heads, device=query.device)
    group = query.shape[2] // key.shape[2]
    own, shared = query[:, :, chosen].to(wide), key[:, :, chosen // group].to(wide)
    logits = torch.einsum("bqhd,bkhd->bhqk", own, shared) * options.factor(query)
    if options.soft_cap is not None:
        logits = options.soft_cap * torch.tanh(logits / options.soft_cap)
    queries, keys, offset = query.shape[1], key.shape[1], options.first_query(query, key)
    positions = torch.arange(offset, offset + queries, device=query.device)[:, None]
    columns = torch.arange(keys, device=query.device)
    hidden = (columns > positions)[None]
    if options.window is not None:
        hidden = hidden | (columns <= positions - options.window)[None]
    if (ends := options.prefix_ends) is not None:
        hidden = hidden & (columns >= ends[:, :, None])
    if (ids := options.document_ids) is not None:
        hidden = hidden | (ids[:, offset : offset + queries, None] != ids[:, None, :])
    logits = logits.masked_fill(hidden[:, None], -torch.inf)
    if options.sinks is None:
        return logits.softmax(-1)
    column = options.sinks[chosen].to(wide)[None, :, None, None].expand(len(query), -1, queries, 1)
    return torch.cat([logits, column], -1).softmax(-1)[..., :keys]
