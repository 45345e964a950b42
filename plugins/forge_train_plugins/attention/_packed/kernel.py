"""The kernels of `varlen` and `flash`: batches become packed documents, concatenated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forge_train.mesh.tensors import on_host
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.layers import AttentionOptions
from forge_train_kit.model import PerBatch, TiledAttention, document_bounds, is_imagined

from .functions import Bounds, PackedFunction

CAPABILITIES = KernelCapabilities(documents=True, offsets=True, windows=True)


class TiledKernel(TiledAttention):
    """Attention without a fused kernel; see `AttentionKernel`."""

    capabilities = CAPABILITIES


class PackedKernel:
    """Attention with a fused kernel; see `AttentionKernel`."""

    def __init__(self, function: PackedFunction) -> None:
        self._function = function
        self._bounds: PerBatch[Bounds] = PerBatch()
        # In a compiled graph each layer would make its own.
        self._shared_bounds: Callable[..., Bounds] = torch.compiler.disable(self._of_batch)  # type: ignore[no-untyped-call]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        options.check(CAPABILITIES, query, key)
        queries, offset = query.shape[1], options.first_query(query, key)
        kept = offset + queries
        bounds = self._shared_bounds(options.document_ids, len(query), queries, offset, query.device)
        out = self._function(
            query.flatten(0, 1),
            key[:, :kept].flatten(0, 1),
            value[:, :kept].flatten(0, 1),
            bounds,
            options.factor(query),
            options.window,
        )
        return torch.unflatten(out, 0, (-1, queries))

    def _of_batch(
        self, document_ids: Tensor | None, batch: int, queries: int, offset: int, device: torch.device
    ) -> Bounds:
        facts = (batch, queries, offset, device)
        return self._bounds(document_ids, facts, lambda: make_bounds(document_ids, *facts))


def make_bounds(document_ids: Tensor | None, batch: int, queries: int, offset: int, device: torch.device) -> Bounds:
    """Computed on the host where the ids came from there: on the device, their number and the longest must be read."""
    if document_ids is None or is_imagined(document_ids):
        rows = torch.arange(batch + 1, dtype=torch.int32, device=device)
        return Bounds(rows * queries, rows * (offset + queries), queries, offset + queries)
    both = torch.stack(document_bounds(on_host(document_ids), queries, offset=offset))
    most = both.diff().amax(1).tolist()
    both = both.int()
    if both.device != device:
        both = (both.pin_memory() if device.type == "cuda" else both).to(device, non_blocking=True)
    of_queries, of_keys = both.unbind()
    return Bounds(of_queries, of_keys, *most)
