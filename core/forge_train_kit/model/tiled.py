"""Exact attention in tiles, in plain torch operations: no queries × keys matrix is ever held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_train_kit.capabilities import KernelCapabilities

from ..layers import AttentionOptions
from .spans import PerBatch, check_neighbours, first_visible, is_imagined, last_visible

TILE = 64
"""Queries per tile: on a CPU faster than 128 and 256 for documents of 256 and 512 tokens (torch 2.13), and smaller."""


class Tile(NamedTuple):
    """Queries that are computed together, and the keys that any of them sees."""

    rows: slice
    start: int
    stop: int
    first: int
    last: int
    """Index after the last key."""


class Plan(NamedTuple):
    """The tiles of a batch, and the first and the last key that each query sees, `[rows or 1, queries]`."""

    first: Tensor
    last: Tensor
    tiles: tuple[Tile, ...]


class TiledAttention:
    """Causal grouped-query attention for devices without a fused kernel; see `AttentionKernel`.

    Time and memory grow with the number of visible keys, so documents and windows make it cheaper, whereas a dense mask
    would make it more expensive. The backward pass recomputes each tile's weights (Dao et al. 2022, arXiv:2205.14135,
    algorithm 4). All sums are in float32, or in float64 for such inputs.
    """

    capabilities: KernelCapabilities = KernelCapabilities(
        documents=True,
        offsets=True,
        windows=True,
        soft_caps=True,
        sinks=True,
        log_sum_exp=True,
        blocks=True,
        prefixes=True,
    )
    """Supported capabilities; fewer in a stand-in for a kernel that declares fewer."""

    def __init__(self) -> None:
        self._plan: PerBatch[Plan] = PerBatch()
        # A compiled graph would unroll the tiles of one batch.
        self._tiles: Callable[..., tuple[Tensor, Tensor]] = torch.compiler.disable(self._attend)  # type: ignore[no-untyped-call]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Any:
        """See the protocol; documents must be runs of neighbouring tokens.

        Raises:
            ValueError: if a document reappears after another one.
        """
        options.check(self.capabilities, query, key)
        out, lse = self._tiles(query, key, value, options)
        return (out, lse.flatten(1, 2).float()) if options.log_sum_exp else out

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
        plan = _planned(self._plan, query, key, options)
        more = options.sinks, plan, options.factor(query), options.soft_cap
        found: tuple[Tensor, Tensor] = _Tiles.apply(query, key, value, *more)  # type: ignore[no-untyped-call]
        return found


def _planned(plan: PerBatch[Plan], query: Tensor, key: Tensor, options: AttentionOptions) -> Plan:
    facts = (query.shape[1], key.shape[1], options.first_query(query, key), options.window, query.device)
    ids, of_queries, ends = options.document_ids, options.query_document_ids, options.prefix_ends
    return plan(ids, facts, lambda: make_plan(ids, *facts, of_queries, ends), of_queries, ends)


def make_plan(
    document_ids: Tensor | None,
    queries: int,
    keys: int,
    offset: int,
    window: int | None,
    device: torch.device,
    query_document_ids: Tensor | None = None,
    prefix_ends: Tensor | None = None,
) -> Plan:
    """Tiles for all rows, or for each row if there are documents or prefixes; reads their bounds from the device."""
    first = first_visible(
        document_ids,
        queries,
        keys,
        offset=offset,
        window=window,
        device=device,
        query_document_ids=query_document_ids,
        prefix_ends=prefix_ends,
    )
    last = last_visible(torch.arange(offset, offset + queries, device=first.device), prefix_ends, document_ids)
    starts = range(0, queries, TILE)
    known = document_ids if prefix_ends is None else prefix_ends
    if known is None:
        rows = [slice(None)]
        lows = [[0 if window is None else max(offset + start - window + 1, 0) for start in starts]]
        highs = [[offset + min(start + TILE, queries) - 1 for start in starts]]
    elif is_imagined(known):  # a tile of the longest span stands for all of them
        stop = min(TILE, queries)
        return Plan(first, last, (Tile(slice(0, 1), queries - stop, queries, 0, min(offset + queries, keys)),))
    else:
        if document_ids is not None:
            check_neighbours(document_ids)
        rows = [slice(row, row + 1) for row in range(len(known))]
        first, last = (one.expand(len(known), -1) for one in (first, last))
        of_tiles = [(first[:, start : start + TILE].amin(1), last[:, start : start + TILE].amax(1)) for start in starts]
        lows, highs = torch.stack([torch.stack(ends, 1) for ends in zip(*of_tiles, strict=True)]).tolist()
    tiles = tuple(
        Tile(row, start, min(start + TILE, queries), min(low, after := min(high + 1, keys)), after)
        for row, *of_row in zip(rows, lows, highs, strict=True)
        for start, low, high in zip(starts, *of_row, strict=True)
    )
    return Plan(first, last, tiles)


class LargestLogit:
    """The largest magnitude among attention's logits, before a soft cap, over the keys that queries see; in tiles."""

    def __init__(self) -> None:
        self._plan: PerBatch[Plan] = PerBatch()

    @torch.no_grad()
    def __call__(self, query: Tensor, key: Tensor, options: AttentionOptions) -> Tensor:
        """The largest magnitude, 0-dim; waits for the device. For the arguments, see `AttentionKernel`."""
        plan, scale = _planned(self._plan, query, key, options), options.factor(query)
        keys_BKSD = key.transpose(1, 2).to(torch.promote_types(query.dtype, torch.float32))
        found = []
        for tile in plan.tiles:
            logits, _ = _logits(query, keys_BKSD, tile, plan, scale, None)
            found += [logits.amax(), -logits.masked_fill_(logits == -torch.inf, torch.inf).amin()]
        return torch.stack(found).amax()


