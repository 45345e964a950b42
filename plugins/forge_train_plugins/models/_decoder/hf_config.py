"""Reading the `config.json` of LlamaForCausalLM and Qwen3ForCausalLM: every key is understood, or it is refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from forge_train import ConfigError, HFModel
from forge_train.state_map import Rename

from .huggingface import ACTIVATIONS, BLOCK, LLAMA, QWEN3, names

MODEL_TYPES = {LLAMA: "llama", QWEN3: "qwen3"}
SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
"""`rope_type` → `decoder.rope.scaling`."""
LEFTOVERS = (r"(.*\.)?rotary_emb\.inv_freq",)
"""Tensors that older versions of transformers stored, and that follow from the configuration."""
IRRELEVANT = frozenset(
    [
        *("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id"),
        *("mask_token_id", "decoder_start_token_id", "tokenizer_class", "prefix", "suppress_tokens"),
        *("_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset"),
        *("attn_implementation", "_experts_implementation", "torchscript", "return_dict", "output_attentions"),
        *("output_hidden_states", "output_scores", "return_dict_in_generate", "remove_invalid_values"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "temperature"),
        *("top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
        *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "diversity_penalty"),
        *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "begin_suppress_tokens"),
        *("unsloth_version", "unsloth_fixed"),
    ]
)
"""Keys that change no logit: names, the dtype in the files, ids of special tokens, labels, settings of generation."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0, None),
    "hidden_dropout": (0, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None, {}),
    "use_sliding_window": (False,),
    "sliding_window": (None,),
    "partial_rotary_factor": (1, None),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({}, None),
    "use_bfloat16": (False,),
    "tf_legacy_loss": (False,),
}
"""Keys of both architectures that change nothing with these values."""


def read(config: Mapping[str, Any]) -> HFModel | None:
    """How the model of a `config.json` is built and named here; None for another architecture.

    Raises:
        ConfigError: naming the keys whose values have no counterpart.
    """
    architectures: Sequence[str] = config.get("architectures") or ()
    if not set(architectures) & MODEL_TYPES.keys():
        return None
    reader = _Reader(config)
    if len(architectures) != 1:
        reader.refuse("architectures", "expected one")
    architecture = architectures[0]
    reader.get("architectures")
    if reader.get("model_type", MODEL_TYPES[architecture]) != MODEL_TYPES[architecture]:
        reader.refuse("model_type", f"{architecture} is {MODEL_TYPES[architecture]!r}")
    decoder = _decoder(reader, qwen3=architecture == QWEN3)
    activation = reader.one_of("hidden_act", ACTIVATIONS, "silu")
    reader.refuse_the_rest()
    return HFModel(
        map=Rename(names(_parameters(decoder))).inverse(),
        leftovers=LEFTOVERS,
        sections={"decoder": decoder, "swiglu": {"activation": activation}},
    )


def _decoder(reader: _Reader, *, qwen3: bool) -> dict[str, Any]:
    """The section `[decoder]`. What is left out has the architecture's default."""
    heads, layers = reader.integer("num_attention_heads"), reader.integer("num_hidden_layers")
    if qwen3 and "num_key_value_heads" not in reader.table:
        kv_heads = 32
    else:
        kv_heads = reader.integer("num_key_value_heads", heads)
    width = reader.integer("hidden_size")
    attention_bias, feed_forward_bias = reader.flag("attention_bias", False), reader.flag("mlp_bias", False)
    if qwen3 and feed_forward_bias:
        reader.refuse("mlp_bias", f"{QWEN3} has no biases in its MLP")
    if attention_bias != feed_forward_bias:
        key = "attention_bias" if attention_bias else "mlp_bias"
        reader.refuse(key, "attention and MLP have biases both or neither")
    decoder = {
        "dim": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": reader.integer("head_dim", 128 if qwen3 else width // max(heads, 1)),
        "hidden": reader.integer("intermediate_size"),
        "vocabulary": reader.integer("vocab_size"),
        "max_sequence": reader.integer("max_position_embeddings"),
        "norm_eps": reader.number("rms_norm_eps", 1e-6),
        "qk_norm": qwen3,
        "tied": reader.flag("tie_word_embeddings", False),
        "bias": feed_forward_bias,
        "qkv_bias": attention_bias,
        "std": reader.number("initializer_range", 0.02) or 0.02,
        "rope": _rope(reader),
    }
    if reader.get("layer_types", ["full_attention"] * layers) != ["full_attention"] * layers:
        reader.refuse("layer_types", f"expected {layers} times 'full_attention'; attention windows are not supported")
    if qwen3 and not reader.table.get("use_sliding_window"):  # then transformers looks at neither
        reader.skip("sliding_window", "max_window_layers")
    return decoder


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


