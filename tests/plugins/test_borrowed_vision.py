"""Encoders that are vision models of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_train import ConfigError
from forge_train.compose.initialise import materialise
from forge_train_plugins.modalities._vision.encoder import VisionEncoder
from forge_train_plugins.modalities._vision.section import check
from forge_train_plugins.modalities._vision.vision_folder import implied
from forge_train_plugins.modalities.vision import Image
from forge_train_tools import open_model
from forge_train_tools.testing import run_forge

transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
KINDS: dict[str, dict[str, Any]] = {
    "CLIPVision": {"intermediate_size": 24},
    "SiglipVision": {"intermediate_size": 24},
    "ViT": {"intermediate_size": 24},
    "Dinov2": {"mlp_ratio": 2},
    "Dinov2WithRegisters": {"mlp_ratio": 2, "num_register_tokens": 3},
    "Yolos": {"intermediate_size": 24, "num_detection_tokens": 3, "image_size": [16, 16]},
    "InternVLVision": {"intermediate_size": 24, "image_size": [16, 16], "patch_size": [4, 4]},
}
SHUFFLES = {"intermediate_size": 24, "mask_ratio": 0.0}
OPTIONS = {"merge": 2, "std": 0.3}


def saved(kind: str, folder: Path, more: dict[str, Any] | None = None) -> Any:
    """A random model of a class, written to a folder."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **(more or KINDS[kind])})
    model = getattr(transformers, f"{kind}Model")(config).eval()
    with torch.no_grad():
        for one in model.parameters():
            one.normal_(0, 0.2)
    model.save_pretrained(folder)
    return model


def encoder_of(folder: Path, **options: Any) -> VisionEncoder:
    given = {**OPTIONS, **implied(str(folder)), **options}
    with torch.device("meta"):
        made = VisionEncoder(Image.Config(model=str(folder), **given), 12)
    materialise(made, torch.device("cpu"), seed=3)
    return made


def images(values: Tensor) -> Tensor:
    """Pixels `[images, 3, 16, 16]` of patches in blocks of 2 × 2, normalised by a half."""
    blocks = values.reshape(-1, 2, 2, 2, 2, 4, 4, 3)  # image, two of the block, two in it, two of the patch, colour
    return blocks.permute(0, 7, 1, 3, 5, 2, 4, 6).reshape(-1, 3, 16, 16).float() / 127.5 - 1


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_of_the_class(kind: str, tmp_path: Path) -> None:
    model = saved(kind, tmp_path)
    encoder = encoder_of(tmp_path)
    values = torch.randint(0, 256, (2, 32, 48), dtype=torch.uint8)
    grids = torch.tensor([[[1, 4, 4], [1, 4, 4]]] * 2)
    first = {"Yolos": 1}.get(kind, -16)  # what it detects follows its patches
    wanted = model(pixel_values=images(values)).last_hidden_state[:, first:][:, :16]
    _row, _column = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    blocks = wanted.unflatten(1, (2, 2, 2, 2)).transpose(2, 3).reshape(2, 32, 16)
    torch.testing.assert_close(encoder.encoded(values, grids, encoder.vision), blocks, rtol=1e-5, atol=1e-5)
    encoder(values, grids).square().sum().backward()
    assert [name for name, one in encoder.named_parameters() if one.grad is None or not one.grad.any()] == []
    assert encoder.units == tuple(f"vision.{one}" for one in encoder.vision.units)
    assert len(encoder.units) == 2


def test_a_whole_clip_has_its_vision_model(tmp_path: Path) -> None:
    text = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**SIZES, "intermediate_size": 24}, projection_dim=8
    )
    whole = transformers.CLIPModel(config).eval()
    whole.save_pretrained(tmp_path)
    encoder = encoder_of(tmp_path)
    values = torch.randint(0, 256, (1, 16, 48), dtype=torch.uint8)
    wanted = whole.vision_model(pixel_values=images(values)).last_hidden_state[:, 1:]
    blocks = wanted.unflatten(1, (2, 2, 2, 2)).transpose(2, 3).reshape(1, 16, 16)
    found = encoder.encoded(values, torch.tensor([[[1, 4, 4]]]), encoder.vision)
    torch.testing.assert_close(found, blocks, rtol=1e-5, atol=1e-5)


