"""Random tiny LLaVA models of transformers: imported, asked, trained and written back."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import fakes
from forge_train import ConfigError
from forge_train_kit.data.items import padded
from forge_train_kit.data.items.prompts import ItemPrompts
from forge_train_kit.hf import HFModel
from forge_train_kit.state_map import Rename
from forge_train_plugins.modalities._vision import processor
from forge_train_plugins.modalities._vision.llava import MISSING, TEXTS, read, write
from forge_train_plugins.modalities._vision.modality import Pictures
from forge_train_plugins.modalities._vision.reading import resized
from forge_train_plugins.modalities.vision import Image
from forge_train_plugins.models.decoder import Decoder
from forge_train_tools import open_model
from forge_train_tools.configuration.request import Request
from forge_train_tools.offline.from_run import from_run
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.offline.imported import imported

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
images = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.unit

VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 20,
    "patch_size": 5,
}
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 11,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
    "max_position_embeddings": 128,
}
WORDS = ["?", "</s>", *"abcdefgh", "<image>"]
MEAN, DEVIATION = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "clip, llama": ("CLIP", "Llama", {}),
    "siglip, qwen": ("Siglip", "Qwen2", {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}),
    "siglip, mistral, tied": (
        "Siglip",
        "Mistral",
        {"vision_feature_select_strategy": "full", "tie_word_embeddings": True},
    ),
}
PROMPTS = ("a b <image> c d", "<image> e <image> f a b")


def reference(vision: str, text: str, **more: Any) -> Any:
    tied = {"tie_word_embeddings": more.get("tie_word_embeddings", False)}
    config = transformers.LlavaConfig(
        vision_config=getattr(transformers, f"{vision}VisionConfig")(**VISION),
        text_config=getattr(transformers, f"{text}Config")(**TEXT, **tied),
        image_token_index=WORDS.index("<image>"),
        image_seq_length=16,
        **more,
    )
    return fakes.initialised(transformers.LlavaForConditionalGeneration(config).eval())


def saved(folder: Path, model: Any) -> Path:
    """A folder as it is published, with a tokenizer and the file for images."""
    model.save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(WORDS)}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["</s>", "<image>"])
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": MEAN, "image_std": DEVIATION, "size": {"height": 20, "width": 20}})
    )
    draw = torch.Generator().manual_seed(0)
    for name in ("a", "b"):
        pixels = torch.randint(0, 256, (20, 20, 3), dtype=torch.uint8, generator=draw)
        images.fromarray(pixels.numpy()).save(folder / f"{name}.png")
    return folder


def seen(folder: Path, names: str) -> Tensor:
    """What transformers' image processor makes of images of the right size."""
    arrays = [torch.from_numpy(numpy.array(images.open(folder / f"{name}.png"))) for name in names]
    mean, deviation = (torch.tensor(one).view(1, 3, 1, 1) for one in (MEAN, DEVIATION))
    return (torch.stack(arrays).permute(0, 3, 1, 2) / 255 - mean) / deviation


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_gradients_and_texts_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    vision, text, more = CASES[case]
    theirs = reference(vision, text, **more)
    folder = saved(tmp_path / "folder", theirs)
    import_checkpoint(folder, tmp_path / "imported", plugins=("image",))
    opened = open_model(tmp_path / "imported")
    agree(opened, theirs, folder)

    export_checkpoint(tmp_path / "imported", tmp_path / "exported")
    again, told = transformers.LlavaForConditionalGeneration.from_pretrained(
        tmp_path / "exported", output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    agree(opened, again.eval(), folder)
    file = "preprocessor_config.json"
    assert (tmp_path / "exported" / file).read_text() == (folder / file).read_text()
    export_checkpoint(tmp_path / "imported", tmp_path / "brighter", settings=("image.mean=[0.1, 0.2, 0.3]",))
    described = json.loads((tmp_path / "brighter" / file).read_text())
    assert described == {
        **json.loads((folder / file).read_text()),
        "image_mean": [0.1, 0.2, 0.3],
        "do_center_crop": False,
    }


@pytest.mark.parametrize("layout", ["published", "in memory", "in memory before 5"])
def test_other_names_of_tensors_are_read(layout: str, tmp_path: Path) -> None:
    theirs = reference("CLIP", "Llama")
    folder = saved(tmp_path / "folder", theirs)
    stored = safetensors.load_file(folder / "model.safetensors")
    if layout != "published":
        stored = dict(theirs.state_dict())
    if layout != "in memory":
        stored = {name.replace("vision_tower.", "vision_tower.vision_model."): one for name, one in stored.items()}
    position = next(name for name in stored if "position_embedding" in name)
    stored[position.replace("_embedding.weight", "_ids")] = torch.arange(17)[None]
    safetensors.save_file({name: one.clone() for name, one in stored.items()}, folder / "model.safetensors")
    agree(open_model(folder, plugins=["image"]), theirs, folder)


def agree(opened: Any, theirs: Any, folder: Path) -> None:
    job, module = opened._opened.job, opened.module
    prompts = ItemPrompts(job)
    for text, names in zip(PROMPTS, ("a", "ba"), strict=True):
        files = [str(folder / f"{name}.png") for name in names]
        ids, items = prompts.place(prompts.tokenizer.encode(text), {"image": files}, "a prompt", "/")
        tokens = torch.tensor([ids])
        extras = {name: torch.from_numpy(one) for name, one in padded([items.read(len(ids))]).items()}
        ours = module.head(module(tokens, **extras))
        given = {"input_ids": tokens, "pixel_values": seen(folder, names)}
        expected = theirs(**given).logits
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        for model, logits in ((module, ours), (theirs, expected)):
            model.zero_grad()
            logits.square().mean().backward()
        pairs = {
            "embedding.weight": "model.language_model.embed_tokens.weight",
            "layers.1.attention.o.weight": "model.language_model.layers.1.self_attn.o_proj.weight",
            "fusion.enter.encoders.image.connector.first.weight": "model.multi_modal_projector.linear_1.weight",
            "fusion.enter.encoders.image.vision.layers.0.q.weight": (
                "model.vision_tower.encoder.layers.0.self_attn.q_proj.weight"
            ),
        }
        mine, others = (dict(one.named_parameters()) for one in (module, theirs))
        for name, other in pairs.items():
            torch.testing.assert_close(mine[name].grad, others[other].grad, rtol=1e-5, atol=1e-5)
        written = theirs.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=1, pad_token_id=0)
        shown = opened.generate(text, items={"image": files}, tokens=8, temperature=0)
        new = written[0, len(ids) :].tolist()
        assert new
        assert shown.split() == [WORDS[one] for one in new if WORDS[one] not in ("</s>", "<image>")]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"image_grid_pinpoints": [[20, 40]]}, "image_grid_pinpoints: images cut into tiles"),
        ({"vision_feature_select_strategy": "full"}, "expected 'default' for a clip_vision_model, found 'full'"),
        ({"vision_feature_layer": [-2, -1]}, "vision_feature_layer: expected the number of one layer"),
        ({"vision_feature_layer": 9}, "vision_feature_layer: 9 is not among the 3 layers"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act: expected 'gelu', found 'relu'"),
        ({"multimodal_projector_bias": False}, "multimodal_projector_bias: expected True, found False"),
        ({"vision_config": {"model_type": "pixtral"}}, "model_type: expected one of siglip_vision_model, .*'pixtral'"),
        ({"text_config": {"model_type": "opt"}}, "text_config: model_type: expected one of llama, .* found 'opt'"),
    ],
)
def test_a_model_without_counterpart_is_refused(changed: dict[str, Any], says: str) -> None:
    config = json.loads(json.dumps(reference("CLIP", "Llama").config.to_dict()))
    config["architectures"] = ["LlavaForConditionalGeneration"]
    assert read(config, {}) is not None
    with pytest.raises(ConfigError, match=says):
        read({**config, **changed}, {})