def _rope(config: _Reader) -> dict[str, Any]:
    """The section `[decoder.rope]`, from transformers 5's `rope_parameters` or from the older keys."""
    given = _rope_table(config)
    theta = config.number("rope_theta", 10_000.0)
    rope: dict[str, Any] = {"theta": given.number("rope_theta", theta)}
    kind = given.one_of("rope_type" if "rope_type" in given.table else "type", SCALINGS, "default")
    if given.table.get("type", given.table.get("rope_type")) != given.table.get("rope_type", given.table.get("type")):
        given.refuse("type", "rope_type says something else")
    given.skip("type", "rope_type")
    if kind != "none":
        rope |= {"scaling": kind, "factor": given.number("factor")}
    if kind in ("llama3", "yarn"):
        length = config.integer("max_position_embeddings")
        rope["original_sequence"] = given.integer("original_max_position_embeddings", length)
    if kind == "llama3":
        rope |= {"low": given.number("low_freq_factor"), "high": given.number("high_freq_factor")}
    if kind == "yarn":
        rope |= {
            "low": given.number("beta_slow", 1),
            "high": given.number("beta_fast", 32),
            "temperature": _temperature(given, rope["factor"]),
            "truncate": given.flag("truncate", True),
        }
    if given.number("partial_rotary_factor", 1) != 1:
        given.refuse("partial_rotary_factor", "all features are rotated here")
    given.refuse_the_rest()
    return rope


def _rope_table(config: _Reader) -> _Reader:
    """The one table that says how positions are rotated; empty where there is none."""
    tables = {key: config.get(key, {}) for key in ("rope_scaling", "rope_parameters")}
    for key, table in tables.items():
        if not isinstance(table, Mapping):
            config.refuse(key, "expected a table")
    if all(tables.values()):
        config.refuse("rope_scaling", "rope_parameters is there too; keep one of them")
    key = "rope_scaling" if tables["rope_scaling"] else "rope_parameters"
    return _Reader(tables[key], f"{key}.")


def _temperature(given: _Reader, factor: float) -> float:
    """YaRN's factor on cos and sin; DeepSeek's two “mscale” keys give it as a ratio. 0 is the paper's."""
    over, under = given.number("mscale", 0.0), given.number("mscale_all_dim", 0.0)
    if given.get("attention_factor", None) is not None:
        if (found := given.number("attention_factor")) <= 0:
            given.refuse("attention_factor", "expected a number greater than 0")
        return found
    if over and under and factor > 1:
        return (0.1 * over * math.log(factor) + 1) / (0.1 * under * math.log(factor) + 1)
    return 0.0


_REQUIRED: Any = object()


class _Reader:
    """Reads a table of a `config.json`. It knows which keys were read, and names keys in its errors."""

    def __init__(self, table: Mapping[str, Any], prefix: str = "") -> None:
        self.table = table
        self._prefix = prefix
        self._read: set[str] = set()

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value; null counts as missing, as it does for transformers."""
        self._read.add(key)
        value = self.table.get(key)
        if value is None and default is _REQUIRED:
            raise ConfigError(f"config.json: {self._prefix}{key} is missing.")
        return default if value is None else value

    def integer(self, key: str, default: Any = _REQUIRED) -> int:
        value = self.get(key, default)
        if type(value) is not int:
            self.refuse(key, "expected an integer")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float):
            self.refuse(key, "expected a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        self._read.add(key)
        value = self.table.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "expected true or false")
        return value

    def one_of(self, key: str, table: Mapping[str, str], default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str) or value not in table:
            self.refuse(key, f"known are {', '.join(table)}")
        return table[value]

    def skip(self, *keys: str) -> None:
        """Keys that need not be looked at."""
        self._read.update(keys)

    def refuse(self, key: str, why: str) -> NoReturn:
        raise ConfigError(self._sentence(key, f"{why}."))

    def refuse_the_rest(self) -> None:
        """Refuse every key that was not read and could change a number."""
        rest = [key for key in sorted(self.table) if not (key in self._read or self._changes_nothing(key))]
        why = "the model here does not have this; remove the key only if it changes nothing."
        if rest:
            raise ConfigError("\n".join(self._sentence(key, why) for key in rest))

    def _changes_nothing(self, key: str) -> bool:
        if self._prefix:
            return False
        return key in IRRELEVANT or self.table[key] in NEUTRAL.get(key, ())

    def _sentence(self, key: str, why: str) -> str:
        value = repr(self.table.get(key))
        shown = value if len(value) <= 60 else f"{value[:59]}…"
        return f"config.json: {self._prefix}{key} = {shown} can't be imported: {why}"
