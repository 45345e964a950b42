"""Presets of published models: their parameters, as Forge and transformers count them, and the hardware they fit on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers

from forge_command import Forge
from forge_train.plugin import hookspecs
from forge_train.plugin.job import Job
from forge_train_cli.presets import Preset, everything
from forge_train_kit.hf.start import exported, imported
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.offline.opening import lone_job

MODELS = [one for one in everything() if one.parameters]
SEEING = {"llava-1.5-7b", "llama3.2-11b-vision", "cogvlm-17b", "ernie-4.5-vl-28b-a3b"}


def _devices(preset: Preset) -> tuple[int, str]:
    count, name = preset.hardware.split()
    return int(count), name


def _sizes(preset: Preset, folder: Path) -> tuple[Job, dict[str, int]]:
    """Parameter → its elements."""
    setup = resolve(Request(config=preset.name, set=("run.device=cpu",)), world=_devices(preset)[0], data=False)
    job = lone_job(setup, folder)
    with torch.device("meta"):
        model = hookspecs.build_model(job)
    return job, {name: parameter.numel() for name, parameter in model.named_parameters()}


def _count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("preset", [one for one in MODELS if one.name not in SEEING], ids=lambda preset: preset.name)
def test_has_the_published_number_of_parameters(preset: Preset, tmp_path: Path) -> None:
    """Counted in Forge's model, and in the one that transformers builds from the `config.json` of its export."""
    job, sizes = _sizes(preset, tmp_path)
    further = sum(size for name, size in sizes.items() if name.startswith("tail."))
    assert sum(sizes.values()) - further == preset.parameters
    if preset.name == "deepseek-v3":
        layer = sum(size for name, size in sizes.items() if name.startswith("layers.60."))
        assert further == layer + 2 * 7168**2 + 3 * 7168, (
            "a layer, a projection and three norms (arXiv:2412.19437, §2.2)"
        )
    layout = exported(job)
    assert layout is not None
    config = dict(layout.config)
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(made)
    assert _count(theirs) == preset.parameters
    assert type(theirs).__name__ == config["architectures"][0]


def test_llava_has_what_is_published_but_for_what_nothing_reads(tmp_path: Path) -> None:
    """Of the `config.json` of llava-hf/llava-1.5-7b-hf, and the number of parameters on its page."""
    preset = next(one for one in MODELS if one.name == "llava-1.5-7b")
    _, sizes = _sizes(preset, tmp_path)
    assert sum(sizes.values()) == preset.parameters
    text = {"vocab_size": 32064, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    config = transformers.LlavaConfig(text_config={"model_type": "llama", **text})
    with torch.device("meta"):
        theirs = transformers.AutoModelForImageTextToText.from_config(config)
    assert _count(theirs) == 7_063_427_072
    unread = [
        module
        for path, module in theirs.named_modules()
        if path.endswith(("post_layernorm", "vision_tower.encoder.layers.23"))
    ]
    assert preset.parameters == 7_063_427_072 - sum(map(_count, unread))


def test_llama_vision_has_each_tensor_of_the_published_one(tmp_path: Path) -> None:
    """Those that transformers makes of the `config.json` of meta-llama/Llama-3.2-11B-Vision, read as weights are."""
    preset = next(one for one in MODELS if one.name == "llama3.2-11b-vision")
    job, sizes = _sizes(preset, tmp_path)
    config = transformers.MllamaConfig(architectures=["MllamaForConditionalGeneration"])
    with torch.device("meta"):
        theirs = transformers.MllamaForConditionalGeneration(config)
    assert _count(theirs) == preset.parameters
    layout = imported(config.to_dict(), job.hooks)
    assert layout is not None
    stored = {name: (tuple(one.shape), one.dtype) for name, one in theirs.named_parameters()}
    maps = (layout.map, *layout.others)
    step = max((one.trace(stored) for one in maps), key=lambda step: len(sizes.keys() & step.given.keys()))
    assert not step.left
    assert {name: math.prod(view.shape) for name, view in step.given.items()} == sizes
    ours = job.config.values()
    for section in ("image_tiles", "cross_attention"):
        for option, value in layout.sections[section].items():
            assert ours[f"{section}.{option}"] == value, option


def test_cogvlm_has_what_is_published_but_for_the_ends_of_images(tmp_path: Path) -> None:
    """Of the `config.json` and the code of THUDM/cogvlm-chat-hf, whose parts are Llama's and CLIP's but for biases."""
    preset = next(one for one in MODELS if one.name == "cogvlm-17b")
    _, sizes = _sizes(preset, tmp_path)
    assert sum(sizes.values()) == preset.parameters
    sizes_of_eva = {"hidden_size": 1792, "intermediate_size": 15360, "num_hidden_layers": 63, "num_attention_heads": 16}
    with torch.device("meta"):
        text = transformers.LlamaForCausalLM(transformers.LlamaConfig())  # Vicuna 7B's
        vision = transformers.CLIPVisionModel(
            transformers.CLIPVisionConfig(**sizes_of_eva, image_size=490, patch_size=14)
        )
    experts = sum(_count(layer.self_attn) + _count(layer.mlp) for layer in text.model.layers)
    norms = [module for path, module in vision.named_modules() if path.endswith(("pre_layrnorm", "post_layernorm"))]
    encoder = _count(vision) - sum(map(_count, norms)) + 1792  # a bias in the projection of patches
    connector = 1792 * 4096 + 2 * 4096 + 3 * 4096 * 11008
    assert _count(text) + experts + encoder + connector == preset.parameters
    assert preset.parameters == 17_639_685_376 - 2 * 4096


def test_ernie_has_what_is_published_but_for_experts_of_images_and_connector(tmp_path: Path) -> None:
    """Of the `config.json` of baidu/ERNIE-4.5-VL-28B-A3B-PT."""
    preset = next(one for one in MODELS if one.name == "ernie-4.5-vl-28b-a3b")
    _, sizes = _sizes(preset, tmp_path)
    assert sum(sizes.values()) == preset.parameters
    with torch.device("meta"):
        theirs = transformers.Ernie4_5_VLMoeForConditionalGeneration(transformers.Ernie4_5_VLMoeConfig())
    assert _count(theirs) == 29_399_294_336
    others = ("vision_moe", "resampler_model", "moe_statics")
    same = sum(
        one.numel() for name, one in theirs.named_parameters() if not any(f".{part}." in name for part in others)
    )
    assert same == sum(
        size * 64 // 84 if ".routed." in name else size for name, size in sizes.items() if ".connector." not in name
    )


@pytest.mark.slow
def test_fits_on_the_hardware_that_it_names(forge: Forge) -> None:
    """The smallest; `python benchmarks/run.py presets` plans all."""
    preset = min(MODELS, key=lambda one: one.parameters)
    world, device = _devices(preset)
    sizes = ("--world", str(world), "--device", device, "-s", "train.global_batch=2", "-s", "train.micro_batch=1")
    made = forge("plan", preset.name, *sizes, "--json").json
    assert made["parameters"]["total"] == preset.parameters
    assert made["roofline"]["fits"]
