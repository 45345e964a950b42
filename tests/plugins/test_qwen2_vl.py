"""Qwen2-VL of transformers, with images and clips: logits, gradients and texts, after an import and after an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fakes
from forge_train import ConfigError
from forge_train_plugins.modalities._vision.qwen_vl import read
from forge_train_plugins.modalities.vision import Image, Video
from forge_train_tools import open_model
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint
from test_qwen_clips import CLIPS, SIZES, agree, write_clip
from test_qwen_vl import PUBLISHED, around, saved

pytestmark = pytest.mark.unit

VISION = {"depth": 2, "embed_dim": 24, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}


@pytest.mark.slow
def test_logits_gradients_and_texts_are_those_of_transformers(tmp_path: Path) -> None:
    config = transformers.Qwen2VLConfig(vision_config=VISION, **around())
    model = fakes.initialised(transformers.Qwen2VLForConditionalGeneration(config).eval())
    folder = saved(tmp_path / "folder", model)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(CLIPS))
    for name in SIZES:
        write_clip(folder, name)
    import_checkpoint(folder, tmp_path / "imported", plugins=("image", "video"))
    agree(open_model(tmp_path / "imported"), model, folder, None)
    export_checkpoint(tmp_path / "imported", tmp_path / "exported")
    again, told = transformers.Qwen2VLForConditionalGeneration.from_pretrained(
        tmp_path / "exported", output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    for (name, one), other in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert name == other[0]
        assert torch.equal(one, other[1]), name
    agree(open_model(tmp_path / "exported", plugins=["image", "video"]), again.eval(), folder, None)


DESCRIBED: dict[str, Any] = {
    **{key: one for key, one in PUBLISHED.items() if key != "vision_config"},
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
}
"""The description of Qwen2-VL with 7 billion parameters."""


def test_the_published_description_is_read() -> None:
    found = read(DESCRIBED, {"min_pixels": 3136, "max_pixels": 12845056})
    assert found is not None
    image, video = found.model.sections["image"], found.model.further["video"]
    expected = {"dim": 1280, "hidden": 5120, "norm": "layer", "gated": False, "activation": "quick_gelu", "window": 0}
    assert {key: image[key] for key in expected} == expected
    assert (video["positions_per_second"], video["encoded_by"], video["temporal"]) == (0.0, "image", 2)
    assert not list(Image(Image.Config(**image)).check_config())
    assert not list(Video(Video.Config(**video)).check_config())
    wrong = {**DESCRIBED, "vision_config": {**DESCRIBED["vision_config"], "hidden_size": 3583}}
    with pytest.raises(ConfigError, match="vision_config: hidden_size: expected 3584, found 3583"):
        read(wrong, {})
