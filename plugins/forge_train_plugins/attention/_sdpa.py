"""The kernel of the `sdpa` plugin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right

from forge_train import ConfigError
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.layers import AttentionOptions
from forge_train_kit.model import PerBatch

from ._sdpa_after import after_others

CAPABILITIES = KernelCapabilities(documents=True, offsets=True, windows=True, lengths=True, prefixes=True)
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}

PIECE = 256
"""Queries after other tokens that are computed together if a mask is needed; the mask is small, and they share it."""

RECENT = 64
"""Masks of rows with different numbers of keys that are kept: one for each window that a model has, and for each row
that is given several tokens."""

ROWS = 4096
"""Number of queries whose mask is made at once; several masks of this many queries exist at a time."""


def missing(backend: str, device: torch.device, precision: str, *, masked: bool) -> str:
    """A clause that says why a backend can't run; empty if no reason is known."""
    if backend in ("efficient", "cudnn") and device.type != "cuda":
        return f"it runs on CUDA only, and the run is on {device.type}; use 'auto', 'flash' or 'math'"
    if backend == "cudnn" and not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch has no cuDNN"
    if device.type == "cuda" and backend in ("flash", "cudnn") and precision == "fp32":
        return "on CUDA it computes in bf16 or fp16 only, and train.precision is 'fp32'"
    if device.type == "cuda" and backend == "flash" and masked:
        return (
            "on CUDA it takes no mask, but the run needs one for documents, windows or prefixes; use the kernel flex, "
            "or varlen without prefixes"
        )
    return ""


@dataclass(frozen=True)
class _Seen:
    """Conditions, besides the documents, on the keys that a query sees."""

    queries: int
    keys: int
    offset: int
    window: int | None
    dtype: torch.dtype
    device: torch.device


