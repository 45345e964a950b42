"""The decoder in Hugging Face layout: the tensor names of Llama and Qwen3, and the `config.json` that is written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError, HFModel
from forge_train.ground.present import few
from forge_train.state_map import Rename

from . import rules

if TYPE_CHECKING:
    from torch import nn

    from ..decoder import Decoder, Rope

LLAMA, QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"
ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "relu": "reglu"}
"""`hidden_act` → `swiglu.activation`; both architectures gate."""
BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
"""Module in a layer → its name in Hugging Face layout."""


def names(parameters: Iterable[str]) -> dict[str, str]:
    """Parameter name → tensor name.

    Raises:
        ConfigError: naming the parameters that have no place in the layout.
    """
    found: dict[str, str] = {}
    strange: list[str] = []
    for name in parameters:
        module, _, kind = name.rpartition(".")
        outer = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}.get(module)
        _, index, inner = [*module.split(".", 2), "", ""][:3]
        if outer:
            found[name] = f"{outer}.{kind}"
        elif inner in BLOCK:
            found[name] = f"model.layers.{index}.{BLOCK[inner]}.{kind}"
        else:
            strange.append(name)
    if strange:
        raise ConfigError(f"{LLAMA} and {QWEN3} have no place for {few(strange)}.")
    return found


def write(config: Decoder.Config, vocabulary: int, model: nn.Module) -> HFModel:
    """`config.json` and names for a model, which may lie on the meta device.

    Raises:
        ConfigError: saying what neither architecture can express.
    """
    if config.norm != "rms":
        raise ConfigError(f"decoder.norm = {config.norm!r}: {LLAMA} and {QWEN3} know only RMSNorm.")
    if config.bias != config.qkv_bias:
        raise ConfigError(
            f"decoder.bias and decoder.qkv_bias: {LLAMA} has biases in all of attention or in none of it."
        )
    if config.qk_norm and config.bias:
        raise ConfigError(f"decoder.qk_norm with decoder.bias: {QWEN3} has no biases in its MLP.")
    layout = names(name for name, _ in model.named_parameters())
    described = {
        "architectures": [QWEN3 if config.qk_norm else LLAMA],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": rules.kv_heads(config),
        "head_dim": rules.head_dim(config),
        "intermediate_size": rules.hidden(config),
        "hidden_act": _hidden_act(model),
        "vocab_size": vocabulary,
        "max_position_embeddings": config.max_sequence,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.std,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.qkv_bias,
        "attention_dropout": 0.0,
        "use_cache": True,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
    }
    if not config.qk_norm:
        described["mlp_bias"] = config.bias
    return HFModel(map=Rename(layout).inverse(), config=described)


def _hidden_act(model: nn.Module) -> str:
    found = {str(m.activation) for m in model.modules() if hasattr(m, "activation")}
    known = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    if len(found) != 1 or not found <= known.keys():
        raise ConfigError(
            f"swiglu.activation = {' and '.join(sorted(found))}: {LLAMA} and {QWEN3} know {', '.join(known)}."
        )
    return known[found.pop()]


def _rope_scaling(rope: Rope) -> dict[str, Any] | None:
    """The keys as written before transformers 5, which every reader understands."""
    if rope.scaling == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "linear":
        return scaling
    scaling["original_max_position_embeddings"] = rope.original_sequence
    if rope.scaling == "llama3":
        return scaling | {"low_freq_factor": rope.low, "high_freq_factor": rules.high(rope)}
    scaling |= {"beta_slow": rope.low, "beta_fast": rules.high(rope), "truncate": rope.truncate}
    return scaling | ({"attention_factor": rope.temperature} if rope.temperature else {})
