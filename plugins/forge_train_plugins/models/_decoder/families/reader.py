"""Reads a `config.json`, and refuses every key that it does not understand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from forge_train import ConfigError

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
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
        *("summary_first_dropout", "unsloth_version", "unsloth_fixed", "cache_implementation"),
    ]
)
"""Keys that change no logit: names, the dtype of the files, ids of special tokens, labels, generation settings."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_dropout": (0, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None, {}),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "use_mrope": (False,),
    "attn_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
    "sliding_window": (None,),
    "partial_rotary_factor": (1, None),
    "router_jitter_noise": (0,),
    "clip_qkv": (None,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({}, None),
    "use_bfloat16": (False,),
    "tf_legacy_loss": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
}
"""Values with which a key changes nothing, in families that do not read it."""

REQUIRED: Any = object()


class Reader:
    """Reads a table of a `config.json`. It tracks which keys were read, and names the key in its errors."""

    def __init__(
        self, table: Mapping[str, Any], prefix: str = "", neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL
    ) -> None:
        self.table = table
        self._prefix = prefix
        self._neutral = neutral
        self._read: set[str] = set()

    def get(self, key: str, default: Any = REQUIRED) -> Any:
        """The value; null counts as missing, as it does for transformers."""
        self._read.add(key)
        value = self.table.get(key)
        if value is None and default is REQUIRED:
            raise ConfigError(f"config.json: {self._prefix}{key} is missing.")
        return default if value is None else value

    def integer(self, key: str, default: Any = REQUIRED) -> int:
        value = self.get(key, default)
        if type(value) is not int:
            self.refuse(key, "expected an integer")
        return value

    def number(self, key: str, default: Any = REQUIRED) -> float:
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
            self.refuse(key, f"expected one of {', '.join(table)}")
        return table[value]

    def flags(self, key: str, count: int, default: tuple[bool, ...]) -> tuple[bool, ...]:
        """A list of at least `count` entries, each 0 or 1, or false or true."""
        value = self.get(key, list(default))
        if not isinstance(value, list) or len(value) < count or any(one not in (0, 1) for one in value):
            self.refuse(key, f"expected a list of {count} entries, each 0 or 1")
        return tuple(bool(one) for one in value[:count])

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self.get(key)
        if not isinstance(value, list) or any(type(one) not in (int, float) for one in value):
            self.refuse(key, "expected a list of numbers")
        return tuple(map(float, value))

    def skip(self, *keys: str) -> None:
        """Mark keys as read without looking at them."""
        self._read.update(keys)

    def refuse(self, key: str, why: str) -> NoReturn:
        raise ConfigError(self._sentence(key, f"{why}."))

    def refuse_the_rest(self) -> None:
        """Refuse every key that was not read and could change the model's output."""
        rest = [key for key in sorted(self.table) if not (key in self._read or self._changes_nothing(key))]
        why = "the model does not support it; remove the key only if it has no effect."
        if rest:
            raise ConfigError("\n".join(self._sentence(key, why) for key in rest))

    def _changes_nothing(self, key: str) -> bool:
        if self._prefix:
            return False
        return key in IRRELEVANT or self.table[key] in self._neutral.get(key, ())

    def _sentence(self, key: str, why: str) -> str:
        value = repr(self.table.get(key))
        shown = value if len(value) <= 60 else f"{value[:59]}…"
        return f"config.json: {self._prefix}{key} = {shown} can't be imported: {why}"