class Kernel:
    """Causal grouped-query attention; see `AttentionKernel`.

    Without a mask (no documents, window or prefix) torch uses its flash kernels, which never hold a sequence × sequence
    matrix. Where no other fused kernel takes fewer heads of keys and values than of queries (on CUDA: with a mask, in
    fp32, with wide heads), they are repeated: torch would silently hold the matrix (torch 2.11 to 2.13).

    One kernel serves all layers, so that they share a batch's mask: autograd keeps the mask of every call, and separate
    masks for each layer would outgrow all other activations.
    """

    def __init__(self, backend: str = "auto") -> None:
        self._backend = backend
        self._mask: PerBatch[Tensor] = PerBatch()
        self._ends: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        options.check(CAPABILITIES, query, key)
        document_ids, window, scale = options.document_ids, options.window, options.scale
        if options.lengths is not None:
            return self._compute(query, key, value, self._beyond(options.lengths, query, key), scale)
        queries, offset, ends = query.shape[1], options.first_query(query, key), options.prefix_ends
        keys = offset + queries if ends is None else key.shape[1]  # else no query sees later keys
        key, value = key[:, :keys], value[:, :keys]
        narrow = window is not None and window < offset + queries
        masked = document_ids is not None or narrow or ends is not None
        if offset and queries > 1 and not masked:
            return self._after(query, key, value, offset, scale)
        mask = None
        if masked:
            seen = _Seen(queries, keys, offset, window if narrow else None, query.dtype, query.device)
            mask = self._mask(document_ids, seen, lambda: make_mask(seen, document_ids, ends), prefix_ends=ends)
        return self._compute(query, key, value, mask, scale)

    def _after(self, query: Tensor, key: Tensor, value: Tensor, offset: int, scale: float | None) -> Tensor:
        """Queries that see all tokens before them, together with the keys of all these tokens."""
        same = query.shape[-1] == value.shape[-1]
        if query.device.type == "cpu" and self._backend in ("auto", "flash") and same:
            return after_others(query, key, value, offset, scale)
        queries, keys = query.shape[1], key.shape[1]
        with nullcontext() if self._backend == "auto" else sdpa_kernel(BACKENDS[self._backend]):
            if query.device.type == "cuda" and _flash(query, key, value):
                return self._compute(query, key, value, causal_lower_right(queries, keys), scale)
        key, value = self._repeated(query, key, value, masked=True)
        rows = min(PIECE, queries)
        seen = _Seen(rows, keys, keys - rows, None, query.dtype, query.device)
        mask = self._mask(None, seen, lambda: make_mask(seen, None))
        found, at = [], 0
        short = [queries % rows] if queries % rows else []  # the first, for the mask's alignment
        for size in (*short, *[rows] * (queries // rows)):
            until = offset + at + size
            part = query[:, at : at + size], key[:, :until], value[:, :until]
            found.append(self._compute(*part, mask[rows - size :, keys - until :], scale))
            at += size
        return torch.cat(found, 1)

    def _beyond(self, lengths: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The mask of rows with these numbers of keys; layers with one window share it."""
        found = self._ends.get(id(lengths))
        if found is None or found[0] is not lengths:
            if len(self._ends) == RECENT:
                self._ends.clear()
            hidden = torch.arange(key.shape[1], device=query.device) >= lengths[:, None]
            mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, -torch.inf)
            self._ends[id(lengths)] = found = lengths, mask[:, None, None]
        return found[1]

    def _compute(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """Call the backend; without a mask, the keys are those of the queries, or all that a single query sees."""
        key, value = self._repeated(query, key, value, masked=mask is not None and not isinstance(mask, CausalBias))
        free = self._backend == "cudnn" and query.shape[1] == 1  # cuDNN refuses it, and it needs no matrix anywhere
        with nullcontext() if self._backend == "auto" or free else only(self._backend, query, mask):
            out_BHTD = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                key.transpose(1, 2),
                value.transpose(1, 2),
                attn_mask=mask,
                is_causal=mask is None and query.shape[1] > 1,
                scale=scale,
                enable_gqa=query.shape[2] != key.shape[2],
            )
        return out_BHTD.transpose(1, 2)

    def _repeated(self, query: Tensor, key: Tensor, value: Tensor, *, masked: bool) -> tuple[Tensor, Tensor]:
        """Keys and values, repeated for the heads of their group if only then a fused kernel takes them."""
        group = query.shape[2] // key.shape[2]
        wide, half = max(query.shape[-1], value.shape[-1]) > 256, query.dtype in (torch.bfloat16, torch.float16)
        flash = half and not masked and not wide and query.shape[-1] == value.shape[-1]
        if group == 1 or not needs_equal_heads(self._backend, query.device, flash=flash):
            return key, value
        return key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)


def needs_equal_heads(backend: str, device: torch.device, *, flash: bool) -> bool:
    """Return True if no fused kernel takes fewer heads of keys and values than of queries.

    Args:
        backend: of the section.
        device: of the tensors.
        flash: whether torch's flash kernel takes the call.
    """
    return backend == "efficient" or (backend == "auto" and device.type == "cuda" and not flash)


def _flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if torch's flash kernel on CUDA supports these tensors."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    # `is_causal` is False, as in torch's own question for a lower right bias: True means the upper left.
    return can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, False, query.shape[2] != key.shape[2]))


@contextmanager
def only(backend: str, query: Tensor, mask: Tensor | None) -> Iterator[None]:
    """Have torch use this backend or fail.

    Raises:
        ConfigError: if it can't compute this call.
    """
    try:
        with sdpa_kernel(BACKENDS[backend]):
            yield
    except RuntimeError as error:
        if not str(error).startswith(("No available kernel", "No viable backend")):
            raise
        asked = [f"{query.dtype} on {query.device.type}, heads of {query.shape[-1]} features"]
        asked += ["a mask"] * (mask is not None)
        raise ConfigError(f"sdpa.backend = {backend!r}: torch can't compute {', '.join(asked)} with it.") from error


def make_mask(seen: _Seen, document_ids: Tensor | None, prefix_ends: Tensor | None = None) -> Tensor:
    """`[queries, keys]`, with documents or prefixes `[batch, 1, queries, keys]`: 0 where a query sees a key, else −∞.

    Torch would convert a boolean mask to numbers at every call, and keep the result.
    """
    rows = torch.arange(seen.offset, seen.offset + seen.queries, device=seen.device)[:, None]
    columns = torch.arange(seen.keys, device=seen.device)
    of_rows = document_ids if prefix_ends is None else prefix_ends
    batch = () if of_rows is None else (len(of_rows), 1)
    mask = torch.zeros(*batch, seen.queries, seen.keys, dtype=seen.dtype, device=seen.device)
    for some in (slice(start, start + ROWS) for start in range(0, seen.queries, ROWS)):
        hidden = columns > rows[some]
        if seen.window is not None:
            hidden = hidden | (columns <= rows[some] - seen.window)
        if prefix_ends is not None:
            hidden = hidden & (columns >= prefix_ends[:, None, some, None])
        if document_ids is not None:
            own = document_ids[:, seen.offset : seen.offset + seen.queries][:, None, some, None]
            hidden = hidden | (own != document_ids[:, None, None, : seen.keys])
        mask[..., some, :].masked_fill_(hidden, float("-inf"))
    return mask
