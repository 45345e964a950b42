"""The plugins of `outside.py` that make up a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forge_train import Init, Job, attach_loss, hookimpl
from forge_train_kit import hookspecs
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.enabled_modalities import enabled_modalities
from forge_train_kit.heads import HeadSpec, Trunk
from forge_train_kit.layers import AttentionOptions, Layer
from forge_train_kit.modalities import FusionSpec
from forge_train_kit.model import Embedding, Linear, RMSNorm
from forge_train_plugins.experts.hookspecs import token_dispatch
from outside import VOCABULARY, Outside


class OutsideModel(Outside):
    """Embeds, mixes each layer's attention and feed-forward block in, and normalises."""

    @hookimpl
    def build_model(self, job: Job) -> nn.Module:
        layer = Layer(index=0, num_layers=1, dim=16, heads=2, kv_heads=2, head_dim=8, ffn_dim=24)
        vocabulary = hookspecs.tokenizer(job).vocabulary if job.hooks.provider("tokenizer") else VOCABULARY
        head = hookspecs.head(HeadSpec(16, vocabulary), job)
        mixers = hookspecs.attention(layer, job), hookspecs.feed_forward(layer, job)
        made = OutsideDecoder(vocabulary, head, *mixers, self)

        def again() -> nn.Module:
            other = Embedding(vocabulary, 16)
            other.weight = made.embedding.weight
            return other

        def more(index: int, count: int) -> nn.Module:
            return Linear(16, 16)

        trunk = Trunk(16, 1, partial(RMSNorm, 16), again, more)
        made.tail = hookspecs.tail(trunk, job) if job.hooks.provider("tail") else None
        if enabled_modalities(job):
            spec = FusionSpec(16, 1, {"outside": nn.Identity()}, layer)  # type: ignore[dict-item]
            made.fusion = hookspecs.fusion(spec, job)
        return made


