"""The decoder in Hugging Face layout: `config.json` and tensor names of LlamaForCausalLM and Qwen3ForCausalLM."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from forge_train import ConfigError, HFModel

from . import rules

if TYPE_CHECKING:
    from torch import nn

    from ..decoder import Decoder, Rope

LLAMA, QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"
ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "relu": "reglu"}
"""`hidden_act` → `swiglu.activation`; both architectures gate."""
SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
"""`rope_type` → `decoder.rope.scaling`."""
LEFTOVERS = (r"(.*\.)?rotary_emb\.inv_freq",)
"""Tensors that older versions of transformers stored, and that follow from the configuration."""
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
        more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        raise ConfigError(f"{LLAMA} and {QWEN3} have no place for {', '.join(strange[:3])}{more}.")
    return found


# -- import -------------------------------------------------------------------------------------------------------


def read(config: Mapping[str, Any]) -> HFModel | None:
    """How the model of a `config.json` is built and named here; None for another architecture.

    Raises:
        ConfigError: naming the key whose value has no counterpart.
    """
    architecture = next(iter(config.get("architectures") or ()), None)
    if architecture not in (LLAMA, QWEN3):
        return None
    reader = _Reader(config)
    reader.refuse_what_changes_the_numbers()
    attention_bias, feed_forward_bias = bool(reader.get("attention_bias", False)), bool(reader.get("mlp_bias", False))
    if attention_bias != feed_forward_bias:
        reader.refuse(
            "attention_bias" if attention_bias else "mlp_bias", "attention and MLP have biases both or neither"
        )
    heads = reader.get("num_attention_heads")
    decoder = {
        "dim": reader.get("hidden_size"),
        "layers": reader.get("num_hidden_layers"),
        "heads": heads,
        "kv_heads": reader.get("num_key_value_heads", heads),
        "head_dim": reader.get("head_dim", 128 if architecture == QWEN3 else reader.get("hidden_size") // heads),
        "hidden": reader.get("intermediate_size"),
        "vocabulary": reader.get("vocab_size"),
        "max_sequence": reader.get("max_position_embeddings"),
        "norm_eps": float(reader.get("rms_norm_eps", 1e-6)),
        "qk_norm": architecture == QWEN3,
        "tied": bool(reader.get("tie_word_embeddings", False)),
        "bias": feed_forward_bias,
        "qkv_bias": attention_bias,
        "std": float(reader.get("initializer_range", 0.02)) or 0.02,
        "rope": _rope(reader),
    }
    return HFModel(
        names=names(_parameters(decoder)),
        leftovers=LEFTOVERS,
        sections={
            "decoder": decoder,
            "swiglu": {"activation": reader.one_of("hidden_act", ACTIVATIONS, "silu")},
        },
    )


def _parameters(decoder: Mapping[str, Any]) -> Iterable[str]:
    """The names of the parameters of a model with this section, which is not built to find them."""
    yield "embedding.weight"
    for index in range(decoder["layers"]):
        for module in BLOCK:
            if module.endswith(("q_norm", "k_norm")) and not decoder["qk_norm"]:
                continue
            yield f"layers.{index}.{module}.weight"
            if decoder["bias"] and not module.endswith("norm"):
                yield f"layers.{index}.{module}.bias"
    yield "norm.weight"
    if not decoder["tied"]:
        yield "head.weight"


class _Reader:
    """Reads a table of a `config.json`, with errors that name the key."""

    def __init__(self, table: Mapping[str, Any], where: str = "config.json") -> None:
        self.table = table
        self.where = where

    def get(self, key: str, default: Any = None) -> Any:
        """The value; null counts as missing, as it does for transformers."""
        value = self.table.get(key)
        if value is None and default is None:
            raise ConfigError(f"{self.where}: {key} is missing.")
        return default if value is None else value

    def one_of(self, key: str, table: Mapping[str, str], default: str) -> str:
        value = self.get(key, default)
        if value not in table:
            self.refuse(key, f"known are {', '.join(table)}")
        return table[value]

    def refuse(self, key: str, why: str) -> NoReturn:
        raise ConfigError(f"{self.where}: {key} = {self.table.get(key)!r} can't be imported: {why}.")

    def refuse_what_changes_the_numbers(self) -> None:
        """Values that these architectures would heed, and forge's decoder would not."""
        if self.get("attention_dropout", 0):
            self.refuse("attention_dropout", "there is no dropout here; set it to 0 to go on without")
        if self.get("use_sliding_window", False):
            self.refuse("use_sliding_window", "attention windows are not supported")
        if "sliding_attention" in self.get("layer_types", ()):
            self.refuse("layer_types", "attention windows are not supported")
        if self.get("pretraining_tp", 1) != 1:
            self.refuse("pretraining_tp", "split matrix products are not supported")
        if self.get("quantization_config", {}):
            self.refuse("quantization_config", "weights must not be quantised")


def _rope(config: _Reader) -> dict[str, Any]:
    """The section `[decoder.rope]`, from transformers 5's `rope_parameters` or from the older keys."""
    key = "rope_parameters" if config.table.get("rope_parameters") else "rope_scaling"
    given = _Reader(config.get(key, {}), f"config.json: {key}")
    kind = given.one_of("rope_type" if "rope_type" in given.table else "type", SCALINGS, "default")
    if given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError("config.json: partial_rotary_factor can't be imported: all features are rotated here.")
    rope: dict[str, Any] = {"theta": float(given.get("rope_theta", config.get("rope_theta", 10_000.0)))}
    if kind == "none":
        return rope
    length = config.get("max_position_embeddings")
    original = given.get("original_max_position_embeddings", length)
    rope |= {"scaling": kind, "factor": float(given.get("factor", length / original))}
    if kind == "linear":
        return rope
    rope["original_sequence"] = original
    if kind == "llama3":
        return rope | {"low": float(given.get("low_freq_factor")), "high": float(given.get("high_freq_factor"))}
    return rope | {
        "low": float(given.get("beta_slow", 1)),
        "high": float(given.get("beta_fast", 32)),
        "temperature": _temperature(given.table, rope["factor"]),
        "truncate": given.get("truncate", True),
    }


def _temperature(given: Mapping[str, Any], factor: float) -> float:
    """YaRN's factor on cos and sin; DeepSeek's two “mscale” keys give it as a ratio. 0 is the paper's."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    over, under = given.get("mscale"), given.get("mscale_all_dim")
    if over and under and factor > 1:
        return float((0.1 * over * math.log(factor) + 1) / (0.1 * under * math.log(factor) + 1))
    return 0.0


# -- export -------------------------------------------------------------------------------------------------------


def write(config: Decoder.Config, vocabulary: int, end: int | None, model: nn.Module) -> HFModel:
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
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": None,
        "use_cache": True,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
    }
    if not config.qk_norm:
        described["mlp_bias"] = config.bias
    return HFModel(names=layout, config=described)


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
