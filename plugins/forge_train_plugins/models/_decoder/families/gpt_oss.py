"""GPT-OSS (arXiv:2508.10925): sinks, windows in every other layer, experts with biases and a clamped SwiGLU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_train_kit.state_map import Rename, Split, Transpose

from . import experts
from .family import BLOCK, Family, Key
from .positions import Rotation, Windows
from .reader import Reader

if TYPE_CHECKING:
    from forge_train_kit.state_map import StateMap

    from ...decoder import Decoder

AT, TO = "model.layers.{i}.mlp", "layers.{i}.feed_forward.routed"


def _tensors(config: Decoder.Config) -> tuple[StateMap, ...]:
    gate, up, down = (f"{TO}.experts.{one}" for one in ("gate", "up", "down"))
    renamed = Rename(
        {
            "model.layers.{i}.self_attn.sinks": "layers.{i}.attention.sink.weight",
            f"{AT}.router.weight": f"{TO}.router.weight",
            f"{AT}.router.bias": f"{TO}.router.logit_bias",
            f"{AT}.experts.down_proj": down,
            f"{AT}.experts.down_proj_bias": f"{down}_bias",
        }
    )
    gated = f"{AT}.experts.gate_up_proj"
    matrices = Split(gated, (gate, up), dim=2, groups=0)
    biases = Split(f"{gated}_bias", (f"{gate}_bias", f"{up}_bias"), dim=1, groups=0)
    return ((renamed | matrices | biases) >> Transpose((gate, up, down), (1, 2)),)


def _loss(config: Reader, count: int) -> dict[str, float]:
    """transformers adds this loss only on request, although published files give it a weight of 0.9."""
    return {} if config.flag("output_router_logits", False) else {"balance": 0.0}


GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    options={"sinks": True},
    keys={
        "rms_norm_eps": Key(("norm_eps",), float, 1e-5),
        "attention_bias": Key(("qkv_bias", "o_bias"), bool, True),
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
    parts=(
        experts.part(
            {
                "num_local_experts": Key(("experts",), missing=128),
                "num_experts_per_tok": Key(("top_k",), missing=4),
                "intermediate_size": Key(("hidden",), missing=2880),
                "swiglu_alpha": Key(("alpha",), float, 1.702, positive=True),
                "swiglu_limit": Key(("limit",), float, 7.0, positive=True),
            },
            {"activation": "clamped_swiglu", "bias": True, "normalise": True},
            read_more=_loss,
            write_more=lambda section, count: {"output_router_logits": section.balance > 0},
        ),
    ),
    tensors=_tensors,
)
