"""The files of a folder in Hugging Face layout that say how images become pixels, written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from forge_train_plugins.modalities._tiles import processor as tiles
from forge_train_plugins.modalities._vision import processor
from forge_train_plugins.modalities._vision.patches import kept
from forge_train_plugins.modalities._vision.reading import resized
from forge_train_plugins.modalities.vision import Image, ImageTiles

transformers = pytest.importorskip("transformers")
images = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.unit

MEAN, DEVIATION = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
SQUARE = {"size": {"height": 20, "width": 20}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
FILE, OUTER = "preprocessor_config.json", "processor_config.json"


def image() -> Any:
    return images.fromarray(numpy.random.default_rng(0).integers(0, 255, (24, 57, 3), dtype=numpy.uint8))


def put(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("files", "fit"),
    [
        ({FILE: SQUARE}, "square"),
        ({FILE: {"image_processor_type": "SiglipImageProcessor", "image_seq_length": 9, **SQUARE}}, "crop"),
        ({FILE: {"do_center_crop": True, "crop_size": 30, "size": {"shortest_edge": 30}}}, "square"),
        ({OUTER: {"processor_class": "LlavaProcessor", "image_processor": {"size": 30}}}, "square"),
        ({OUTER: {"processor_class": "LlavaProcessor"}}, "crop"),
        ({}, "square"),
    ],
)
def test_transformers_reads_images_as_the_model_was_trained(files: dict[str, Any], fit: str, tmp_path: Path) -> None:
    config = Image.Config(size=20, fit=fit, mean=MEAN, deviation=DEVIATION, patch=5)
    after = {**files, **processor.written(config, files)}
    assert processor.written(config, after) == {}
    for name, content in files.items():
        assert content.keys() - after[name].keys() <= {"crop_size"}
        assert after[name].get("image_seq_length", 16) == 16
    theirs = transformers.CLIPImageProcessorPil.from_pretrained(put(tmp_path, after))
    pixels = numpy.asarray(resized(image(), (20, 20), crop=fit == "crop"), numpy.float32) / 255
    ours = (pixels - numpy.float32(MEAN)) / numpy.float32(DEVIATION)
    found = theirs(image(), return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
    numpy.testing.assert_allclose(ours, found, atol=1e-6)


@pytest.mark.parametrize("least", [0, 3000])
@pytest.mark.parametrize("files", [{}, {FILE: {"size": {"shortest_edge": 300, "longest_edge": 1000}, "min_pixels": 9}}])
def test_bounds_of_pixels_are_written(files: dict[str, Any], least: int, tmp_path: Path) -> None:
    bounds = {"size": 64, "least_pixels": least, "fit": "keep", "patch": 4, "merge": 2, "patch_frames": 2}
    config = Image.Config(mean=MEAN, deviation=DEVIATION, **bounds)
    after = {**files, **processor.written(config, files)}
    assert processor.written(config, after) == {}
    theirs = transformers.Qwen2VLImageProcessorPil.from_pretrained(put(tmp_path, after))
    _, height, width = theirs(image(), return_tensors="np")["image_grid_thw"][0]
    assert (4 * width, 4 * height) == kept(57, 24, 8, least, 64**2)
    assert (tuple(theirs.image_mean), tuple(theirs.image_std)) == (MEAN, DEVIATION)


@pytest.mark.parametrize("files", [{}, {FILE: {"image_mean": [0.5] * 3, "size": {"height": 8, "width": 8}}}])
def test_tiles_are_written(files: dict[str, Any], tmp_path: Path) -> None:
    config = ImageTiles.Config(size=16, patch=4, tiles=2, mean=MEAN, deviation=DEVIATION)
    after = {**files, **tiles.written(config, files)}
    assert tiles.written(config, after) == {}
    theirs = transformers.MllamaImageProcessorPil.from_pretrained(put(tmp_path, after))
    assert (theirs.size["height"], theirs.max_image_tiles) == (16, 2)
    assert (tuple(theirs.image_mean), tuple(theirs.image_std)) == (MEAN, DEVIATION)
