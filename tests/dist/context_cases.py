"""What ranks do for test_context_kernel.py: attention on slices, against attention on whole sequences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Layout
from forge_train_kit.layers import AttentionOptions
from forge_train_kit.model import TiledAttention
from forge_train_plugins.attention._eager import Kernel as Eager
from forge_train_plugins.parallel._cp.apply import ranks_of
from forge_train_plugins.parallel._cp.cut import cut_of, document_starts
from forge_train_plugins.parallel._cp.kernel import ContextKernel

BATCH, HEADS, KV_HEADS, FEATURES = 2, 4, 2, 8
MORE: dict[str, dict[str, Any]] = {
    "plain": {},
    "a window": {"window": 7},
    "a soft cap": {"soft_cap": 2.0},
    "sinks": {"sinks": None},
    "the log-sum-exp": {"log_sum_exp": True},
}


def packed(*lengths: int) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def attend(method: str) -> dict[str, float]:
    """The largest error of output and gradients for each of `MORE`, with documents and without."""
    world = torch.distributed.get_world_size()
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        with DistributedContext.join(Layout(cp=world), "cpu") as context:
            by_heads = {"ulysses": world, "ulysses_ring": 2}.get(method, 1)
            ranks = ranks_of(SimpleNamespace(dist=context), by_heads)  # type: ignore[arg-type]
            kernel = ContextKernel(TiledAttention(), ranks, "ring" if "ring" in method else "gather")
            return {
                f"{name}{', documents' * documents}": error(kernel, context.rank, world, asked, documents)
                for name, asked in MORE.items()
                for documents in (False, True)
            }
    finally:
        torch.use_deterministic_algorithms(False)


def error(kernel: ContextKernel, rank: int, world: int, asked: dict[str, Any], documents: bool) -> float:
    length = 128 * world  # long enough for four chunks a rank
    torch.manual_seed(0)
    wholes = [torch.randn(BATCH, length, heads, FEATURES) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    sinks = [torch.randn(HEADS)] if "sinks" in asked else []
    rest = length - 4
    ids = torch.stack([packed(3, rest // 3, 1, rest - rest // 3), packed(rest - rest // 8, 1, 3, rest // 8)])
    starts = document_starts(ids) if documents else None
    at = torch.cat([torch.arange(*span) for span in cut_of(starts, length, world).spans[rank]])

    whole = results(Eager(), [*wholes, *sinks], asked, {"document_ids": ids} if documents else {}, None)
    part = {} if starts is None else {"document_ids": starts[:, at].contiguous()}
    own = results(kernel, [*(one[:, at] for one in wholes), *sinks], asked, part, at)
    if sinks:
        torch.distributed.all_reduce(own[-1])
    worst = 0.0
    for mine, wanted in zip(own, whole, strict=True):
        if wanted.dim() == 4:
            wanted = wanted[:, at]
        elif wanted.dim() == 3:
            wanted = wanted[:, :, at]
        worst = max(worst, float((mine - wanted).abs().nan_to_num(torch.inf).max()))
    return worst


def results(kernel: Any, given: list[Tensor], asked: dict[str, Any], ids: dict[str, Tensor], at: Any) -> list[Tensor]:
    """What it gives, and gradients of what it is given; of outputs at some positions."""
    given = [one.clone().requires_grad_() for one in given]
    keywords = {**asked, **ids, **({"sinks": given[3]} if "sinks" in asked else {})}
    found = kernel(*given[:3], AttentionOptions(**keywords))
    outs = found if isinstance(found, tuple) else (found,)
    generator = torch.Generator().manual_seed(1)
    length = 128 * torch.distributed.get_world_size()
    weights = [torch.randn(BATCH, length, HEADS, FEATURES, generator=generator)]
    weights.append(torch.randn(BATCH, HEADS, length, generator=generator))
    if at is not None:
        weights = [weights[0][:, at], weights[1][:, :, at]]
    total = torch.stack([(one * weight).sum() for one, weight in zip(outs, weights, strict=False)]).sum()
    return [*outs, *torch.autograd.grad(total, given)]
