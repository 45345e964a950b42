"""Builds the model from the configuration."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from forge_train import ConfigError
from forge_train_kit import hookspecs
from forge_train_kit.enabled_modalities import enabled_modalities
from forge_train_kit.heads import Head, HeadSpec, Trunk
from forge_train_kit.layers import Layer
from forge_train_kit.modalities import Fusion, FusionSpec, encoders_of
from forge_train_kit.model import (
    Dropout,
    DynamicRoPE,
    Embedding,
    ItemPositions,
    LayerNorm,
    LengthRoPE,
    LinearScaling,
    Llama3Scaling,
    LongRoPE,
    OffsetRMSNorm,
    RMSNorm,
    RoPE,
    Scaling,
    SectionedRoPE,
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
    """Build the model; each layer's attention and feed-forward blocks come from the plugin chains."""
    ropes = _ropes(config) if config.positions == "rotary" else (None, None)
    windows, rotated = rules.windows(config), rules.rotated(config)

    def spec_of(index: int, count: int) -> Layer:
        at = min(index, config.layers - 1)  # the layers of a tail are built like the last layer
        window = windows[at] or None
        return Layer(
            index=index,
            num_layers=count,
            dim=config.dim,
            heads=config.heads,
            kv_heads=rules.kv_heads(config),
            head_dim=rules.head_dim(config),
            ffn_dim=rules.hidden(config),
            norm_eps=config.norm_eps,
            bias=config.bias,
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            qk_norm=config.qk_norm,
            qk_norm_over=config.qk_norm_over,
            unit_offset=config.unit_offset,
            window=window,
            soft_cap=config.soft_cap or None,
            scale=config.scale or None,
            rope=ropes[window is not None] if rotated[at] else None,
            std=config.std,
            output_std=depth_scaled(config.std, config.layers) if config.depth_scaled else config.std,
            sinks=config.sinks,
            attention_dropout=config.attention_dropout,
            prefix=config.prefix,
        )

    def block(index: int, count: int, name: str) -> Block:
        layer = spec_of(index, count)
        attention = hookspecs.attention(layer, job)
        _check_obeyed("the attention", attention, layer, ("window", "soft_cap", "scale", "sinks", "prefix"))
        if not hasattr(attention, "recurrence"):  # such layers have no attention weights to drop
            _check_obeyed("the attention", attention, layer, ("attention_dropout",))
        return Block(
            attention,
            hookspecs.feed_forward(layer, job),
            partial(norm, config),
            norm_at=config.norm_at,
            dropout=[dropout(config.dropout, f"{name}.{one}") for one in ("attention", "feed_forward")],
            multiplier=config.residual_multiplier,
            parallel=config.parallel,
        )

    def dropout(rate: float, name: str) -> Dropout | None:
        return Dropout(rate, job, f"{name}_dropout") if rate else None

    rows = vocabulary + config.placeholders
    embedding = Embedding(rows, config.dim, std=config.std)
    spec = HeadSpec(config.dim, vocabulary, config.std, config.logit_divisor, config.logit_soft_cap or None)
    head = hookspecs.head(spec, job)
    tied = config.tied and _ties(head, embedding)
    if job.hooks.gives("head") == "token_logits":
        whose = f"the head of plugin {job.hooks.provider('head')!r}"
        _check_obeyed(whose, head, spec, ("divisor", "soft_cap"))
        if config.tied and not tied:
            raise ConfigError(
                f"decoder.tied: {whose} has no weight of the embedding's shape, {list(embedding.weight.shape)}, to "
                "share with it; set it to false."
            )

    def shared() -> Embedding:
        again = Embedding(rows, config.dim, std=config.std)
        again.weight = embedding.weight
        return again

    def behind(index: int, more: int) -> Block:
        return block(config.layers + index, config.layers + more, f"tail.{index}")

    if config.prefix and job.hooks.provider("tail"):
        raise ConfigError(
            f"decoder.prefix: the tail of plugin {job.hooks.provider('tail')!r} is called without prefixes; "
            "disable it, or set it to false."
        )
    trunk = Trunk(config.dim, config.layers, partial(norm, config), shared, behind, config.std)
    model = Transformer(
        embedding,
        [block(index, config.layers, f"layers.{index}") for index in range(config.layers)],
        norm(config),
        head,
        max_sequence=config.max_sequence,
        tied=tied,
        embedding_multiplier=config.embedding_multiplier,
        dropout=dropout(config.embedding_dropout, "embedding"),
        positions=Embedding(config.max_sequence, config.dim, std=config.std) if config.positions == "learned" else None,
        tail=hookspecs.tail(trunk, job) if job.hooks.provider("tail") else None,
    )
    model.prefix = config.prefix
    model.fusion = _fusion(config, spec_of(0, config.layers), model, job)
    model.item_positions = item_positions(config, job)
    return model


