"""GPT-2 (Radford et al. 2019): learned positions, biases, and matrices stored as `[in, out]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_train_kit.state_map import Rename, Split, Transpose

from .family import Family, Key

if TYPE_CHECKING:
    from forge_train_kit.state_map import StateMap

    from ...decoder import Decoder

OUTER = {"embedding": "wte", "positions": "wpe", "norm": "ln_f"}
BLOCK = {
    "attention_norm": "ln_1",
    "feed_forward_norm": "ln_2",
    "attention.o": "attn.c_proj",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}


def _tensors(config: Decoder.Config) -> tuple[StateMap, ...]:
    """The layout that transformers writes, and that of the original files, which has no prefix."""
    return _named("transformer.", config.tied), _named("", config.tied)


def _named(prefix: str, tied: bool) -> StateMap:
    names = {f"{prefix}{theirs}.{{kind}}": f"{ours}.{{kind}}" for ours, theirs in OUTER.items()}
    names |= {} if tied else {"lm_head.{kind}": "head.{kind}"}
    block = f"{prefix}h.{{i}}"
    names |= {f"{block}.{theirs}.{{kind}}": f"layers.{{i}}.{ours}.{{kind}}" for ours, theirs in BLOCK.items()}
    matrices = tuple(f"{block}.{theirs}.weight" for theirs in ("attn.c_attn", *BLOCK.values()) if "c_" in theirs)
    parts = tuple(f"layers.{{i}}.attention.{one}.{{kind}}" for one in "qkv")
    return Transpose(matrices) >> (Rename(names) | Split(f"{block}.attn.c_attn.{{kind}}", parts))


GPT2 = Family(
    "GPT2LMHeadModel",
    "gpt2",
    options={
        "positions": "learned",
        "norm": "layer",
        "bias": True,
        "qkv_bias": True,
        "o_bias": True,
        "hidden": lambda decoder: decoder["hidden"] or 4 * decoder["dim"],
    },
    common={
        "n_embd": Key(("dim",), missing=768),
        "n_layer": Key(("layers",), missing=12),
        "n_head": Key(("heads",), missing=12),
        "n_inner": Key(("hidden",), missing=0, null=0),
        "vocab_size": Key(("vocabulary",), missing=50257),
        "n_positions": Key(("max_sequence",), missing=1024),
        "layer_norm_epsilon": Key(("norm_eps",), float, 1e-5),
        "initializer_range": Key(("std",), float, 0.02, ours=lambda std: std or 0.02),
        "tie_word_embeddings": Key(("tied",), bool, True),
        "resid_pdrop": Key(("dropout",), float, 0.1),
        "embd_pdrop": Key(("embedding_dropout",), float, 0.1),
        "attn_pdrop": Key(("attention_dropout",), float, 0.1),
    },
    grouped=False,
    activation="activation_function",
    act="gelu_new",
    activations={"gelu": "gelu", "relu": "relu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"},
    rotation=None,
    outer={},
    block={},
    tensors=_tensors,
    leftovers=lambda config: (r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
    ignored=("n_ctx",),  # in older files; it repeats n_positions
)
