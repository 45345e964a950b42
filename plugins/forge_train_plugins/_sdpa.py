"""The kernel of the `sdpa` plugin."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Kernel:
    """Causal grouped-query attention; see `forge_train.AttentionKernel`.

    Without a mask (`documents` None, and either as many queries as keys or a single one) torch takes its flash
    kernels, which never hold a sequence × sequence matrix. Keys and values are not repeated for their group of heads.

    One kernel serves all layers, so that they share a batch's document mask: autograd keeps the mask of every call,
    and a mask for each layer would outgrow all other activations.
    """

    def __init__(self) -> None:
        self._made: tuple[tuple[Tensor, int, torch.dtype], Tensor] | None = None
        """The last document mask, and what it was made for."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        documents: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        queries, keys = query.shape[1], key.shape[1]
        mask = None
        if documents is not None:
            mask = self._document_mask(documents, query.dtype)
        elif 1 < queries < keys:
            mask = causal_mask(queries, keys, query.device)
        out_BHTD = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None and queries > 1,
            scale=scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out_BHTD.transpose(1, 2)

    def _document_mask(self, documents: Tensor, dtype: torch.dtype) -> Tensor:
        if torch.compiler.is_compiling() or documents.is_inference():
            return document_mask(documents, dtype)
        wanted = (documents, documents._version, dtype)
        if self._made is None or not _same(self._made[0], wanted):
            self._made = wanted, document_mask(documents, dtype)
        return self._made[1]


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Whether a query sees a key, `[queries, keys]` bool; the last query sees every key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def document_mask(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """Causal and within a document: `[batch, sequence]` → `[batch, 1, sequence, sequence]`, 0 where seen, else −∞.

    Torch would turn a mask of booleans into one of numbers at every call, and keep that.
    """
    sequence = documents.shape[1]
    seen = documents[:, None, :, None] == documents[:, None, None, :]
    seen = seen & causal_mask(sequence, sequence, documents.device)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def _same(one: tuple[Tensor, int, torch.dtype], other: tuple[Tensor, int, torch.dtype]) -> bool:
    return one[0] is other[0] and one[1:] == other[1:]
