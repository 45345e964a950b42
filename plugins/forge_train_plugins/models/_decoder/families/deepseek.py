"""DeepSeek V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437): latent attention, and routed and shared experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import experts
from .family import ATTENTION_BIAS, BLOCK, Family, Key, Part, Sections
from .positions import LLAMAS
from .reader import Reader

if TYPE_CHECKING:
    from ...decoder import Decoder

NAMES = {
    **{ours: theirs for ours, theirs in BLOCK.items() if not ours.startswith("attention.")},
    "attention.q_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_b": "self_attn.kv_b_proj",
    "attention.o": "self_attn.o_proj",
    **{f"feed_forward.shared.{one}": f"mlp.shared_experts.{one}_proj" for one in ("gate", "up", "down")},
}
BY_LENGTH = ("dynamic", "longrope")
"""Scalings whose rotation depends on the length of a sequence."""
AHEAD = 16
"""The most modules for multi-token prediction that files may hold after the last layer."""


def _queries(sections: Sections) -> dict[str, str]:
    """The query projection has another name if it has no latent."""
    return {"attention.q_b": f"self_attn.q{'_b' if sections['mla']['q_rank'] else ''}_proj"}


def _latent(*, interleaved: bool | None) -> Part:
    """Latent attention.

    Args:
        interleaved: whether the two rotated features of a pair are neighbours; None to read `rope_interleave`.
    """
    ranks = {"kv_lora_rank": "kv_rank", "qk_rope_head_dim": "rope_dim", "v_head_dim": "v_dim"}
    missing = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}

    def read(config: Reader, sections: Sections) -> dict[str, Any]:
        decoder = sections["decoder"]
        if decoder["kv_heads"] != decoder["heads"]:
            config.refuse("num_key_value_heads", f"latent attention needs one for each of the {decoder['heads']} heads")
        if (scaling := decoder["rope"].get("scaling")) in BY_LENGTH:
            key = "rope_scaling" if config.table.get("rope_scaling") else "rope_parameters"
            config.refuse(key, f"latent attention does not support {scaling!r}, which depends on the length")
        found: dict[str, Any] = {ours: config.integer(theirs, missing[theirs]) for theirs, ours in ranks.items()}
        if interleaved is None and config.table.get("head_dim") not in (None, found["rope_dim"]):
            config.refuse("head_dim", f"it must equal qk_rope_head_dim, which is {found['rope_dim']}")
        null = "q_lora_rank" in config.table and config.get("q_lora_rank", None) is None
        found["q_rank"] = 0 if null else config.integer("q_lora_rank", 1536)
        table = config.table.get("rope_scaling") or config.table.get("rope_parameters") or {}
        found["mscale"] = Reader(table, "rope_scaling.").number("mscale_all_dim", 0.0)
        found["interleaved"] = config.flag("rope_interleave", True) if interleaved is None else interleaved
        return found

    def write(section: Any, decoder: Decoder.Config) -> dict[str, Any]:
        found: dict[str, Any] = {theirs: getattr(section, ours) for theirs, ours in ranks.items()}
        found |= {"v_head_dim": section.v_dim or decoder.head_dim, "q_lora_rank": section.q_rank or None}
        found |= {"rope_interleave": section.interleaved} if interleaved is None else {}
        if section.mscale:
            table = LLAMAS.write(decoder)["rope_scaling"] or {}
            found["rope_scaling"] = {**table, **_mscales(section.mscale, decoder)}
        return found

    def resolved(section: Any, decoder: Decoder.Config) -> Any:
        return replace(section, v_dim=section.v_dim or decoder.head_dim)

    return Part("mla", read, write, resolved=resolved)


def _mscales(mscale: float, decoder: Decoder.Config) -> dict[str, float]:
    """The factor on logits, and the one that gives cos and sin their factor, for readers without `attention_factor`."""
    found = {"mscale_all_dim": mscale}
    if decoder.rope.temperature and decoder.rope.factor > 1:
        stretch = 0.1 * math.log(decoder.rope.factor)
        found["mscale"] = experts.short((decoder.rope.temperature * (stretch * mscale + 1) - 1) / stretch)
    return found


def _leftovers(decoder: Decoder.Config) -> tuple[str, ...]:
    """Modules for multi-token prediction, which files store after the last layer."""
    return tuple(rf"model\.layers\.{decoder.layers + ahead}\..*" for ahead in range(AHEAD))


TAIL = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "norm": "shared_head.norm"}
KEYS = {**ATTENTION_BIAS, "qk_nope_head_dim": Key(("head_dim",), int, 128)}
IGNORED = (
    *("head_dim", "qk_head_dim", "rope_interleave", "auto_map", "ep_size", "output_router_logits"),
    *("num_nextn_predict_layers", "num_mtp_layers"),
)
EXPERTS = {
    "routed_scaling_factor": Key(("scaling",), float, 1.0),
    "aux_loss_alpha": Key(("balance",), float, 0.001),
    "seq_aux": Key(
        ("balance_over",),
        bool,
        True,
        ours=lambda each: "sequence" if each else "batch",
        theirs=lambda over: over == "sequence",
    ),
}


def _read_method(config: Reader, count: int) -> dict[str, Any]:
    """V2 selects groups in only one of its two methods."""
    limited = config.one_of("topk_method", {"greedy": "", "group_limited_greedy": "groups"}, "greedy")
    config.skip("n_group", "topk_group")
    if not limited:
        return {}
    return {"groups": config.integer("n_group"), "top_groups": config.integer("topk_group"), "group_best": 1}


def _write_method(section: Any, count: int) -> dict[str, Any]:
    dense = _write_dense(section, count)
    if section.groups == 1:
        return {**dense, "topk_method": "greedy"}
    groups = {"n_group": section.groups, "topk_group": section.top_groups}
    return {**dense, "topk_method": "group_limited_greedy", **groups}


def _write_dense(section: Any, count: int) -> dict[str, Any]:
    return {"first_k_dense_replace": count - len(section.layers(count))}


DEEPSEEK2 = Family(
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    keys=KEYS,
    ignored=IGNORED,
    spellings={"num_experts": "n_routed_experts"},
    block=NAMES,
    by_sections=_queries,
    leftovers=_leftovers,
    tensors=experts.tensors(),
    parts=(
        _latent(interleaved=True),
        experts.part(
            {
                **EXPERTS,
                "n_routed_experts": Key(("experts",), int, 64),
                "n_shared_experts": Key(("shared",), int, 2, positive=True),
                "num_experts_per_tok": Key(("top_k",), int),
                "moe_intermediate_size": Key(("hidden",), int, 1407),
                "first_k_dense_replace": Key(("dense_first",), int, 0),
            },
            {"router": "softmax", "normalise": False},
            fixed={"moe_layer_freq": 1, "scoring_func": "softmax", "norm_topk_prob": False},
            read_more=_read_method,
            write_more=_write_method,
        ),
    ),
)
DEEPSEEK3 = Family(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    exact=(r".*\.e_score_correction_bias",),
    keys=KEYS,
    ignored=IGNORED,
    spellings={"num_local_experts": "n_routed_experts"},
    block=NAMES,
    by_sections=_queries,
    leftovers=_leftovers,
    ahead=TAIL,
    tensors=experts.tensors(router={"gate.weight": "weight", "gate.e_score_correction_bias": "bias"}),
    parts=(
        _latent(interleaved=None),
        experts.part(
            {
                **EXPERTS,
                "n_routed_experts": Key(("experts",), int, 256),
                "n_shared_experts": Key(("shared",), int, 1, positive=True),
                "num_experts_per_tok": Key(("top_k",), int, 8),
                "moe_intermediate_size": Key(("hidden",), int, 2048),
                "first_k_dense_replace": Key(("dense_first",), int, 3),
                "norm_topk_prob": Key(("normalise",), bool, True),
                "routed_scaling_factor": Key(("scaling",), float, 2.5),
                "n_group": Key(("groups",), int, 8),
                "topk_group": Key(("top_groups",), int, 4),
            },
            {"router": "sigmoid", "bias_speed": 0.001},
            fixed={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
            write_more=lambda section, count: {**_write_dense(section, count), "num_nextn_predict_layers": 0},
        ),
    ),
)