def test_sizes_of_parts_are_compared_with_the_files(tmp_path: Path) -> None:
    folder = saved(tmp_path / "folder", reference("CLIP", "Llama"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = 10**9
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="vocab_size is 1,000,000,000, but the files hold only"):
        open_model(folder, plugins=["image"])


PUBLISHED = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.36.0.dev0",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "vocab_size": 32064,
}
"""The description of LLaVA 1.5 with 7 billion parameters, which leaves out what is usual."""


def test_the_description_of_llava_is_read() -> None:
    found = read(PUBLISHED, {})
    assert found is not None
    text = fakes.make(Decoder).import_hf(found.config)
    assert text is not None
    values = text.sections["decoder"]
    expected = {"dim": 4096, "layers": 32, "heads": 32, "hidden": 11008, "vocabulary": 32064, "max_sequence": 4096}
    assert {key: values[key] for key in expected} == expected
    assert found.model.sections["image"]["layers"] == 23


@pytest.mark.parametrize("kind", TEXTS)
def test_what_a_text_config_leaves_out_is_as_in_transformers(kind: str) -> None:
    usual = transformers.AutoConfig.for_model(kind).to_dict()
    assert {key: usual[key] for key in MISSING[kind]} == MISSING[kind]


CLIP_FILE = {
    "image_mean": [0.1, 0.2, 0.3],
    "size": {"shortest_edge": 20},
    "do_center_crop": True,
    "crop_size": {"height": 20, "width": 20},
}


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {}),
        (CLIP_FILE, {"mean": [0.1, 0.2, 0.3], "fit": "crop"}),
        ({"image_processor": {"image_std": [1, 1, 1], "size": 20}}, {"deviation": [1, 1, 1]}),
    ],
)
def test_the_file_for_images_is_read(given: dict[str, Any], options: dict[str, Any]) -> None:
    assert processor.read(given, {"size": 20}) == options


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"do_normalize": False}, "do_normalize: expected True"),
        ({"do_pad": True}, "do_pad: expected False"),
        ({"resample": 2}, "resample: expected 3"),
        ({"rescale_factor": 1.0}, "rescale_factor: expected 1/255"),
        ({"size": {"height": 20, "width": 30}}, "size: expected 20 × 20"),
        ({**CLIP_FILE, "crop_size": 24}, "crop_size: expected 20 × 20"),
        ({**CLIP_FILE, "size": {"shortest_edge": 30}}, "size: expected the shortest edge 20"),
    ],
)
def test_a_file_for_images_without_counterpart_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        processor.read(given, {"size": 20})


