"""From the configuration to the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_train import ConfigError, Head, HeadSpec, Layer
from forge_train.nn import (
    Dropout,
    Embedding,
    LayerNorm,
    LinearScaling,
    Llama3Scaling,
    RMSNorm,
    RoPE,
    Scaling,
    YarnScaling,
    depth_scaled,
)

from . import rules
from .model import Block, Transformer

if TYPE_CHECKING:
    from torch import nn

    from forge_train import Job

    from ..decoder import Decoder, Rope


def build(config: Decoder.Config, vocabulary: int, job: Job) -> Transformer:
    """The model, its attention and feed-forward blocks asked for layer by layer from the chains."""
    rope = RoPE(
        rules.head_dim(config), length=config.max_sequence, theta=config.rope.theta, scaling=scaling(config.rope)
    )

    def block(index: int) -> Block:
        layer = Layer(
            index=index,
            num_layers=config.layers,
            dim=config.dim,
            heads=config.heads,
            kv_heads=rules.kv_heads(config),
            head_dim=rules.head_dim(config),
            ffn_dim=rules.hidden(config),
            norm_eps=config.norm_eps,
            bias=config.bias,
            qkv_bias=config.qkv_bias,
            qk_norm=config.qk_norm,
            rope=rope,
            std=config.std,
            output_std=depth_scaled(config.std, config.layers) if config.depth_scaled else config.std,
        )
        return Block(
            norm(config),
            job.hooks.attention(layer),
            norm(config),
            job.hooks.feed_forward(layer),
            [dropout(config.dropout, f"layers.{index}.{name}") for name in ("attention", "feed_forward")],
        )

    def dropout(rate: float, name: str) -> Dropout | None:
        return Dropout(rate, job, f"{name}_dropout") if rate else None

    embedding = Embedding(vocabulary, config.dim, std=config.std)
    head = job.hooks.head(HeadSpec(config.dim, vocabulary, config.std))
    if config.tied and not _ties(head, embedding):
        raise ConfigError(
            f"decoder.tied: the head of plugin {job.hooks.provider('head')!r} has no weight of the embedding's shape, "
            f"{list(embedding.weight.shape)}, to share with it; set it to false."
        )
    return Transformer(
        embedding,
        [block(index) for index in range(config.layers)],
        norm(config),
        head,
        max_sequence=config.max_sequence,
        tied=config.tied,
        dropout=dropout(config.embedding_dropout, "embedding"),
    )


def _ties(head: Head, embedding: Embedding) -> bool:
    return getattr(getattr(head, "weight", None), "shape", None) == embedding.weight.shape


def norm(config: Decoder.Config) -> nn.Module:
    if config.norm == "layer":
        return LayerNorm(config.dim, config.norm_eps, bias=config.bias)
    return RMSNorm(config.dim, config.norm_eps)


def scaling(rope: Rope) -> Scaling | None:
    if rope.scaling == "linear":
        return LinearScaling(rope.factor)
    if rope.scaling == "llama3":
        return Llama3Scaling(rope.factor, rope.original_sequence, rope.low, rules.high(rope))
    if rope.scaling == "yarn":
        return YarnScaling(
            rope.factor, rope.original_sequence, rope.low, rules.high(rope), rope.temperature, rope.truncate
        )
    return None
