"""Qwen2.5-VL of transformers: logits, gradients and texts, at the end of an import and after an export."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import transformers
from safetensors import torch as safetensors
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import fakes
from forge_train import ConfigError
from forge_train_kit.data.items import ItemPrompts, padded
from forge_train_kit.hf import HFModel
from forge_train_kit.state_map import Rename
from forge_train_plugins.modalities._vision import families, llava, processor
from forge_train_plugins.modalities._vision.modality import Pictures
from forge_train_plugins.modalities._vision.qwen_vl import read
from forge_train_plugins.modalities._vision.qwen_vl_export import write
from forge_train_plugins.modalities.vision import Image
from forge_train_plugins.models.decoder import Decoder
from forge_train_tools import open_model
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint

tokenizers = pytest.importorskip("tokenizers")
images = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.unit

VISION = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 15,
    "bos_token_id": None,
    "eos_token_id": 1,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 2, 1]},
}
SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
WORDS = ["?", "</s>", *"abcdefgh", *SPECIAL]
PICTURE = "<|vision_start|> <|image_pad|> <|vision_end|>"
PROMPTS = {f"a b {PICTURE} c d": "a", f"{PICTURE} e {PICTURE} f a b": "ba"}
FILE = {"size": {"shortest_edge": 300, "longest_edge": 1000}, "patch_size": 4, "image_mean": [0.4, 0.5, 0.6]}


def reference(**text: Any) -> Any:
    config = transformers.Qwen2_5_VLConfig(vision_config=VISION, **around(**text))
    return fakes.initialised(transformers.Qwen2_5_VLForConditionalGeneration(config).eval())


def around(**text: Any) -> dict[str, Any]:
    """The description of a model, without its vision model."""
    tied = {"tie_word_embeddings": text.pop("tie_word_embeddings", False)}
    ids = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    numbers = {f"{name}_token_id": WORDS.index(f"<|{token}|>") for name, token in ids.items()}
    return {"text_config": {**copy.deepcopy(TEXT), **text}, **numbers, **tied}


def saved(folder: Path, model: Any) -> Path:
    """A folder as it is published, with a tokenizer and the file for images."""
    model.save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(WORDS)}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["</s>", *SPECIAL])
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "preprocessor_config.json").write_text(json.dumps(FILE))
    draw = torch.Generator().manual_seed(0)
    for name, size in (("a", (24, 40)), ("b", (13, 21))):
        pixels = torch.randint(0, 256, (*size, 3), dtype=torch.uint8, generator=draw)
        images.fromarray(pixels.numpy()).save(folder / f"{name}.png")
    return folder


def seen(folder: Path, names: str) -> Any:
    """What the image processor of transformers makes of images."""
    arrays = [numpy.array(images.open(folder / f"{name}.png")) for name in names]
    return Qwen2VLImageProcessorPil(**FILE)(arrays, return_tensors="pt")


def placed(opened: Any, folder: Path, text: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    prompts, files = ItemPrompts(opened._opened.job), [str(folder / f"{name}.png") for name in PROMPTS[text]]
    ids, items = prompts.place(prompts.tokenizer.encode(text), {"image": files}, "a prompt", "/")
    return torch.tensor([ids]), {name: torch.from_numpy(one) for name, one in padded([items.read(len(ids))]).items()}


def agree(opened: Any, theirs: Any, folder: Path) -> None:
    module = opened.module
    for text, names in PROMPTS.items():
        tokens, extras = placed(opened, folder, text)
        given = {**seen(folder, names), "input_ids": tokens}
        assert torch.equal(given["image_grid_thw"], extras["image_grids"][0])
        given["mm_token_type_ids"] = (tokens == WORDS.index("<|image_pad|>")).int()
        ours = module.head(module(tokens, **extras))
        expected = theirs(**given).logits
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        for model, logits in ((module, ours), (theirs, expected)):
            model.zero_grad()
            logits.square().mean().backward()
        compare_gradients(module, theirs, folder)
        written = theirs.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=1, pad_token_id=0)
        files = [str(folder / f"{name}.png") for name in names]
        shown = opened.generate(text, items={"image": files}, tokens=8, temperature=0)
        new = written[0, tokens.shape[1] :].tolist()
        assert new
        assert shown.split() == [WORDS[one] for one in new if one < len(WORDS) and WORDS[one] not in ("</s>", *SPECIAL)]


def compare_gradients(module: Any, theirs: Any, folder: Path) -> None:
    """All of them: theirs are stored as weights, and read like these."""
    model = copy.deepcopy(theirs)
    with torch.no_grad():
        for one, other in zip(model.parameters(), theirs.parameters(), strict=True):
            one.copy_(other.grad)
    expected = dict(open_model(saved(folder / "gradients", model), plugins=["image"]).module.named_parameters())
    mine = dict(module.named_parameters())
    assert mine.keys() == expected.keys()
    for name, one in mine.items():
        assert one.grad is not None
        torch.testing.assert_close(one.grad, expected[name], rtol=1e-5, atol=1e-5, msg=lambda text, at=name: at + text)


TIED = pytest.param({"tie_word_embeddings": True}, marks=pytest.mark.extended, id="tied")


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, TIED])
def test_logits_gradients_and_texts_are_those_of_transformers(more: dict[str, Any], tmp_path: Path) -> None:
    theirs = reference(**more)
    folder = saved(tmp_path / "folder", theirs)
    import_checkpoint(folder, tmp_path / "imported", plugins=("image",))
    opened = open_model(tmp_path / "imported")
    agree(opened, theirs, folder)
    export_checkpoint(tmp_path / "imported", tmp_path / "exported")
    again, told = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
        tmp_path / "exported", output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    for (name, one), other in zip(theirs.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name
    agree(opened, again.eval(), folder)


def test_names_in_memory_are_read(tmp_path: Path) -> None:
    theirs = reference()
    folder = saved(tmp_path / "folder", theirs)
    stored = {name: one.clone() for name, one in theirs.state_dict().items()}
    safetensors.save_file(stored, folder / "model.safetensors")
    module = open_model(folder, plugins=["image"]).module
    tokens = torch.tensor([[2, 3, 4, 5]])
    torch.testing.assert_close(module.head(module(tokens)), theirs(input_ids=tokens).logits, rtol=1e-5, atol=1e-5)
    gate = module.fusion.enter.encoders["image"].vision.layers["1"].gate.weight
    assert torch.equal(gate, stored["model.visual.blocks.1.mlp.gate_proj.weight"])


PUBLISHED = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
}
"""The description of Qwen2.5-VL with 7 billion parameters: the keys of its language model stand beside the others."""


def test_the_published_description_is_read() -> None:
    found = read(PUBLISHED, {"min_pixels": 3136, "max_pixels": 12845056, "image_std": [0.1, 0.2, 0.3]})
    assert found is not None
    text = fakes.make(Decoder).import_hf(found.config)
    assert text is not None
    values, image = text.sections["decoder"], found.model.sections["image"]
    expected = {"dim": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "vocabulary": 152064, "max_sequence": 128000}
    assert {key: values[key] for key in expected} == expected
    assert values["rope"] == {"theta": 1e6, "sections": (16, 24, 24)}
    expected = {"window": 8, "full_layers": (7, 15, 23, 31), "connector_hidden": 5120, "size": 3584, "most_pixels": 0}
    assert {key: image[key] for key in expected} == expected
    assert (image["least_pixels"], image["deviation"]) == (3136, [0.1, 0.2, 0.3])
    plugin = Image(Image.Config(**image))
    assert not list(plugin.check_config())


def test_what_a_file_leaves_out_is_as_in_transformers() -> None:
    usual = transformers.Qwen2_5_VLConfig().to_dict()
    kind = {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    rope = {"mrope_section": [16, 24, 24]}
    vision = {"out_hidden_size": 8192}
    found = [
        read({**kind, "vision_config": vision, "text_config": {"rope_scaling": rope}}, {}),
        read(
            {
                **usual,
                **kind,
                "vision_config": {**usual["vision_config"], **vision},
                "text_config": {
                    **usual["text_config"],
                    "rope_parameters": {**usual["text_config"]["rope_parameters"], **rope},
                },
            },
            {},
        ),
    ]
    short, whole = ((one.model.sections, fakes.make(Decoder).import_hf(one.config)) for one in found if one is not None)
    assert short[0] == whole[0]
    assert short[1] is not None
    assert whole[1] is not None
    assert short[1].sections == whole[1].sections


@pytest.mark.parametrize(
    ("part", "changed", "says"),
    [
        (
            "text_config",
            {"rope_parameters": {"rope_type": "default"}},
            "text_config: rope_parameters: expected an",
        ),
        ("vision_config", {"out_hidden_size": 31}, "vision_config: out_hidden_size: expected 32, found 31"),
        ("vision_config", {"in_channels": 1}, "vision_config: in_channels: expected 3, found 1"),
        ("vision_config", {"hidden_act": "mish"}, "vision_config: hidden_act: expected one of gelu, .* found 'mish'"),
        ("vision_config", {"window_size": 7}, "vision_config: window_size: 7 pixels are less than 2 patches of 4"),
        ("vision_config", {"rope_parameters": {"rope_theta": 9.0}}, "vision_config: rope_parameters: expected"),
    ],
)
def test_a_model_without_counterpart_is_refused(part: str, changed: dict[str, Any], says: str) -> None:
    config = json.loads(json.dumps(reference().config.to_dict()))
    config["architectures"] = ["Qwen2_5_VLForConditionalGeneration"]
    assert read(config, {}) is not None
    config[part] |= changed
    with pytest.raises(ConfigError, match=says):
        read(config, {})


OPTIONS = {"patch": 14, "merge": 2, "patch_frames": 2}


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({}, (980, 3136, 28 * 28 * 1280)),
        ({"size": {"shortest_edge": 3136, "longest_edge": 784 * 9}}, (84, 3136, 0)),
        ({"image_processor": {"max_pixels": 5000, "min_pixels": 9000}}, (56, 5000, 5000)),
        ({"max_pixels": 100}, (28, 100, 100)),
    ],
)
def test_the_file_for_images_is_read(given: dict[str, Any], bounds: tuple[int, ...]) -> None:
    found = processor.read_kept(given, OPTIONS)
    assert (found["size"], found["least_pixels"], found["most_pixels"]) == bounds


def test_a_file_for_images_without_counterpart_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"preprocessor_config.json: merge_size: expected 2, as vision_config has"):
        processor.read_kept({"merge_size": 1}, OPTIONS)
    with pytest.raises(ConfigError, match="do_rescale: expected True"):
        processor.read_kept({"do_rescale": False}, OPTIONS)


@pytest.mark.parametrize(
    ("options", "text", "fusion", "says"),
    [
        ({}, {"rope_scaling": None}, "features", "needs decoder.rope.sections; found none"),
        ({}, {"architectures": ["LlamaForCausalLM"]}, "features", "needs Qwen2ForCausalLM; found LlamaForCausalLM"),
        ({}, {"head_dim": 16}, "features", "heads of width dim / heads; found decoder.head_dim = 16"),
        ({}, {}, "token", "needs images among the tokens; plugin 'it' joins them otherwise"),
        ({"gated": False}, {}, "features", "needs image.gated = True; found False"),
        ({"connector_hidden": 0}, {}, "features", "needs image.connector_hidden = 96; found 32"),
        ({}, {}, "features", r"needs a token for <\|image_pad\|>; this run's tokenizer has none"),
    ],
)
def test_a_model_that_qwen_is_not_is_not_written(
    options: dict[str, Any], text: dict[str, Any], fusion: str, says: str
) -> None:
    config = json.loads(json.dumps(reference().config.to_dict()))
    found = read({**config, "architectures": ["Qwen2_5_VLForConditionalGeneration"]}, {})
    assert found is not None
    section = Image.Config(**{**found.model.sections["image"], **options})
    hooks = SimpleNamespace(
        provider=lambda slot: "" if slot == "tokenizer" else "it", gives=lambda slot: fusion, call=lambda *_, **__: ()
    )
    layout = HFModel(
        Rename({}),
        config={
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 32,
            "num_attention_heads": 4,
            "head_dim": 8,
            "rope_scaling": {"mrope_section": [1, 2, 1]},
            **text,
        },
    )
    job: Any = SimpleNamespace(hooks=hooks)
    with pytest.raises(ConfigError, match=says):
        write(section, Pictures(section), layout, job)


def test_llava_has_neither_sections_nor_windows() -> None:
    job: Any = SimpleNamespace(hooks=SimpleNamespace(provider=lambda slot: "", gives=lambda slot: ""))
    section = Image.Config(merge=1, final_norm=False)
    config = {"architectures": ["Qwen2ForCausalLM"], "rope_scaling": {"mrope_section": [1, 2, 1]}}
    with pytest.raises(
        ConfigError, match="decoder.rope.sections: LLaVA in Hugging Face layout has positions along one"
    ):
        llava.write(section, Pictures(section), HFModel(Rename({}), config=config), job)
    for option, value in {"window": 4, "gated": True, "norm": "rms", "patch_frames": 2, "activation": "silu"}.items():
        with pytest.raises(ConfigError, match=f"image.{option}: siglip_vision_model in Hugging Face layout has"):
            families.write(Image.Config(**{option: value}))
