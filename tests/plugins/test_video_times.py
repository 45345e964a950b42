"""Times of frames: what items say of them, and as text among a clip's features."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_train import MASKED, Batch
from forge_train_kit.data.items import ItemPrompts
from forge_train_kit.data.manifest import FILE
from forge_train_kit.modalities import ItemSource
from forge_train_kit.model.item_positions import ItemPositions
from forge_train_plugins.data.multimodal import Multimodal
from forge_train_plugins.modalities._vision.encoder import VisionEncoder
from forge_train_plugins.modalities._vision.modality import Clips
from forge_train_plugins.modalities.vision import Video
from items_data import job, write_records
from test_video_reading import RAMP, write

pytestmark = [pytest.mark.unit]

OPTIONS: dict[str, Any] = {"size": 16, "patch": 8, "merge": 1, "frames": 4, "dim": 12, "heads": 1, "layers": 1}
FIRST, SECOND = "<0.6 seconds>", "<1.8 seconds>"
"""Frames are taken at 0.3, 0.9, 1.5 and 2.1 s; two each are averaged."""


def clips(**options: Any) -> Clips:
    return Clips(Video.Config(**{**OPTIONS, "times": True, **options}))


def batch_of(folder: Path, modality: Clips, text: str = "a<video>b", gives: str = "features", **more: Any) -> Batch:
    folder.mkdir(exist_ok=True)
    write(folder / "a.mp4", RAMP)
    file = write_records(folder / "data.jsonl", [{"text": text, "videos": ["a.mp4"] * text.count("<video>")}])
    made = Multimodal(Multimodal.Config(path=str(file), cache=str(folder / "cache"), held_out=0.0, **more))
    return next(made.build_data(job(modality, gives=gives, sequence=96, micro_batch=1), "train"))  # type: ignore[arg-type]


def shown(batch: Batch) -> str:
    """The text of a row, with the number of the vector, or item, at each position that has one."""
    pairs = zip(batch.inputs[0].tolist(), batch.extras["video_places"][0].tolist(), strict=True)
    return "".join(str(place) if place >= 0 else chr(id) if id < 256 else "." for id, place in pairs).rstrip(".")


def test_frames_carry_their_times(tmp_path: Path) -> None:
    file = ItemSource(str(write(tmp_path / "a.mp4", RAMP)), "here")
    assert clips().read(file).times == pytest.approx((0.3, 0.9, 1.5, 2.1))
    assert clips().texts(file) == [FIRST, SECOND]
    assert clips(temporal=1).texts(file) == [f"<{at} seconds>" for at in (0.3, 0.9, 1.5, 2.1)]
    assert clips(times=False).texts(file) == []
    (problem,) = Video(Video.Config(connector="resampler", queries=2, merge=1, times=True)).check_config()
    assert (problem.key, problem.message) == (
        "video.times",
        "has no effect with a resampler, whose queries stand for a whole clip.",
    )


def test_each_group_of_frames_has_its_time_before_it(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, clips(), "a<video>b<video>")
    assert shown(batch) == f"a{FIRST}0123{SECOND}4567b{FIRST}891011{SECOND}12131415"
    assert batch.extras["video_grids"][0].tolist() == [[2, 2, 2]] * 4
    learned = [id for id in batch.labels[0].tolist() if id != MASKED]
    assert bytes(learned[:-1]) == b"b", "neither times nor features are learned"
    plain = batch_of(tmp_path / "plain", clips(times=False), "a<video>b<video>")
    assert shown(plain) == "a01234567b89101112131415"
    assert plain.extras["video_grids"][0].tolist() == [[4, 2, 2]] * 2
    assert torch.equal(plain.extras["video_values"], batch.extras["video_values"])


def test_all_times_stand_before_a_clip_that_takes_one_position(tmp_path: Path) -> None:
    """It stays one item, whose features tell the order of frames: tokens attend to all of them at once."""
    batch = batch_of(tmp_path, clips(), "a<video>b<video>", gives="token")
    assert shown(batch) == f"a{FIRST}{SECOND}0b{FIRST}{SECOND}1"
    assert batch.extras["video_grids"][0].tolist() == [[4, 2, 2]] * 2


@pytest.mark.parametrize(("fit", "connector"), [("square", "mlp"), ("keep", "pooling")])
def test_groups_are_encoded_like_clips_of_their_own(tmp_path: Path, fit: Any, connector: Any) -> None:
    modality = clips(fit=fit, connector=connector)
    encoder = VisionEncoder(modality.config, 8, temporal=2)
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    file = ItemSource(str(write(tmp_path / "a.mp4", RAMP)), "here")
    values, grid = torch.from_numpy(modality.read(file).values)[None], torch.tensor([[[2, 2, 2]]])
    alone = [encoder(half, grid) for half in values.chunk(2, 1)]
    torch.testing.assert_close(encoder(values, grid.expand(-1, 2, -1)), torch.cat(alone, 1))


def test_prepared_data_says_by_which_rule_frames_were_taken(tmp_path: Path) -> None:
    batch_of(tmp_path, clips(fps=2.0))
    (manifest,) = (tmp_path / "cache").glob(f"**/{FILE}")
    settings = json.loads(manifest.read_text(encoding="utf-8"))["settings"]["items"]["video"]
    assert settings.items() >= {"taken": "middles of equal pieces", "fps": 2.0, "frames": 4, "times": True}.items()


def test_prompts_have_times_too(tmp_path: Path) -> None:
    write(tmp_path / "a.mp4", RAMP)
    prompts = ItemPrompts(job(clips()))
    marked = prompts.tokenizer.encode("a<video>")
    ids, items = prompts.place(marked, {"video": [tmp_path / "a.mp4"]}, "prompt", str(tmp_path))
    found = items.read(len(ids))["video"]
    wanted = f"a{FIRST}....{SECOND}...."
    assert "".join(chr(id) if id < 256 else "." for id in ids) == wanted
    assert found.places.tolist() == [*[-1] * 14, 0, 1, 2, 3, *[-1] * 13, 4, 5, 6, 7]
    assert found.grids.tolist() == [[2, 2, 2]] * 2


def test_positions_along_three_axes_go_on_after_each_group(tmp_path: Path) -> None:
    """As in Qwen3-VL: each group is a picture, and takes as many positions as its longer side."""
    modality = clips()
    batch = batch_of(tmp_path, modality)
    made = ItemPositions({"video": modality})(batch.extras, batch.position_ids, batch.document_ids)
    assert made is not None
    positions = made[0][0].tolist()
    assert positions[13] == [13, 13, 13]
    assert positions[14:18] == [[14, 14, 14], [14, 14, 15], [14, 15, 14], [14, 15, 15]]
    assert positions[18] == [16, 16, 16]
    assert positions[31:35] == [[29, 29, 29], [29, 29, 30], [29, 30, 29], [29, 30, 30]]
    assert positions[35] == [31, 31, 31]


def test_seconds_reach_the_model_as_the_pace_of_a_clip(tmp_path: Path) -> None:
    """Of 2.4 seconds, two pairs of frames: 1.2 s, and three positions a second."""
    options: dict[str, Any] = {"times": False, "positions_per_second": 3.0}
    batch = batch_of(tmp_path, clips(**options), "<video>b<video>")
    assert batch.extras["video_paces"].tolist() == [pytest.approx([3.6, 3.6])]
    kept = batch_of(tmp_path, clips(**options), "<video>b<video>", store="decoded")
    assert torch.equal(kept.extras["video_paces"], batch.extras["video_paces"])
    assert "video_paces" not in batch_of(tmp_path, clips(times=False)).extras
    (problem,) = Video(Video.Config(times=True, positions_per_second=2.0)).check_config()
    assert problem.key == "video.positions_per_second"