class OutsideDecoder(nn.Module):
    units = ("attention", "feed_forward")
    stages = (("embedding", "attention", "feed_forward", "head"),)
    roles: Mapping[str, str] = {"embedding.weight": "embedding", "head.weight": "head"}

    def __init__(self, vocabulary: int, head: Any, attention: Any, feed_forward: Any, owner: OutsideModel) -> None:
        super().__init__()
        self.embedding, self.head = Embedding(vocabulary, 16), head
        self.attention, self.feed_forward = attention, feed_forward
        self.tail: Any = None
        self.fusion: Any = None
        self.note = owner.use

    def forward(self, x: Tensor, *, position_ids: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
        self.note()
        x = self.embedding(x)
        x = x if self.fusion is None else self.fusion.enter(x)
        x = x + self.attention(x, position_ids=position_ids, document_ids=document_ids)
        x = x + self.feed_forward(x)
        return self.tail(x, position_ids, document_ids) if self.training and self.tail is not None else x


class OutsideHead(Outside):
    """A linear layer."""

    @hookimpl
    def head(self, spec: HeadSpec, job: Job) -> Any:
        head = Linear(spec.dim, spec.vocabulary, std=spec.std)
        head.register_forward_hook(lambda *_: self.use())
        return head


class OutsideFusion(Outside):
    """A modality of which there never is an item, and a vector that is added to all tokens instead."""

    name, placeholder, features = "outside", "<outside>", 1

    @hookimpl
    def modalities(self, job: Job) -> Any:
        return [self]

    @hookimpl
    def fusion(self, spec: FusionSpec, job: Job) -> Any:
        return OutsideJoined(spec.dim, self)

    def public(self) -> Mapping[str, Any]:
        return {}

    def measure(self, source: Any) -> Any:
        raise AssertionError(source)

    read = positions = measure

    def encoder(self, dim: int) -> Any:
        return nn.Identity()


class OutsideJoined(nn.Module):
    def __init__(self, dim: int, owner: Outside) -> None:
        super().__init__()
        self.enter, self.layers = OutsideAdded(dim, owner), nn.ModuleDict()

    def tensor_plan(self) -> dict[str, Any]:
        return {"enter": "sequence"}

    def flops_per_token(self, sequence: int) -> int:
        return 0


class OutsideAdded(nn.Module):
    def __init__(self, dim: int, owner: Outside) -> None:
        super().__init__()
        self.weight, self.note = nn.Parameter(torch.empty(dim)), owner.use

    def initial(self, name: str) -> Init:
        return Init("zeros")

    def forward(self, hidden: Tensor, **extras: Tensor) -> Tensor:
        self.note()
        return hidden + self.weight


class OutsideTail(Outside):
    """Has the model's hidden states, normed, stay near the embedding of the token that they come from."""

    @hookimpl
    def tail(self, trunk: Trunk, job: Job) -> Any:
        return OutsideNear(trunk, self)


class OutsideNear(nn.Module):
    units = ()

    def __init__(self, trunk: Trunk, owner: Outside) -> None:
        super().__init__()
        self.norm, self.embedding, self.note = trunk.norm(), trunk.embedding(), owner.use

    def forward(self, hidden: Tensor, position_ids: Tensor | None, document_ids: Tensor | None) -> Tensor:
        self.note()
        first = self.embedding(torch.zeros(1, dtype=torch.int64))
        return attach_loss(hidden, 1e-3 * (self.norm(hidden) - first).square().sum())

    def tensor_plan(self) -> dict[str, Any]:
        return {"norm": "sequence", "embedding": "vocabulary"}

    def flops_per_token(self, sequence: int) -> int:
        return 0


class OutsideAttention(Outside):
    """One linear layer before the kernel, one after it."""

    @hookimpl
    def attention(self, layer: Layer, job: Job) -> Any:
        return OutsideMixer(layer, hookspecs.attention_kernel(job), self)


class OutsideMixer(nn.Module):
    def __init__(self, layer: Layer, kernel: Any, owner: Outside) -> None:
        super().__init__()
        self.shape = (layer.heads, layer.head_dim)
        self.into, self.out = (Linear(layer.dim, layer.heads * layer.head_dim), Linear(layer.dim, layer.dim))
        self.kernel, self.note = kernel, owner.use

    def forward(
        self, x: Tensor, *, position_ids: Tensor | None = None, document_ids: Tensor | None = None, cache: Any = None
    ) -> Tensor:
        self.note()
        heads = self.into(x).unflatten(-1, self.shape)
        out: Tensor = self.out(self.kernel(heads, heads, heads, AttentionOptions(document_ids=document_ids)).flatten(2))
        return out


class OutsideKernel(Outside):
    """The plain formula of attention."""

    kernel_capabilities = KernelCapabilities(documents=True, offsets=True)

    @hookimpl
    def attention_kernel(self, job: Job) -> Any:
        def attend(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
            options.check(self.kernel_capabilities, query, key)
            self.use()
            groups, queries, first = query.shape[2] // key.shape[2], query.shape[1], options.first_query(query, key)
            key, value = key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2)
            logits = torch.einsum("bqhd,bkhd->bhqk", query, key) * options.factor(query)
            seen = torch.ones(logits.shape[-2:], dtype=torch.bool).tril(first)
            if (ids := options.document_ids) is not None:
                own = ids[:, first : first + queries]
                seen = seen & (own[:, None, :, None] == ids[:, None, None, :])
            return torch.einsum("bhqk,bkhd->bqhd", logits.masked_fill(~seen, -torch.inf).softmax(-1), value)

        return attend


class OutsideFeedForward(Outside):
    """A small set of experts; each token goes to two of them, by the transport that fills its slot, if one does."""

    @hookimpl
    def feed_forward(self, layer: Layer, job: Job) -> Any:
        transport = token_dispatch(job) if job.hooks.provider("token_dispatch") else None
        return OutsideExperts(layer, transport, self)


class OutsideExperts(nn.Module):
    def __init__(self, layer: Layer, transport: Any, owner: Outside) -> None:
        super().__init__()
        self.router = Linear(layer.dim, 4)
        self.experts = nn.Parameter(torch.empty(4, layer.dim, layer.dim))
        self.transport, self.note = transport, owner.use

    def initial(self, name: str) -> Init:
        return Init("normal", 0.02)

    def forward(self, x: Tensor) -> Tensor:
        self.note()
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        if self.transport is None:
            every = torch.einsum("td,edf->tef", flat, self.experts)
            picked = every.gather(1, chosen[..., None].expand(-1, -1, every.shape[-1]))
            return (weights[..., None] * picked).sum(1).view_as(x)
        rows, sizes, handle = self.transport.dispatch(flat, chosen, 4)
        parts = [part @ expert for part, expert in zip(rows.split(sizes.tolist()), self.experts, strict=True)]
        combined: Tensor = self.transport.combine(torch.cat(parts), weights, handle)
        return combined.view_as(x)


class OutsideDispatch(Outside):
    """Sorts tokens by expert, in this process."""

    @hookimpl
    def token_dispatch(self, job: Job) -> Any:
        return OutsideTransport(self)


class OutsideTransport:
    def __init__(self, owner: Outside) -> None:
        self.owner = owner

    def dispatch(
        self, x: Tensor, experts: Tensor, count: int, *, meanwhile: Callable[[], None] | None = None
    ) -> tuple[Tensor, Tensor, Any]:
        self.owner.use()
        order = experts.flatten().argsort(stable=True)
        return x[order // experts.shape[1]], experts.flatten().bincount(minlength=count), order

    def combine(self, rows: Tensor, weights: Tensor, handle: Any) -> Tensor:
        back = torch.empty_like(rows).index_copy(0, handle, rows)
        return (back.view(*weights.shape, -1) * weights[..., None]).sum(1)