@pytest.mark.parametrize("size", [(31, 20), (24, 57), (20, 20), (9, 13), (20, 400), (333, 211)])
def test_the_middle_of_an_image_is_that_of_clip(size: tuple[int, int]) -> None:
    draw = torch.Generator().manual_seed(0)
    image = images.fromarray(torch.randint(0, 256, (*size, 3), dtype=torch.uint8, generator=draw).numpy())
    theirs = transformers.CLIPImageProcessorPil(size={"shortest_edge": 20}, crop_size=20, do_normalize=False)
    expected = theirs(image, do_rescale=False, return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
    assert (numpy.asarray(resized(image, (20, 20), crop=True)) == expected).all()


def test_the_middle_of_a_strip_takes_little_memory() -> None:
    strip = images.new("RGB", (10_000_000, 1), "red")  # as a whole, 3.36 billion pixels wide
    assert resized(strip, (336, 336), crop=True).getcolors() == [(336 * 336, (255, 0, 0))]


class Words:
    """A tokenizer whose token 10 is `<image>`."""

    begin, end = (), 1

    def __init__(self, *words: str) -> None:
        self.words = words

    def encode(self, text: str) -> list[int]:
        return [self.words.index(text)] if text in self.words else [0, 0]

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.words[one] for one in ids)


@pytest.mark.parametrize(
    ("options", "architecture", "fusion", "words", "says"),
    [
        ({"connector": "linear"}, "Llama", "features", WORDS, "image.connector: LLaVA .* has 'mlp', found 'linear'"),
        ({"merge": 2}, "Llama", "features", WORDS, "image.merge: LLaVA .* has 1, found 2"),
        ({"final_norm": True}, "Llama", "features", WORDS, "image.final_norm: LLaVA .* has False, found True"),
        ({"fit": "keep"}, "Llama", "features", WORDS, "image.fit: siglip_vision_model .* has 'square', found 'keep'"),
        ({}, "Olmo2", "features", WORDS, "has one of LlamaForCausalLM, .*, found Olmo2ForCausalLM"),
        ({}, "Llama", "token", WORDS, "images among the tokens; plugin 'it' joins them otherwise"),
        ({}, "Llama", "features", WORDS[:5], "needs a token for <image>, which this run's tokenizer lacks"),
    ],
)
def test_a_model_that_llava_is_not_is_not_written(
    options: dict[str, Any], architecture: str, fusion: str, words: list[str], says: str
) -> None:
    config = Image.Config(**{"merge": 1, "final_norm": False, **options})
    hooks = SimpleNamespace(provider=lambda slot: "it", gives=lambda slot: fusion)
    job: Any = SimpleNamespace(hooks=hooks)
    layout = HFModel(Rename({}), config={"architectures": [f"{architecture}ForCausalLM"]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forge_train_kit.hookspecs.tokenizer", lambda job: Words(*words))
        with pytest.raises(ConfigError, match=says):
            write(config, Pictures(config), layout, job)


def test_a_run_that_starts_from_it_has_its_encoder(tmp_path: Path) -> None:
    folder = saved(tmp_path / "folder", reference("CLIP", "Llama"))
    told: list[str] = []
    found = imported(Request(model_from=str(folder), plugins=("image",)), tmp_path / "runs", told.append)
    again = from_run(Request(model_from=found.sections["train"]["init_from"]))
    assert {"image", "prefix"} <= set(again.brought)
    assert (again.sections["image"]["layers"], again.sections["image"]["class_token"]) == (2, True)
    assert "imported" in told[0]