def test_weights_in_bf16_make_no_encoder_in_bf16(tmp_path: Path) -> None:
    model = saved("Dinov2", tmp_path).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    encoder = encoder_of(tmp_path)
    assert {one.dtype for one in encoder.parameters()} == {torch.float32}
    kept = dict(encoder.vision.model.named_parameters())
    wanted = dict(model.named_parameters())
    assert all(torch.equal(one, wanted[name].float()) for name, one in kept.items())


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    saved("Dinov2", tmp_path)
    given = {**OPTIONS, **implied(str(tmp_path)), "model": str(tmp_path)}
    for changed, told in (
        ({"layers": 3}, "has no effect, since image.model decides it."),
        ({"dim": 32}, "expected 16, as image.model has."),
        ({"fit": "keep"}, 'expected "square" or "crop"'),
    ):
        (problem,) = check(Image.Config(**{**given, **changed}), "image")
        assert told in problem.message
    (problem,) = check(Image.Config(model="nowhere"), "image")
    assert (problem.key, problem.message) == ("image.model", "there is no config.json in nowhere.")
    assert implied("nowhere") == {}
    with pytest.raises(ConfigError, match="nowhere: its config.json can't be used"):
        VisionEncoder(Image.Config(model="nowhere"), 12)
    described = json.loads((tmp_path / "config.json").read_text())
    for key, value, told in (
        ("hidden_size", None, "hidden_size: expected a number, as a vision transformer has"),
        ("hidden_dropout_prob", 0.1, "hidden_dropout_prob is a dropout, which is not drawn for items; set it to 0"),
        ("num_channels", 1, "Dinov2Model doesn't fit"),
        ("mlp_ratio", 3, "its files have no .*mlp.fc1.bias of the shape"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**described, key: value}))
        with pytest.raises(ConfigError, match=told):
            encoder_of(tmp_path)


def test_a_class_that_shuffles_patches_is_refused(tmp_path: Path) -> None:
    saved("ViTMAE", tmp_path, SHUFFLES)
    with pytest.raises(ConfigError, match="ViTMAEModel doesn't fit: its blocks don't get 16 patches, row by row"):
        encoder_of(tmp_path)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    saved("ViT", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="its weights can't be loaded"):
        encoder_of(tmp_path)


@pytest.mark.slow
def test_a_run_keeps_a_frozen_encoder_and_its_features(tmp_path: Path) -> None:
    """Features are computed once, and the encoder is that of the folder after training and in a checkpoint."""
    pillow = pytest.importorskip("PIL.Image")
    model = saved("SiglipVision", tmp_path / "siglip")
    pillow.new("RGB", (16, 16), "red").save(tmp_path / "red.png")
    record = {"text": "<image>red", "images": ["red.png"]}
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for _ in range(8)))
    settings = {
        "run.device": "cpu",
        "multimodal": {"path": str(tmp_path / "data.jsonl"), "cache": str(tmp_path / "cache")},
        "image": {"model": str(tmp_path / "siglip"), "merge": 2, "once": True, "cache": str(tmp_path / "once")},
        "freeze.parameters": ["fusion.enter.encoders.image.vision.*"],
        "decoder": {"dim": 16, "layers": 1, "heads": 2},
        "train": {"global_batch": 2, "micro_batch": 2, "sequence": 24, "evaluate_every": 0},
    }
    done = run_forge(
        ["multimodal", "image", "prefix", "freeze"], settings, preset="", steps=3, without=["text"], folder=tmp_path
    )
    found = dict(open_model(done.run, device="cpu").module.named_parameters())
    inside = "fusion.enter.encoders.image.vision.model."
    wanted = {name: one for name, one in model.named_parameters() if inside + name in found}
    assert len(wanted) > 20
    assert all(torch.equal(found[inside + name], one) for name, one in wanted.items())
    assert len([*(tmp_path / "once").rglob("*.safetensors")] or [*(tmp_path / "once").rglob("*")]) > 0