class _Tiles(torch.autograd.Function):
    """Output `[batch, queries, heads, head_dim]` and log-sum-exp `[batch, kv_heads, group, queries]`."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, plan: Plan, scale: float, cap: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.plan, ctx.scale, ctx.cap = plan, scale, cap
        batch, queries, heads, _ = query.shape
        kv_heads = key.shape[2]
        wide = torch.promote_types(query.dtype, torch.float32)
        out = torch.empty_like(query)
        lse = query.new_empty(batch, kv_heads, heads // kv_heads, queries, dtype=wide)
        keys_BKSD, values_BKSD = (one.transpose(1, 2).to(wide) for one in (key, value))
        grouped_sinks = None if sinks is None else sinks.to(wide).view(kv_heads, -1, 1)
        for tile in plan.tiles:
            rows, start, stop, first, last = tile
            logits, _ = _logits(query, keys_BKSD, tile, plan, scale, cap)
            total = logits.logsumexp(-1)
            if grouped_sinks is not None:
                total = torch.logaddexp(total, grouped_sinks.expand_as(total))
            lse[rows, :, :, start:stop] = total
            weights = logits.sub_(_finite(total)[..., None]).exp_().flatten(2, 3)
            mixed = weights @ values_BKSD[rows, :, first:last]
            out[rows, start:stop] = _apart(mixed, stop - start).to(out.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        plan, wide = ctx.plan, lse.dtype
        kv_heads = key.shape[2]
        keys_BKSD, values_BKSD = (one.transpose(1, 2).to(wide) for one in (key, value))
        query_grad = torch.empty_like(query)
        key_grad, value_grad = (torch.zeros_like(one) for one in (keys_BKSD, values_BKSD))
        sink_grad = None if sinks is None else torch.zeros_like(sinks, dtype=wide)
        for tile in plan.tiles:
            rows, start, stop, first, last = tile
            logits, slope = _logits(query, keys_BKSD, tile, plan, ctx.scale, ctx.cap)
            sums = lse[rows, :, :, start:stop]
            weights = logits.sub_(_finite(sums)[..., None]).exp_()
            mixed, mixed_grad = (_together(one[rows, start:stop].to(wide), kv_heads) for one in (out, out_grad))
            # What each query's gradients of logits are shifted by: Σ weights · their gradients.
            shift = (mixed * mixed_grad).sum(-1).view_as(sums) - lse_grad[rows, :, :, start:stop]
            value_grad[rows, :, first:last] += weights.flatten(2, 3).mT @ mixed_grad
            grad = (mixed_grad @ values_BKSD[rows, :, first:last].mT).view_as(weights)
            grad = grad.sub_(shift[..., None]).mul_(weights)
            grad = (grad if slope is None else grad.mul_(slope)).mul_(ctx.scale).flatten(2, 3)
            if sink_grad is not None:
                of_sinks = (sinks.to(wide).view(kv_heads, -1, 1) - sums).exp_()
                sink_grad -= (of_sinks * shift).sum((0, 3)).flatten()
            key_grad[rows, :, first:last] += grad.mT @ _together(query[rows, start:stop].to(wide), kv_heads)
            query_grad[rows, start:stop] = _apart(grad @ keys_BKSD[rows, :, first:last], stop - start).to(query.dtype)
        key_grad, value_grad = (
            grad.transpose(1, 2).to(like.dtype) for grad, like in ((key_grad, key), (value_grad, value))
        )
        sink_grad = None if sink_grad is None else sink_grad.to(sinks.dtype)
        return query_grad, key_grad, value_grad, sink_grad, None, None, None


def _logits(
    query: Tensor, keys_BKSD: Tensor, tile: Tile, plan: Plan, scale: float, cap: float | None
) -> tuple[Tensor, Tensor | None]:
    """`[rows, kv_heads, group, queries, keys]`, −∞ where a query sees no key; and the slope of the soft cap."""
    rows, start, stop, first, last = tile
    keys = keys_BKSD[rows, :, first:last]
    scaled = _together(query[rows, start:stop].to(keys.dtype), keys.shape[1]) * scale
    # The product is not changed in place, because selective checkpointing may keep it.
    logits = torch.unflatten(scaled @ keys.mT, 2, (-1, stop - start))
    slope = None
    if cap is not None:
        bent = (logits / cap).tanh_()
        slope, logits = 1 - bent.square(), bent * cap
    columns = torch.arange(first, last, device=query.device)
    seen_from, seen_to = plan.first[rows, start:stop, None], plan.last[rows, start:stop, None]
    return logits.masked_fill(((columns > seen_to) | (columns < seen_from))[:, None, None], -torch.inf), slope


def _finite(sums: Tensor) -> Tensor:
    """A value to subtract from logits: those of a query that sees no key are −∞ already."""
    return sums.masked_fill(sums == -torch.inf, 0)


def _together(x_BTHD: Tensor, kv_heads: int) -> Tensor:
    """`[batch, queries, heads, features]` → `[batch, kv_heads, group × queries, features]`."""
    return torch.unflatten(x_BTHD, 2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _apart(x_BKND: Tensor, queries: int) -> Tensor:
    """The reverse of `_together`."""
    return torch.unflatten(x_BKND, 2, (-1, queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)
