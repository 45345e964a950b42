"""GPT-OSS (arXiv:2508.10925): sinks, windows in every other layer, experts with biases and a clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forge_train.state_map import DequantiseMXFP4, Rename, Split, Transpose

from . import experts
from .family import BLOCK, Family, Key, Sections
from .positions import Rotation, Windows
from .reader import Reader

if TYPE_CHECKING:
    from forge_train.state_map import StateMap

    from ....experts.moe import MoE
    from ...decoder import Decoder

AT, TO = "model.layers.{i}.mlp", "layers.{i}.feed_forward.routed"
GATED, DOWN = f"{AT}.experts.gate_up_proj", f"{AT}.experts.down_proj"


def _tensors(config: Decoder.Config) -> tuple[StateMap, ...]:
    """As transformers has them, and with experts in MXFP4, as published."""
    import torch

    gate, up, down = (f"{TO}.experts.{one}" for one in ("gate", "up", "down"))
    beside = Rename(
        {
            "model.layers.{i}.self_attn.sinks": "layers.{i}.attention.sink.weight",
            f"{AT}.router.weight": f"{TO}.router.weight",
            f"{AT}.router.bias": f"{TO}.router.logit_bias",
            f"{DOWN}_bias": f"{down}_bias",
        }
    ) | Split(f"{GATED}_bias", (f"{gate}_bias", f"{up}_bias"), dim=1, groups=0)
    plain = (Split(GATED, (gate, up), dim=2, groups=0) | Rename({DOWN: down})) >> Transpose((gate, up, down), (1, 2))
    narrow = DequantiseMXFP4(f"{GATED}_blocks", f"{GATED}_scales", GATED, torch.bfloat16) >> Split(
        GATED, (gate, up), dim=1, groups=0
    )
    narrow_down = DequantiseMXFP4(f"{DOWN}_blocks", f"{DOWN}_scales", down, torch.bfloat16)
    return beside | plain, beside | narrow | narrow_down


EXPERTS = experts.part(
    {
        "num_local_experts": Key(("experts",), missing=128),
        "num_experts_per_tok": Key(("top_k",), missing=4),
        "intermediate_size": Key(("hidden",), missing=2880),
        "swiglu_alpha": Key(("alpha",), float, 1.702, positive=True),
        "swiglu_limit": Key(("limit",), float, 7.0, positive=True),
    },
    {"activation": "clamped_swiglu", "bias": True, "normalise": True},
    loss=("router_aux_loss_coef", 0.001),
)


def _read(config: Reader, sections: Sections) -> dict[str, Any]:
    section = EXPERTS.read(config, sections)
    if not config.flag("output_router_logits", False):  # then transformers adds no loss, and the files have 0.9
        section["balance"] = 0.0
    quantised = config.get("quantization_config", {})
    if not isinstance(quantised, Mapping) or quantised.get("quant_method", "mxfp4") != "mxfp4":
        config.refuse("quantization_config", "expected quant_method = 'mxfp4'")
    return section


def _write(section: MoE.Config, decoder: Decoder.Config) -> dict[str, Any]:
    return EXPERTS.write(section, decoder) | {"output_router_logits": section.balance > 0}


GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    options={"sinks": True},
    keys={
        "rms_norm_eps": Key(("norm_eps",), float, 1e-5),
        "attention_bias": Key(("qkv_bias", "o_bias"), bool, True),
        "max_position_embeddings": Key(("max_sequence",), missing=131072),
        "intermediate_size": Key(("hidden",), missing=2880),
    },
    kv_heads=8,
    head_dim=64,
    rotation=Rotation(
        1.5e5,
        scaled={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    windows=Windows(lambda config, layers: tuple(index % 2 == 0 for index in range(layers)), missing=128),
    block={ours: theirs for ours, theirs in BLOCK.items() if not ours.startswith("feed_forward.")},
    ignored=("hidden_act", "initial_context_length"),
    unused=("hidden",),
    spellings={"experts_per_token": "num_experts_per_tok", "num_experts": "num_local_experts"},
    parts=(replace(EXPERTS, read=_read, write=_write),),
    tensors=_tensors,
)
