"""One encoder for images and clips: its weights are there once, and learn from the items of both."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny_models
from drawn import OPTIONS, with_clips
from forge_train import Batch, ConfigError
from forge_train_kit.data.items.costs import ItemCosts
from forge_train_kit.enabled_modalities import enabled_modalities
from forge_train_kit.modalities import ItemSource, encoders_of, extras_of, flops_of, flops_of_items
from forge_train_kit.model import Encoders
from forge_train_plugins.modalities._vision.modality import Clips, Pictures
from forge_train_plugins.modalities.vision import Image, Video
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.planning import plan
from test_video_reading import RAMP, write

pytestmark = pytest.mark.unit

SHARED = {**OPTIONS, "image.patch_frames": 2, "video.encoded_by": "image", "video.size": 8, "video.fit": "keep"}
VALUES = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in SHARED.items()]
PLUGINS = ("image", "video")


def batch() -> Batch:
    ids = torch.randint(20, 60, (4, 24), generator=torch.Generator().manual_seed(1))
    ids[:, 0], ids[:, 1] = torch.tensor([43, 40, 42, 41]), torch.tensor([43, 40, 41, 40])
    return with_clips(Batch(ids, ids))


def pair(**options: Any) -> tuple[Pictures, Clips]:
    image = Image.Config(**{"size": 32, "patch": 16, "merge": 1, "patch_frames": 2, **options})
    return Pictures(image), Clips(Video.Config(size=32, frames=4, encoded_by="image"))


def test_weights_are_there_once_and_learn_from_both() -> None:
    _, model = tiny_models.composed(*VALUES, plugins=PLUGINS)
    (part,) = model.parts
    names = {name for name, _ in part.named_parameters(remove_duplicate=False) if "encoders" in name}
    assert names
    assert all(name.startswith("fusion.enter.encoders.image.") for name in names)
    assert names <= model.state_dict().keys()
    assert not any("encoders.video" in name for name in (*model.state_dict(), *part.units))
    assert len(set(part.units)) == len(part.units)
    given = batch()
    found = []
    for left in ((), ("video",), ("image",)):
        extras = dict(given.extras)
        for name in left:
            extras[extras_of(name)[2]] = torch.full_like(given.extras[extras_of(name)[2]], -1)
        part.zero_grad()
        part(given.inputs, **extras).square().sum().backward()
        found.append(part.fusion.enter.encoders["image"].vision.patches.weight.grad.clone())
    assert all(bool(one.any()) for one in found)
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_an_image_stands_for_each_frame_of_a_clip() -> None:
    _, model = tiny_models.composed(*VALUES, plugins=PLUGINS)
    encoder: Any = model.parts[0].fusion.enter.encoders["image"]
    values = torch.randint(0, 256, (1, 8, 12), dtype=torch.uint8)
    grids = torch.tensor([[[1, 2, 4]]])
    assert torch.equal(encoder(values, grids), encoder(values.repeat(1, 1, 2), grids))
    assert not torch.allclose(encoder(values, grids), encoder(torch.cat((values, 255 - values), -1), grids))


def test_items_of_both_are_counted() -> None:
    _, model = tiny_models.composed(*VALUES, plugins=PLUGINS)
    (part,) = model.parts
    encoder, given = part.fusion.enter.encoders["image"], batch().extras
    one_by_one = [
        3 * flops_of(encoder, tuple(grid))
        for name in ("image", "video")
        for grid in given[extras_of(name)[1]].flatten(0, 1).tolist()
        if grid[0]
    ]
    assert flops_of_items(part, given) == sum(one_by_one)
    image, clips = pair()
    costs = ItemCosts({"image": image, "video": clips.joined(image)})
    assert costs("video", (2, 2, 2)) == costs("image", (2, 2, 2)) > 0


def test_clips_are_cut_as_the_encoder_projects_them(tmp_path: Path) -> None:
    image, clips = pair()
    joined = clips.joined(image)
    source = ItemSource(str(write(tmp_path / "a.mp4", RAMP)), "here")
    item = joined.read(source)
    assert (item.grid, joined.features, item.values.shape) == ((2, 2, 2), 2 * 16 * 16 * 3, (8, 2 * 16 * 16 * 3))
    assert joined.measure(source) == item.grid
    assert (joined.positions(item.grid), joined.spread(item.grid), joined.example().grid) == (8, (2, 2, 2), (2, 2, 2))
    apart = Clips(Video.Config(size=32, patch=16, merge=1, frames=4, temporal=1)).read(source)
    frames = apart.values.reshape(2, 2, 4, -1).transpose(0, 2, 1, 3).reshape(8, -1)
    assert (item.values == frames).all()


def test_owners_come_first_whatever_the_order_of_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    image, clips = pair()
    answers = [("video", [clips]), ("image", [image])]
    monkeypatch.setattr("forge_train_kit.hookspecs.modalities", lambda job: answers)
    job: Any = SimpleNamespace()
    found = enabled_modalities(job)
    assert [*found] == ["image", "video"]
    assert found["video"].features == 2 * found["image"].features
    encoders = encoders_of(found, 8)
    assert encoders["image"] is encoders["video"]
    module = Encoders(encoders)
    assert [*module] == ["image"]
    assert [(name, one is module["image"]) for name, one in module.each()] == [("image", True), ("video", True)]
    answers.pop()
    with pytest.raises(ConfigError, match="the encoder of modality 'image' is to encode 'video' too, and no enabled"):
        enabled_modalities(job)
    borrowing: Any = SimpleNamespace(name="image", placeholder="<image>", encoded_by="video")
    answers.append(("image", [borrowing]))
    with pytest.raises(ConfigError, match="modality '(image|video)' has no encoder of its own to share"):
        enabled_modalities(job)


def test_what_has_no_effect_is_refused() -> None:
    image, _ = pair()
    for wrong, says in (
        ({"temporal": 1}, "video.temporal: expected image.patch_frames = 2"),
        ({"fit": "keep"}, "video.fit and video.size: expected those of images"),
        ({"size": 64}, "video.fit and video.size: expected those of images"),
    ):
        with pytest.raises(ConfigError, match=says):
            Clips(Video.Config(**{"size": 32, "encoded_by": "image", **wrong})).joined(image)
    keep = Pictures(Image.Config(size=32, patch=16, merge=1, patch_frames=2, fit="keep"))
    with pytest.raises(ConfigError, match="video.size: expected a multiple of image.patch · merge = 16"):
        Clips(Video.Config(size=40, fit="keep", encoded_by="image")).joined(keep)
    asked = Pictures(Image.Config(size=32, patch=16, merge=1, patch_frames=2, connector="resampler", queries=2))
    with pytest.raises(ConfigError, match="video.times: has no effect with a resampler"):
        Clips(Video.Config(size=32, encoded_by="image", times=True)).joined(asked)
    found = list(Video(Video.Config(encoded_by="image", dim=96, least_frames=9)).check_config())
    assert [(one.key, one.message) for one in found] == [
        ("video.least_frames", "expected at most frames = 8."),
        ("video.least_frames", "has no effect without fps."),
        ("video.dim", "has no effect, since the encoder is that of image; set image.dim."),
    ]


def test_a_plan_counts_the_weights_once() -> None:
    setup = resolve(tiny_models.request(*VALUES, plugins=PLUGINS))
    _, model = tiny_models.composed(*VALUES, plugins=PLUGINS)
    alone = tiny_models.composed(*VALUES[: len(OPTIONS) + 1], plugins=("image",))[1]
    counts = [sum(one.numel() for one in found.parameters()) for found in (model, alone)]
    assert plan(setup).parameters.total == counts[0] == counts[1]
