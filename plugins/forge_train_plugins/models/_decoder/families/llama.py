"""Llama 2 and 3 (arXiv:2307.09288, arXiv:2407.21783), the language model of Llama 3.2 Vision, and Mistral
(arXiv:2310.06825)."""

from __future__ import annotations

from typing import Any

from forge_train import ConfigError

from .family import ATTENTION_BIAS, MLP_BIAS, Family, Key
from .positions import Rotation, Windows
from .reader import Reader

LLAMA = Family("LlamaForCausalLM", "llama", keys={**ATTENTION_BIAS, **MLP_BIAS})


class _NoLayers(Key):
    """Layers that attend to images: they are no part of a decoder."""

    def read(self, config: Reader, key: str) -> dict[str, Any]:
        why = "a model of text alone has none ([]); with images it is a MllamaForConditionalGeneration"
        if (found := config.get(key, None)) is None:
            raise ConfigError(f"config.json: {key} is missing: {why}.")
        if found != []:
            config.refuse(key, why)
        return {}


MLLAMA = Family(
    "MllamaForCausalLM",
    "mllama_text_model",
    options={"placeholders": 8, "head_dim": lambda decoder: decoder["dim"] // decoder["heads"]},
    keys={
        "rms_norm_eps": Key(("norm_eps",), float, 1e-5),
        "dropout": Key(("attention_dropout",), float, 0.0),
        "cross_attention_layers": _NoLayers(("layers",), theirs=lambda layers: []),
    },
    kv_heads=8,
    rotation=Rotation(theta=500_000.0),
)
"""Its embedding has eight rows more than `vocab_size`, which the head lacks."""
MISTRAL = Family(
    "MistralForCausalLM",
    "mistral",
    kv_heads=8,
    windows=Windows(lambda config, layers: (True,) * layers, listed=False),
)
