"""Tiny random classes of transformers that read images, with their processors, for tests of the plugin `hf_images`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
    "max_position_embeddings": 256,
}
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
QWEN_SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
GRID = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SPECIAL = {
    "llava": ("<image>",),
    "idefics3": ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *GRID),
    "internvl": ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
    **dict.fromkeys(QWEN, QWEN_SPECIAL),
}
KINDS = tuple(SPECIAL)


def prompts(kind: str) -> tuple[str, str]:
    """A text with one image, and one with two."""
    image = SPECIAL[kind][0]
    image = f"<|vision_start|> {image} <|vision_end|>" if kind in QWEN else image
    return f"a b {image} c d", f"{image} e {image} f a b"


SIZES = {"a": (20, 20), "b": (40, 24), "c": (33, 64)}
"""Picture → width and height."""


def words(kind: str) -> list[str]:
    """The vocabulary."""
    return ["?", "</s>", *"abcdefgh", *SPECIAL[kind]]


def config(kind: str) -> Any:
    import transformers

    known = words(kind)
    text = {**TEXT, "vocab_size": len(known)}
    if kind == "llava":
        return transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**VISION, image_size=20, patch_size=5),
            text_config=transformers.LlamaConfig(**text),
            image_token_id=known.index("<image>"),
            image_seq_length=16,
        )
    if kind == "idefics3":
        return transformers.Idefics3Config(
            vision_config={**VISION, "image_size": 16, "patch_size": 4},
            text_config=transformers.LlamaConfig(**text),
            image_token_id=known.index("<image>"),
            scale_factor=2,
        )
    if kind == "internvl":
        return transformers.InternVLConfig(
            vision_config={**VISION, "image_size": (16, 16), "patch_size": (4, 4)},
            text_config=transformers.Qwen2Config(**text),
            image_token_id=known.index("<IMG_CONTEXT>"),
            image_seq_length=4,
        )
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 4}
    vision |= {
        "qwen2_vl": {"embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2},
        "qwen2_5_vl": {
            "hidden_size": 24,
            "intermediate_size": 40,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        "qwen3_vl": {
            "hidden_size": 24,
            "intermediate_size": 40,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
    }[kind]
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 2, 1]}
    ids = {f"{name}_token_id": known.index(f"<|{name}_pad|>") for name in ("image", "video")}
    ids |= {f"vision_{end}_token_id": known.index(f"<|vision_{end}|>") for end in ("start", "end")}
    text |= {"rope_parameters": rope, **({"head_dim": 8} if kind == "qwen3_vl" else {})}
    made: Any = transformers.AutoConfig.for_model(kind, vision_config=vision, text_config=text, **ids)
    return made


def reference(kind: str) -> Any:
    """A random model of the class."""
    import transformers

    model = transformers.AutoModelForImageTextToText.from_config(config(kind), attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.normal_(mean, 0.2, generator=generator)
    return model


def saved(folder: Path, kind: str, model: Any = None) -> Path:
    """A folder as it is published: weights, tokenizer, and the files of the processor; and pictures."""
    import tokenizers
    import transformers
    from PIL import Image

    (model or reference(kind)).save_pretrained(folder)
    known = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(words(kind))}, "?"))
    known.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    known.add_special_tokens(["</s>", *SPECIAL[kind]])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=known, eos_token="</s>", unk_token="?", pad_token="</s>", **_named(kind)
    )
    tokenizer.save_pretrained(folder)
    _images(kind).save_pretrained(folder)
    more: dict[str, dict[str, Any]] = {
        "llava": {"patch_size": 5, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "idefics3": {"image_seq_len": 4},
        "internvl": {"image_seq_length": 4},
    }
    names = {"llava": "LlavaProcessor", "idefics3": "Idefics3Processor", "internvl": "InternVLProcessor"}
    if kind in more:
        described = {"processor_class": names[kind], **more[kind]}
        (folder / "processor_config.json").write_text(json.dumps(described))
    draw = torch.Generator().manual_seed(0)
    for name, (width, height) in SIZES.items():
        pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=draw)
        Image.fromarray(pixels.numpy()).save(folder / f"{name}.png")
    return folder


def _images(kind: str) -> Any:
    import transformers

    if kind == "llava":
        crop = {"height": 20, "width": 20}
        return transformers.CLIPImageProcessorPil(size={"shortest_edge": 20}, crop_size=crop)
    if kind == "idefics3":
        return transformers.Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    if kind == "internvl":
        return transformers.GotOcr2ImageProcessorPil(
            size={"height": 16, "width": 16}, crop_to_patches=True, max_patches=4
        )
    size = {"shortest_edge": 64, "longest_edge": 1024}
    return transformers.Qwen2VLImageProcessorPil(size=size, patch_size=4, merge_size=2)


def _named(kind: str) -> dict[str, Any]:
    """Attributes of the tokenizer that a processor asks for."""
    if kind != "internvl":
        return {}
    context, start, end, video = SPECIAL[kind]
    named = {"context_image_token": context, "start_image_token": start, "end_image_token": end, "video_token": video}
    return {"extra_special_tokens": named}