def item_positions(config: Decoder.Config, job: Job) -> ItemPositions | None:
    """Gives positions along three axes; None if nothing rotates by them, or no item has a position for each vector."""
    if not config.rope.sections or not (modalities := enabled_modalities(job)):
        return None
    if job.hooks.gives("fusion") != "features":
        return None
    return ItemPositions(modalities, sliced=job.dist.layout.cp > 1)


def _fusion(config: Decoder.Config, layer: Layer, model: Transformer, job: Job) -> Fusion | None:
    """Joins items with text; None if no plugin gives a modality."""
    encoders = encoders_of(enabled_modalities(job), config.dim)
    spec = FusionSpec(config.dim, config.layers, encoders, layer, config.std, dict(model.layers))
    return hookspecs.fusion(spec, job) if encoders else None


DEFAULTS = {
    "window": None,
    "soft_cap": None,
    "scale": None,
    "sinks": False,
    "prefix": False,
    "divisor": 1.0,
    "attention_dropout": 0.0,
}
"""Behaviour of a module without the attribute."""


def _check_obeyed(whose: str, module: object, asked: Layer | HeadSpec, names: Iterable[str]) -> None:
    """Check that the module has an attribute for each requested option; without it, the module ignores the option.

    Raises:
        ConfigError: naming the option.
    """
    for name in names:
        value, default = getattr(asked, name), DEFAULTS[name]
        if value != default and getattr(module, name, default) != value:
            key = f"decoder.logit_{name}" if isinstance(asked, HeadSpec) else f"decoder.{name}"
            raise ConfigError(
                f"{key}: {whose} ({type(module).__name__}) does not support it: it has no attribute {name!r} "
                "with this value. Leave the option at its default, or use another plugin."
            )


def _ropes(config: Decoder.Config) -> tuple[RoPE | LengthRoPE, RoPE | LengthRoPE]:
    """The rotations of layers without a window and of layers with one."""
    rope, features = config.rope, rules.rotated_features(config)
    plain = _rope(rope, features, config.max_sequence)
    if not rope.window_theta:
        return plain, plain
    return plain, _sectioned(rope, features, config.max_sequence, rope.window_theta, None)


def _rope(rope: Rope, features: int, length: int) -> RoPE | LengthRoPE:
    if rope.scaling == "dynamic":
        return DynamicRoPE(
            features, length=length, theta=rope.theta, original_length=rope.original_sequence, factor=rope.factor
        )
    if rope.scaling == "longrope":
        return LongRoPE(
            features,
            length=length,
            theta=rope.theta,
            original_length=rope.original_sequence,
            short=rope.short,
            long=rope.long,
            attention_factor=rope.temperature,
        )
    return _sectioned(rope, features, length, rope.theta, scaling(rope))


def _sectioned(rope: Rope, features: int, length: int, theta: float, scaling: Scaling | None) -> RoPE:
    if not rope.sections:
        return RoPE(features, length=length, theta=theta, scaling=scaling)
    return SectionedRoPE(features, rope.sections, length=length, theta=theta, scaling=scaling)


def _ties(head: Head, embedding: Embedding) -> bool:
    return getattr(getattr(head, "weight", None), "shape", None) == embedding.weight.shape


def norm(config: Decoder.Config) -> nn.Module:
    if config.norm == "layer":
        return LayerNorm(config.dim, config.norm_eps, bias=config.bias)
    return (OffsetRMSNorm if config.unit_offset else RMSNorm)(config.dim, config.norm_eps)


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
