"""Builds the module from the configuration and a layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import nn

from forge_train import ConfigError
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.kernels import kernel_with
from forge_train_kit.layers import Layer
from forge_train_kit.model import AttentionDropout, LengthRoPE, RoPE, YarnScaling

from .module import LatentAttention, Sizes

if TYPE_CHECKING:
    from forge_train import Job

    from ..mla import MLA


class Ropes:
    """The tables for the rotated features: one for all layers that share one of the model's tables."""

    def __init__(self, features: int) -> None:
        self._features = features
        self._made: WeakKeyDictionary[nn.Module, RoPE] = WeakKeyDictionary()

    def like(self, rope: nn.Module | None) -> RoPE | None:
        """A table with the model's positions, base and scaling for these features; None if a layer has no positions.

        Raises:
            ConfigError: for a rotary embedding whose parameters are unknown.
        """
        if rope is None:
            return None
        if isinstance(rope, LengthRoPE):
            raise ConfigError(
                "mla uses the same rotary table for sequences of every length; set decoder.rope.scaling to "
                "'none', 'linear', 'llama3' or 'yarn'."
            )
        if type(rope) is not RoPE:
            raise ConfigError(
                f"mla makes its rotary table from the model's forge_train_kit.model.RoPE, but this model has a "
                f"{type(rope).__name__}."
            )
        if rope not in self._made:
            self._made[rope] = RoPE(self._features, length=rope.length, theta=rope.theta, scaling=rope.scaling)
        return self._made[rope]


def build(config: MLA.Config, layer: Layer, job: Job, ropes: Ropes) -> LatentAttention:
    """Build the module of one layer.

    Raises:
        ConfigError: if the layer asks for something that latent attention does not support.
    """
    if layer.kv_heads != layer.heads:
        raise ConfigError(
            f"mla makes a key and a value for each head from the latent; set decoder.kv_heads = {layer.heads} (or 0), "
            f"found {layer.kv_heads}."
        )
    if layer.qk_norm:
        raise ConfigError("mla normalises latents, not the queries and keys of each head; set decoder.qk_norm = false.")
    if layer.unit_offset:
        raise ConfigError("mla's norms of latents have no unit offset; set decoder.unit_offset = false.")
    if getattr(layer.rope, "head_dim", layer.head_dim) != layer.head_dim:
        raise ConfigError(
            "mla adds mla.rope_dim rotated features to each head, so the model must not rotate a part of the others; "
            "set decoder.rope.fraction = 1.0."
        )
    rope = ropes.like(layer.rope)
    sizes = Sizes(
        q_rank=config.q_rank,
        kv_rank=config.kv_rank,
        plain=layer.head_dim,
        rotated=config.rope_dim,
        value=config.v_dim or layer.head_dim,
    )
    kernel = kernel_with(KernelCapabilities(head_dims=(sizes.widest,)), job)
    scale = sizes.head**-0.5 * temperature(config.mscale, rope)
    rate, name = layer.attention_dropout, f"layers.{layer.index}.attention.weights"
    dropout = AttentionDropout(rate, layer.heads, job, name) if rate else None
    return LatentAttention(layer, sizes, rope, kernel, scale=scale, interleaved=config.interleaved, dropout=dropout)


def temperature(mscale: float, rope: RoPE | None) -> float:
    """The factor by which yarn multiplies the logits (arXiv:2405.04434, §3.1.4, as released).

    Raises:
        ConfigError: if the scaling is not yarn.
    """
    if not mscale:
        return 1.0
    scaling = None if rope is None else rope.scaling
    if not isinstance(scaling, YarnScaling):
        raise ConfigError("mla.mscale needs decoder.rope.scaling = 'yarn'; set mla.mscale = 0.")
    return (0.1 * mscale * math.log(max(scaling.factor, 1.0)) + 1.0) ** 2
