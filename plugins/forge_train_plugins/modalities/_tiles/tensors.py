"""The names of Llama 3.2 Vision's tensors, and where Forge has them."""

from __future__ import annotations

from collections.abc import Sequence

from forge_train_kit.state_map import Flatten, Rename, StateMap, Transpose

INTO = "fusion.items.encoders.image."
BLOCK = {
    "attention_norm": "input_layernorm",
    **{one: f"self_attn.{one}_proj" for one in "qkvo"},
    "feed_forward_norm": "post_attention_layernorm",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
"""Module in a block of the encoder → its name in this layout."""
GATES = {"attention_gate.weight": "gate_attn", "feed_forward_gate.weight": "gate_ffn"}
"""Of a global block."""
CROSS = {
    "attention_norm.weight": "input_layernorm.weight",
    **{f"attention.{one}.weight": f"cross_attn.{one}_proj.weight" for one in "qkvo"},
    **{f"attention.{one}_norm.weight": f"cross_attn.{one}_norm.weight" for one in "qk"},
    "attention_gate.weight": "cross_attn_attn_gate",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    **{f"feed_forward.{one}.weight": f"mlp.{one}_proj.weight" for one in ("gate", "up", "down")},
    "feed_forward_gate.weight": "cross_attn_mlp_gate",
}
"""Parameter of a layer that attends to images → its name."""
OUTER = {
    "class_token.weight": "class_embedding",
    "positions.weight": "gated_positional_embedding.embedding",
    "positions_gate.weight": "gated_positional_embedding.gate",
    "image_positions.weight": "gated_positional_embedding.tile_embedding.weight",
    "first_tiles.table.weight": "pre_tile_positional_embedding.embedding.weight",
    "first_tiles.gate.weight": "pre_tile_positional_embedding.gate",
    "second_tiles.table.weight": "post_tile_positional_embedding.embedding.weight",
    "second_tiles.gate.weight": "post_tile_positional_embedding.gate",
    **{f"first_norm.{kind}": f"layernorm_pre.{kind}" for kind in ("weight", "bias")},
    **{f"second_norm.{kind}": f"layernorm_post.{kind}" for kind in ("weight", "bias")},
}
"""Parameter of the encoder outside of its blocks → its name."""
OLDER: tuple[StateMap, ...] = (
    Rename(
        {
            "model.language_model.{name*}": "language_model.model.{name*}",
            "lm_head.{kind}": "language_model.lm_head.{kind}",
            "model.vision_model.{name*}": "vision_model.{name*}",
            "model.multi_modal_projector.{name*}": "multi_modal_projector.{name*}",
        }
    ),
)
"""Names in memory → those of published folders."""


def text_names(layers: int, at: Sequence[int]) -> StateMap:
    """The language model's names here → those that it has alone.

    Args:
        layers: of both kinds.
        at: those that attend to images.
    """
    own = [index for index in range(layers) if index not in at]
    names = {
        f"language_model.model.layers.{old}.{{name*}}": f"model.layers.{new}.{{name*}}" for new, old in enumerate(own)
    }
    names |= {f"language_model.model.{one}.weight": f"model.{one}.weight" for one in ("embed_tokens", "norm")}
    return Rename({**names, "language_model.lm_head.{kind}": "lm_head.{kind}"})


def around(at: Sequence[int], patch: int) -> StateMap:
    """The map of all other tensors to Forge's parameters.

    Args:
        at: layers that attend to images, in order.
        patch: side of a patch in pixels.
    """
    convolution = "vision_model.patch_embedding.weight"
    # [dim, colours, rows, columns]: a patch's pixels come in reading order, each with its colours
    one = (convolution,)
    cut = Transpose(one, (1, 2)) >> Transpose(one, (2, 3)) >> Flatten(one, (patch, patch, 3))
    names = {f"vision_model.{theirs}": f"{INTO}vision.{ours}" for ours, theirs in OUTER.items()}
    for theirs, ours in {"transformer": "layers", "global_transformer": "global_layers"}.items():
        stack = f"vision_model.{theirs}.layers.{{i}}.", f"{INTO}vision.{ours}.{{i}}."
        names |= {f"{stack[0]}{old}.{{kind}}": f"{stack[1]}{new}.{{kind}}" for new, old in BLOCK.items()}
        if ours == "global_layers":
            names |= {f"{stack[0]}{old}": f"{stack[1]}{new}" for new, old in GATES.items()}
    for before, index in enumerate(at):
        layer = f"language_model.model.layers.{index}.", f"fusion.layers.{index - before}."
        names |= {f"{layer[0]}{old}": f"{layer[1]}{new}" for new, old in CROSS.items()}
    names |= {f"multi_modal_projector.{kind}": f"{INTO}connector.{kind}" for kind in ("weight", "bias")}
    return (cut >> Rename({convolution: f"{INTO}vision.patches.weight"})) | Rename(names)
