"""The kernel of the `eager` plugin."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_train.nn import PerBatch


class Kernel:
    """Causal grouped-query attention; see `forge_train.AttentionKernel`. Everything is computed in float32 at least."""

    def __init__(self) -> None:
        self._hidden: PerBatch[Tensor] = PerBatch()

    def __call__(  # noqa: PLR0913 — every keyword that there is
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        document_ids: Tensor | None = None,
        offset: int | None = None,
        window: int | None = None,
        dropout: float = 0.0,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        log_sum_exp: bool = False,
        scale: float | None = None,
    ) -> Any:
        given, group = query.dtype, query.shape[2] // key.shape[2]
        query, key, value = (one.to(torch.promote_types(given, torch.float32)) for one in (query, key, value))
        key, value = (one.repeat_interleave(group, dim=2) for one in (key, value))
        logits = torch.einsum("bqhd,bkhd->bhqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if soft_cap is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        queries, keys = query.shape[1], key.shape[1]
        facts = (queries, keys, keys - queries if offset is None else offset, window, query.device)
        logits = logits.masked_fill(self._hidden(document_ids, facts, lambda: hidden(document_ids, *facts)), -torch.inf)
        if sinks is not None:
            column = sinks.to(logits.dtype)[None, :, None, None].expand(len(query), -1, queries, 1)
            logits = torch.cat([logits, column], dim=-1)
        weights = F.dropout(logits.softmax(-1)[..., :keys], dropout)
        out = torch.einsum("bhqk,bkhd->bqhd", weights, value).to(given)
        return (out, logits.logsumexp(-1).float()) if log_sum_exp else out


def hidden(
    document_ids: Tensor | None, queries: int, keys: int, offset: int, window: int | None, device: torch.device
) -> Tensor:
    """Whether a query does not see a key, `[1 or batch, 1, queries, keys]`."""
    rows = torch.arange(offset, offset + queries, device=device)[:, None]
    columns = torch.arange(keys, device=device)
    unseen = ((columns > rows) | (columns <= rows - (window or keys + 1)))[None, None]
    if document_ids is None:
        return unseen
    own = document_ids[:, offset : offset + queries]
    return unseen | (own[:, None, :, None] != document_ids[:, None, None, :])
