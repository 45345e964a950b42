"""Attention kernels of a third party that can do more or less, an attention that asks for more (`kernels:Plain`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from forge_train import Job, Plugin, hookimpl
from forge_train_kit import hookspecs
from forge_train_kit.capabilities import KernelCapabilities, capabilities_of
from forge_train_kit.layers import AttentionOptions, Layer
from forge_train_kit.model import Linear
from forge_train_plugins.attention._auto import measure as measuring
from forge_train_plugins.attention.auto import Auto
from forge_train_plugins.attention.flex import Flex
from forge_train_plugins.attention.packed import Varlen


def attend(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Any:
    """Everything that can be asked for, with a loop over heads."""
    group, queries, keys = query.shape[2] // key.shape[2], query.shape[1], key.shape[1]
    first, soft_cap, sinks = options.first_query(query, key), options.soft_cap, options.sinks
    distance = (torch.arange(queries) + first)[:, None] - torch.arange(keys)
    hidden = ((distance < 0) | (distance >= (options.window or keys + first + queries)))[None].expand(
        len(query), -1, -1
    )
    if (ids := options.document_ids) is not None:
        own = ids[:, first : first + queries] if options.query_document_ids is None else options.query_document_ids
        hidden = hidden | (own[:, :, None] != ids[:, None])
    outs, sums = [], []
    for head in range(query.shape[2]):
        logits = query[:, :, head] @ key[:, :, head // group].mT * options.factor(query)
        logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
        logits = logits.masked_fill(hidden, -torch.inf)
        total = logits.logsumexp(-1, keepdim=True)
        total = total if sinks is None else torch.logaddexp(total, sinks[head].expand_as(total))
        safe = total.masked_fill(total == -torch.inf, 0)
        weights = (logits - safe).exp()
        if (dropout := options.dropout) is not None:
            weights = dropout._replace(heads=dropout.heads[head : head + 1])(weights[:, None], first)[:, 0]
        outs.append(weights @ value[:, :, head // group])
        sums.append(total.squeeze(-1))
    out = torch.stack(outs, dim=2)
    return (out, torch.stack(sums, dim=1).float()) if options.log_sum_exp else out


class Plain(Plugin):
    """Causal attention over one whole sequence, and nothing beyond that."""

    api = (1, 0)
    facts = {"check.example": ("text.isolate=false",)}

    @hookimpl
    def attention_kernel(self, job: Job) -> Any:
        def plain(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Any:
            options.check(capabilities_of(type(self)), query, key)
            return attend(query, key, value, options)

        return plain


class Everything(Plugin):
    """Whatever can be asked of a kernel."""

    api = (1, 0)
    kernel_capabilities = KernelCapabilities(
        documents=True,
        offsets=True,
        windows=True,
        dropout=True,
        soft_caps=True,
        sinks=True,
        log_sum_exp=True,
        blocks=True,
    )

    @hookimpl
    def attention_kernel(self, job: Job) -> Any:
        return attend


class Boasting(Plugin):
    """Says that it knows windows, and sees beyond them."""

    api = (1, 0)
    kernel_capabilities = KernelCapabilities(documents=True, windows=True)

    @hookimpl
    def attention_kernel(self, job: Job) -> Any:
        def attend_to_all(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Any:
            return attend(query, key, value, replace(options, window=None))

        return attend_to_all


class Wide(Plugin):
    """Knows heads of 16 and 64 features, on every device."""

    api = (1, 0)
    kernel_capabilities = KernelCapabilities(documents=True, head_dims=(16, 64))

    @hookimpl
    def attention_kernel(self, job: Job) -> Any:
        return attend


class Elsewhere(Plugin):
    """Runs on another kind of device."""

    api = (1, 0)
    devices = ("cuda",)
    kernel_capabilities = KernelCapabilities(documents=True)

    @hookimpl
    def attention_kernel(self, job: Job) -> Any:
        return attend


class Leaking(Varlen):
    """Keeps documents apart on one process, and on several forgets to."""

    @hookimpl
    def attention_kernel(self, job: Job) -> Any:
        kernel = super().attention_kernel(job)
        if job.dist.world == 1:
            return kernel
        return lambda query, key, value, options: kernel(query, key, value, replace(options, document_ids=None))


class Grouping(Flex):
    """On several processes, has heads share keys in the wrong order."""

    @hookimpl
    def attention_kernel(self, job: Job) -> Any:
        kernel = super().attention_kernel(job)
        if job.dist.world == 1:
            return kernel
        return lambda query, key, value, options: kernel(query, key.flip(2), value.flip(2), options)


class Opinions(Auto):
    """Each rank would find another kernel the fastest; rank 0 alone may measure."""

    @hookimpl
    def on_start(self, job: Job) -> None:
        def measure(kernel: Any, shape: Any, best: float) -> float:
            assert job.dist.rank == 0
            return float(type(kernel).__module__.endswith("_sdpa")) + 1

        with patch.object(measuring, "measure", measure):
            super().on_start(job)
        job.dist.agree({"kernel": self.state_dict()["kernel"]})
        assert self.state_dict()["kernel"] == "varlen"


class Local(Plugin):
    """Attention that asks for a window."""

    api = (1, 0)

    @hookimpl
    def kernel_needs(self) -> KernelCapabilities:
        return KernelCapabilities(windows=True)

    @hookimpl
    def attention(self, layer: Layer, job: Job) -> Any:
        return LocalMixer(layer, hookspecs.attention_kernel(job))


class LocalMixer(nn.Module):
    def __init__(self, layer: Layer, kernel: Any) -> None:
        super().__init__()
        self.shape, self.kernel = (3, layer.heads, layer.head_dim), kernel
        self.into = Linear(layer.dim, 3 * layer.heads * layer.head_dim, std=0.2)
        self.out = Linear(layer.heads * layer.head_dim, layer.dim, std=0.2)

    def forward(
        self, x: Tensor, *, position_ids: Any = None, document_ids: Tensor | None = None, cache: Any = None
    ) -> Tensor:
        query, key, value = self.into(x).unflatten(-1, self.shape).unbind(2)
        options = AttentionOptions(document_ids=document_ids, window=5)
        out: Tensor = self.out(self.kernel(query, key, value, options).flatten(2))
        return out
