"""Gated delta-rule linear attention."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import TYPE_CHECKING, Annotated

from forge_train import ConfigError, Ge, Gt, Plugin, Problem, hookimpl, section
from forge_train_kit.layers import Attention, Layer

if TYPE_CHECKING:
    from forge_train import Job

OF_ATTENTION = ("qkv_bias", "o_bias", "attention_dropout")
"""Options of a decoder that apply only to layers with attention."""


class DeltaNet(Plugin):
    """Gated delta-rule linear attention, in some or all layers (Gated DeltaNet, arXiv:2412.06464).

    Use it for long sequences and long generated texts. Each layer keeps a state of `k_dim` × `v_dim` numbers per head
    instead of keys and values, so time grows linearly with the sequence, and generation needs the same memory at any
    length. Below a few thousand tokens, attention is faster; in training it also takes less memory. The other layers
    keep their attention: by default every fourth, as in Qwen3-Next. Biases, `decoder.qk_norm`,
    `decoder.attention_dropout` and rotary positions apply to those layers only; linear attention always normalises
    queries and keys, and needs no positions. In packed rows, states and convolutions start again with each document.

    `tp` splits the heads. Under `cp`, ranks exchange slices of all heads for whole sequences of some heads, whatever
    `cp.method` says for the other layers. `parallel.cp` × `parallel.tp` must divide `k_heads`.
    """

    api = (1, 0)
    facts = {"plan.per_unit": True}

    @section
    class Config:
        layers: tuple[bool, ...] = (True, True, True, False)
        """Layers with linear attention: the list repeats from the first layer to the last; empty means all."""
        heads: Annotated[int, Ge(0)] = 0
        """Number of value heads, each with its own state; 0 means `decoder.heads`."""
        k_heads: Annotated[int, Ge(0)] = 0
        """Number of query and key heads, a divisor of `heads`; 0 means the same as `heads`."""
        k_dim: Annotated[int, Ge(0)] = 0
        """Features of a head's query and key; 0 means `decoder.head_dim`."""
        v_dim: Annotated[int, Ge(0)] = 0
        """Features of a head's value; 0 means `decoder.head_dim`."""
        convolution: Annotated[int, Gt(0)] = 4
        """Kernel size, in tokens, of the causal convolutions on queries, keys and values."""
        chunk: Annotated[int, Gt(0)] = 64
        """Tokens that training computes at once. It changes memory and speed, but not the result."""
        recompute: bool = True
        """Keep only the projections of a layer, and recompute everything else in the backward pass."""

    config: Config

    @hookimpl
    def check_config(self) -> Iterator[Problem]:
        if self.config.layers and not any(self.config.layers):
            yield Problem("delta_net.layers", "selects no layer; disable delta_net instead.")
        heads, k_heads = self.config.heads, self.config.k_heads
        if heads and k_heads and heads % k_heads:
            yield Problem("delta_net.k_heads", f"{k_heads} does not divide delta_net.heads ({heads}).")

    @hookimpl
    def attention(self, layer: Layer, job: Job) -> Attention | None:
        own = list(islice(cycle(self.config.layers or (True,)), layer.num_layers))
        if not any(own):
            raise ConfigError(
                f"delta_net.layers selects none of the {layer.num_layers} layers.", key="delta_net.layers"
            )
        if not own[layer.index]:
            return None
        if all(own) and (unused := next((name for name in OF_ATTENTION if getattr(layer, name)), None)):
            raise ConfigError(
                f"decoder.{unused} has no effect: all {layer.num_layers} layers have linear attention "
                "(delta_net.layers), which does not support it. Leave it at its default.",
                key=f"decoder.{unused}",
            )
        from ._delta_net.module import GatedDeltaNet, Sizes

        heads = self.config.heads or layer.heads
        k_heads = self.config.k_heads or heads
        if heads % k_heads:
            raise ConfigError(
                f"delta_net.k_heads: {k_heads} does not divide the {heads} heads.", key="delta_net.k_heads"
            )
        k_dim, v_dim = self.config.k_dim or layer.head_dim, self.config.v_dim or layer.head_dim
        sizes = Sizes(heads, k_heads, k_dim, v_dim, self.config.convolution)
        return GatedDeltaNet(layer, sizes, self.config.chunk, recompute=self.config.recompute)
