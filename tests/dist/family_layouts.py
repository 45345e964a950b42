"""Random models of transformers, imported onto layouts of ranks, for the tests and `make verify-all`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import compositions
from expert_models import DEEPSEEK, GROUPS, MIXTRAL, OLMOE, QWEN, YARN
from forge_train_tools.configuration.request import Request
from forge_train_tools.offline.hf_request import starting_from

SHAPE: Mapping[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": None,
}
GPT2: Mapping[str, Any] = {
    "vocab_size": 300,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.1,
    "attn_pdrop": 0.0,
}
WINDOW = {"sliding_window": 5}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 9.0]}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 20, **WINDOW}
DEEP = {**DEEPSEEK, **GROUPS, "num_hidden_layers": 2, "aux_loss_alpha": 0.01}
LOADED = {"router_aux_loss_coef": 0.01}
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True}),
    "mistral": ("Mistral", WINDOW),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}),
    "gemma2": ("Gemma2", GEMMA),
    "gemma3": ("Gemma3", {"sliding_window_pattern": 2, **GEMMA}),
    "mixtral": ("Mixtral", {**MIXTRAL, **LOADED}),
    "qwen3_moe": ("Qwen3Moe", {**QWEN, **LOADED, "mlp_only_layers": [0]}),
    "olmoe": ("Olmoe", {**OLMOE, **LOADED}),
    "deepseek_v2": ("DeepseekV2", {**DEEP, "topk_method": "group_limited_greedy"}),
    "phi3": (
        "Phi3",
        {
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 32,
            "rope_parameters": LONG,
            **WINDOW,
        },
    ),
    "gpt2": ("GPT2", GPT2),
    "gpt_oss": (
        "GptOss",
        {
            **LOADED,
            **WINDOW,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "output_router_logits": True,
        },
    ),
    "deepseek_v3": ("DeepseekV3", {**DEEP, "rope_parameters": YARN, "first_k_dense_replace": 0}),
}
"""Family → its class in transformers, and keys of its configuration."""
EXPERTS = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss")
LAYOUTS: Mapping[str, tuple[int, tuple[str, ...], Mapping[str, Any]]] = {
    "tp2×dp2": (4, ("tp", "fsdp2"), {"parallel.tp": 2, "train.micro_batch": 3}),
    "pp2": (2, ("pp",), {"parallel.pp": 2, "train.micro_batch": 3}),
    "cp2": (2, ("cp", "fsdp2"), {"parallel.cp": 2, "cp.method": "gather", "train.micro_batch": 6}),
    "ep2": (2, ("ep", "fsdp2"), {"parallel.ep": 2, "train.micro_batch": 3}),
}
"""Layout → processes, plugins and settings."""
BATCH = 6


@dataclass(frozen=True)
class Imported:
    """A family on a layout."""

    family: str
    layout: str

    def __str__(self) -> str:
        return f"{self.family}, {self.layout}"

    @property
    def row(self) -> tuple[str, str]:
        return self.layout, "experts" if self.family in EXPERTS else "dense"

    @property
    def world(self) -> int:
        return LAYOUTS[self.layout][0]

    def request(self, file: Path) -> Request:
        """What `forge verify` is asked for it."""
        _, plugins, settings = LAYOUTS[self.layout]
        return self._request(file, plugins, settings)

    def reference(self, file: Path) -> Request:
        """The same on one process."""
        return self._request(file, (), {"train.micro_batch": BATCH})

    def _request(self, file: Path, plugins: tuple[str, ...], settings: Mapping[str, Any]) -> Request:
        whole = {"train.global_batch": BATCH, "train.steps": 3, **settings}
        asked = compositions._request(file, plugins, whole)
        return starting_from(Request(asked.config, asked.plugins, set=asked.set, model_from=str(self._folder(file))))

    def _folder(self, file: Path) -> Path:
        """Where the model lies, which is made once."""
        folder = file.parent / self.family
        if not folder.exists():
            import transformers

            name, values = FAMILIES[self.family]
            torch.manual_seed(0)
            kind = f"{'Gemma3Text' if name == 'Gemma3' else name}Config"
            config = getattr(transformers, kind)(**(values if name == "GPT2" else {**SHAPE, **values}))
            model = transformers.AutoModelForCausalLM.from_config(config)
            model.save_pretrained(folder)
        return folder


def product() -> Iterator[Imported]:
    """Every family on every layout that is one for it."""
    for family in FAMILIES:
        yield from (Imported(family, layout) for layout in LAYOUTS if layout != "ep2" or family in EXPERTS)
