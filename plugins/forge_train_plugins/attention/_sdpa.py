"""The kernel of the `sdpa` plugin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from forge_train import ConfigError
from forge_train.nn import PerBatch

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}

PIECE = 256
"""Queries after other tokens that are computed together: torch computes a mask's hidden half too, of fewer in vain."""


def missing(backend: str, device: torch.device, precision: str, *, masked: bool) -> str:
    """Why a backend can't run, in a clause; empty if nothing is known to stand against it."""
    if backend in ("efficient", "cudnn") and device.type != "cuda":
        return f"it runs on CUDA only, and the run is on {device.type}; take 'auto', 'flash' or 'math'"
    if backend == "cudnn" and not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch has no cuDNN"
    if device.type == "cuda" and backend in ("flash", "cudnn") and precision == "fp32":
        return "on CUDA it computes in bf16 or fp16 only, and train.precision is 'fp32'"
    if device.type == "cuda" and backend == "flash" and masked:
        return (
            "on CUDA it takes no mask, and the run needs one for documents or windows; take the kernel varlen or flex"
        )
    return ""


@dataclass(frozen=True)
class _Seen:
    """What decides which keys a query sees, beside the documents."""

    queries: int
    keys: int
    offset: int
    window: int | None
    dtype: torch.dtype
    device: torch.device


class Kernel:
    """Causal grouped-query attention; see `forge_train.AttentionKernel`.

    Without a mask (no documents, window or offset, and either as many queries as keys or a single one) torch takes its
    flash kernels, which never hold a sequence × sequence matrix. Keys and values are not repeated for their group of
    heads.

    One kernel serves all layers, so that they share a batch's mask: autograd keeps the mask of every call, and a mask
    for each layer would outgrow all other activations.
    """

    def __init__(self, backend: str = "auto") -> None:
        self._backend = backend
        self._mask: PerBatch[Tensor] = PerBatch()

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        document_ids: Tensor | None = None,
        offset: int | None = None,
        window: int | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        queries, keys = query.shape[1], key.shape[1]
        offset = keys - queries if offset is None else offset
        keys = offset + queries  # nobody sees what comes later
        key, value = key[:, :keys], value[:, :keys]
        narrow = window is not None and window < offset + queries
        if offset and queries > PIECE and document_ids is None and not narrow:
            asked: Any = {"dropout": dropout, "scale": scale}
            pieces = enumerate(query.split(PIECE, 1))  # type: ignore[no-untyped-call]
            return torch.cat([self(one, key, value, offset=offset + at * PIECE, **asked) for at, one in pieces], 1)
        mask = None
        if document_ids is not None or narrow or (offset, queries) not in ((0, keys), (keys - 1, 1)):
            seen = _Seen(queries, keys, offset, window if narrow else None, query.dtype, query.device)
            mask = self._mask(document_ids, seen, lambda: make_mask(seen, document_ids))
        with nullcontext() if self._backend == "auto" else only(self._backend, query, mask, dropout):
            out_BHTD = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                key.transpose(1, 2),
                value.transpose(1, 2),
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None and queries > 1,
                scale=scale,
                enable_gqa=query.shape[2] != key.shape[2],
            )
        return out_BHTD.transpose(1, 2)


@contextmanager
def only(backend: str, query: Tensor, mask: Tensor | None, dropout: float) -> Iterator[None]:
    """Have torch take this backend, or none.

    Raises:
        ConfigError: if it can't compute what is asked.
    """
    try:
        with sdpa_kernel(BACKENDS[backend]):
            yield
    except RuntimeError as error:
        if not str(error).startswith(("No available kernel", "No viable backend")):
            raise
        asked = [f"{query.dtype} on {query.device.type}, heads of {query.shape[-1]} features"]
        asked += ["a mask"] * (mask is not None) + ["dropout"] * (dropout > 0)
        raise ConfigError(f"sdpa.backend = {backend!r}: torch can't compute {', '.join(asked)} with it.") from error


def make_mask(seen: _Seen, document_ids: Tensor | None) -> Tensor:
    """`[queries, keys]`, with document ids `[batch, 1, queries, keys]`: 0 where a query sees a key, else −∞.

    Torch would turn a mask of booleans into one of numbers at every call, and keep that.
    """
    rows = torch.arange(seen.offset, seen.offset + seen.queries, device=seen.device)[:, None]
    columns = torch.arange(seen.keys, device=seen.device)
    visible = columns <= rows
    if seen.window is not None:
        visible = visible & (columns > rows - seen.window)
    if document_ids is not None:
        own = document_ids[:, seen.offset : seen.keys]
        visible = visible & (own[:, None, :, None] == document_ids[:, None, None, : seen.keys])
    return torch.zeros(visible.shape, dtype=seen.dtype, device=seen.device).masked_fill_(~visible, float("-inf"))
