"""The vision models of SigLIP (arXiv:2303.15343) and CLIP (arXiv:2103.00020), as transformers stores them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError
from forge_train_kit.hf import HFModel
from forge_train_kit.state_map import Flatten, Rename, StateMap, Transpose

if TYPE_CHECKING:
    from .section import VisionSection

SIZES = {
    "hidden_size": "dim",
    "intermediate_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "image_size": "size",
    "patch_size": "patch",
    "layer_norm_eps": "norm_eps",
}
"""Key of the `vision_config` → option of `[image]`."""
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu"}
"""`hidden_act` → `image.activation`."""
COMMON = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
}
MISSING: dict[str, dict[str, Any]] = {
    "siglip_vision_model": {
        **COMMON,
        "patch_size": 16,
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "clip_vision_model": {**COMMON, "patch_size": 32, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"},
}
"""`model_type` → values of keys that a file leaves out."""
OPTIONS: dict[str, dict[str, Any]] = {
    "siglip_vision_model": {},
    "clip_vision_model": {
        "class_token": True,
        "patch_bias": False,
        "first_norm": True,
        "mean": (0.48145466, 0.4578275, 0.40821073),
        "deviation": (0.26862954, 0.26130258, 0.27577711),
    },
}
"""`model_type` → options that all its models share."""
PLAIN: dict[str, Any] = {"norm": "layer", "norm_place": "before", "gated": False, "window": 0, "patch_frames": 1}
"""Options of neither family, with the values that stand for none of them."""
BLOCK = {
    "attention_norm": "layer_norm1",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "feed_forward_norm": "layer_norm2",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
"""Module in a block → its name in both families."""


def read(config: Mapping[str, Any], prefix: str = "", layer: int | None = None, into: str = "") -> HFModel:
    """Read a `vision_config`: the options of `[image]`, and the map of its tensors to those of an encoder.

    Args:
        config: of the `model_type` siglip_vision_model or clip_vision_model.
        prefix: of the tensors' names, such as `vision_tower.vision_model.`.
        layer: the entry of transformers' `hidden_states` that is taken, such as −2 for the last block but one; None for
            `last_hidden_state`. The blocks after it are left out.
        into: the prefix of the parameters' names.

    Raises:
        ConfigError: naming a key whose value has no counterpart.
    """
    kind = config.get("model_type")
    if kind not in MISSING:
        raise ConfigError(f"vision_config: model_type: expected one of {', '.join(MISSING)}, found {kind!r}.")
    given = {**MISSING[kind], **{key: value for key, value in config.items() if value is not None}}
    if given["hidden_act"] not in ACTIVATIONS:
        raise ConfigError(
            f"vision_config: hidden_act: expected one of {', '.join(ACTIVATIONS)}, found {given['hidden_act']!r}."
        )
    for key, neutral in (("attention_dropout", 0), ("num_channels", 3)):
        if given.get(key, neutral) != neutral:
            raise ConfigError(f"vision_config: {key}: expected {neutral}, found {given[key]!r}.")
    if given["image_size"] % given["patch_size"]:
        raise ConfigError(
            f"vision_config: image_size: {given['image_size']} is no multiple of patch_size = {given['patch_size']}."
        )
    layers = given["num_hidden_layers"]
    if layer is not None and not -layers <= layer + 1 <= layers + 1:
        raise ConfigError(f"vision_feature_layer: {layer} is not among the {layers} layers of vision_config.")
    used = layers if layer is None else range(layers + 1)[layer]
    options = {
        **{option: given[key] for key, option in SIZES.items()},
        **OPTIONS[kind],
        "activation": ACTIVATIONS[given["hidden_act"]],
        "layers": used,
        "merge": 1,
        "final_norm": layer is None and kind == "siglip_vision_model",
    }
    left = "|".join(str(index) for index in range(used, layers))
    leftovers = (r"head\..*", r".*position_ids", *([rf"encoder\.layers\.({left})\..*"] if left else []))
    leftovers += () if options["final_norm"] else (r"post_layernorm\..*",)
    return HFModel(
        map=tensors(options, prefix, into),
        config=dict(config),
        sections={"image": options},
        leftovers=tuple(prefix.replace(".", r"\.") + one for one in leftovers),
    )


def write(options: VisionSection) -> dict[str, Any]:
    """The `vision_config` of an encoder.

    Raises:
        ConfigError: naming an option that neither family has.
    """
    kind = "clip_vision_model" if options.class_token else "siglip_vision_model"
    shared = {"class_token": False, "patch_bias": True, "first_norm": False, "bias": True, "fit": "square", **PLAIN}
    shared |= {key: value for key, value in OPTIONS[kind].items() if key in shared}
    for key, value in {**shared, "final_norm": kind == "siglip_vision_model"}.items():
        if (found := getattr(options, key)) != value:
            raise ConfigError(f"image.{key}: {kind} in Hugging Face layout has {value!r}, found {found!r}.")
    back = {option: name for name, option in ACTIVATIONS.items()}
    if options.activation not in back:
        raise ConfigError(
            f"image.activation: {kind} in Hugging Face layout has one of {', '.join(back)}, found "
            f"{options.activation!r}."
        )
    return {
        "model_type": kind,
        **{key: getattr(options, option) for key, option in SIZES.items()},
        "intermediate_size": options.hidden or 4 * options.dim,
        "hidden_act": back[options.activation],
        "attention_dropout": 0.0,
        "num_channels": 3,
    }


def tensors(options: Mapping[str, Any], prefix: str = "", into: str = "") -> StateMap:
    """The map of a family's tensors to the parameters of a `VisionTransformer` with these options."""
    patch, name = options["patch"], f"{prefix}embeddings.patch_embedding.weight"
    # [dim, colours, rows, columns] of a convolution: a patch's pixels come in reading order, each with its colours
    cut = Transpose((name,), (1, 2)) >> Transpose((name,), (2, 3)) >> Flatten((name,), (patch, patch, 3))
    names = {f"{prefix}embeddings.position_embedding.weight": "positions.table.weight"}
    modules = {f"encoder.layers.{{i}}.{theirs}": f"layers.{{i}}.{ours}" for ours, theirs in BLOCK.items()}
    if options.get("final_norm", True):
        modules["post_layernorm"] = "norm"
    if options.get("class_token"):
        names[f"{prefix}embeddings.class_embedding"] = "class_token.weight"
    if options.get("first_norm"):
        modules["pre_layrnorm"] = "first_norm"  # so spelled
    if options.get("patch_bias", True):
        names[f"{prefix}embeddings.patch_embedding.bias"] = "patches.bias"
    for theirs, ours in modules.items():
        names |= {f"{prefix}{theirs}.{kind}": f"{ours}.{kind}" for kind in ("weight", "bias")}
    return (cut >> Rename({name: f"{into}patches.weight"})) | Rename({old: into + new for old, new in names.items()})
