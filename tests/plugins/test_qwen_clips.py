"""Clips of Qwen2.5-VL: what is read of a file, logits, gradients and texts are those of transformers."""

from __future__ import annotations

import importlib
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import video_processing_utils

from forge_train import ConfigError
from forge_train_kit import hookspecs
from forge_train_kit.data.items import ItemPrompts, padded
from forge_train_kit.modalities import ItemSource
from forge_train_plugins.modalities._vision import processor
from forge_train_plugins.modalities._vision.modality import Clips, Pictures
from forge_train_plugins.modalities._vision.qwen_vl import read
from forge_train_plugins.modalities._vision.qwen_vl_export import write
from forge_train_plugins.modalities.vision import Image, Video
from forge_train_tools import open_model
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint
from test_qwen_vl import FILE, OPTIONS, SPECIAL, WORDS, compare_gradients, reference, saved, seen

av = pytest.importorskip("av")
pytest.importorskip("PIL")
pytestmark = pytest.mark.unit

PICTURE, CLIP = (f"<|vision_start|> <|{one}_pad|> <|vision_end|>" for one in ("image", "video"))
PROMPT = f"a b {CLIP} c {PICTURE} d {CLIP} e"
CLIPS = {"size": {"shortest_edge": 300, "longest_edge": 1500}, "patch_size": 4, "fps": 4, "min_frames": 2}
RATE, PER_SECOND = 10, 2
SIZES = {"long": (12, 24, 40), "short": (5, 32, 24)}
"""Frames, height and width of two clips."""


@pytest.fixture(scope="module", name="theirs")
def their_processor() -> Any:
    """The class of transformers, which imports torchvision for nothing but resizing."""
    assert video_processing_utils
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    with pytest.MonkeyPatch.context() as patched:
        above: Any = None
        for name in (*names, "torchvision.transforms.v2.functional"):
            module: Any = ModuleType(name)
            module.__spec__, module.__path__ = ModuleSpec(name, None), []
            patched.setitem(sys.modules, name, module)
            if above is not None:
                setattr(above, name.rpartition(".")[2], module)
            above = module
        name = "transformers.models.qwen2_vl.video_processing_qwen2_vl"
        patched.delitem(sys.modules, name, raising=False)
        found = importlib.import_module(name)
        sys.modules.pop(name)
    return found


def drawn(name: str) -> np.ndarray[Any, Any]:
    frames, height, width = SIZES[name]
    draw = torch.Generator().manual_seed(frames)
    return torch.randint(0, 256, (frames, height, width, 3), dtype=torch.uint8, generator=draw).numpy()


def write_clip(folder: Path, name: str) -> Path:
    """A clip without loss."""
    path, pictures = folder / f"{name}.avi", drawn(name)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=RATE)
        stream.height, stream.width, stream.pix_fmt = *pictures.shape[1:3], "bgr0"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def shown(theirs: Any, name: str) -> tuple[torch.Tensor, tuple[int, int, int], float]:
    """What transformers makes of a clip, of bytes: its patches, its grid, and seconds from one group to the next."""
    pictures = torch.from_numpy(drawn(name))
    usual = SimpleNamespace(num_frames=None, fps=None, temporal_patch_size=2, min_frames=2, max_frames=768)
    about = SimpleNamespace(total_num_frames=len(pictures), fps=RATE)
    taken = theirs.Qwen2VLVideoProcessor.sample_frames(usual, about, fps=CLIPS["fps"])
    size = theirs.smart_resize(*pictures.shape[1:3], factor=8, min_pixels=300, max_pixels=1500)
    frames = pictures[taken.long()].permute(0, 3, 1, 2)
    resized = F.interpolate(frames, size=size, mode="bicubic", antialias=True)  # as torchvision does
    patches, *grid = theirs.Qwen2VLVideoProcessor.patchify(None, resized[None], 4, 2, 2)
    return patches[0], (grid[0], grid[1], grid[2]), 2 / (len(taken) / len(pictures) * RATE)


def clips() -> tuple[Pictures, Clips]:
    config = reference().config.to_dict()
    found = read(
        {**config, "architectures": ["Qwen2_5_VLForConditionalGeneration"]}, {**FILE, "video_processor": CLIPS}
    )
    assert found is not None
    image = Pictures(Image.Config(**found.model.sections["image"]))
    section = Video.Config(**found.model.further["video"])
    assert not list(Video(section).check_config())
    return image, Clips(section).joined(image)


@pytest.mark.parametrize("name", SIZES)
def test_clips_are_sampled_resized_and_cut_as_in_transformers(name: str, theirs: Any, tmp_path: Path) -> None:
    """Resizing of torch and Pillow differ by one of 256 steps, in few places."""
    _, modality = clips()
    source = ItemSource(str(write_clip(tmp_path, name)), "here")
    item = modality.read(source)
    patches, grid, seconds = shown(theirs, name)
    assert item.grid == modality.measure(source) == grid
    assert modality.pace(source) == pytest.approx(4 * seconds)  # of a file without tokens_per_second
    # [patches, colours, frames, rows, columns] → [patches, frames, rows, columns, colours]
    wanted = patches.unflatten(1, (3, 2, 4, 4)).permute(0, 2, 3, 4, 1).flatten(1).int()
    differences = (torch.from_numpy(item.values).int() - wanted).abs()
    assert differences.max() <= 1
    assert (differences > 0).float().mean() < 0.02


def normalised(values: torch.Tensor) -> torch.Tensor:
    """Our patches of bytes as their encoder takes them."""
    mean, deviation = torch.tensor(FILE["image_mean"]), torch.tensor(processor_deviation())
    scaled = (values.float() / 255).unflatten(1, (2, 4, 4, 3))
    return ((scaled - mean) / deviation).permute(0, 4, 1, 2, 3).flatten(1)


def processor_deviation() -> list[float]:
    return list(transformers.image_utils.OPENAI_CLIP_STD)


def agree(opened: Any, model: Any, folder: Path, seconds: list[float] | None) -> None:
    prompts, names = ItemPrompts(opened._opened.job), {"image": ["a.png"], "video": ["long.avi", "short.avi"]}
    files = {kind: [str(folder / name) for name in some] for kind, some in names.items()}
    ids, items = prompts.place(prompts.tokenizer.encode(PROMPT), files, "a prompt", "/")
    extras = {name: torch.from_numpy(one) for name, one in padded([items.read(len(ids))]).items()}
    tokens = torch.tensor([ids])
    kinds = {WORDS.index("<|image_pad|>"): 1, WORDS.index("<|video_pad|>"): 2}
    given: Any = {
        **seen(folder, "a"),
        "input_ids": tokens,
        "pixel_values_videos": normalised(extras["video_values"][0]),
        "video_grid_thw": extras["video_grids"][0],
        "mm_token_type_ids": torch.tensor([[kinds.get(one, 0) for one in ids]]),
    }
    given |= {} if seconds is None else {"second_per_grid_ts": torch.tensor(seconds)}
    module = opened.module
    ours, expected = module.head(module(tokens, **extras)), model(**given).logits
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    for one, logits in ((module, ours), (model, expected)):
        one.zero_grad()
        logits.square().mean().backward()
    compare_gradients(module, model, folder)
    written = model.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=1, pad_token_id=0)
    answer = opened.generate(PROMPT, items=files, tokens=8, temperature=0)
    new = written[0, len(ids) :].tolist()
    assert new
    assert answer.split() == [WORDS[one] for one in new if one < len(WORDS) and WORDS[one] not in ("</s>", *SPECIAL)]


@pytest.mark.slow
def test_logits_gradients_and_texts_are_those_of_transformers(theirs: Any, tmp_path: Path) -> None:
    model = reference()
    model.config.vision_config.tokens_per_second = PER_SECOND
    folder = saved(tmp_path / "folder", model)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(CLIPS))
    seconds = [shown(theirs, name)[2] for name in SIZES if write_clip(folder, name)]
    import_checkpoint(folder, tmp_path / "imported", plugins=("image", "video"))
    agree(open_model(tmp_path / "imported"), model, folder, seconds)
    export_checkpoint(tmp_path / "imported", tmp_path / "exported")
    again = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "exported").eval()
    assert again.config.vision_config.tokens_per_second == PER_SECOND
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert json.loads((tmp_path / "exported" / "video_preprocessor_config.json").read_text()) == CLIPS
    agree(open_model(tmp_path / "exported", plugins=["image", "video"]), again, folder, seconds)


def test_clips_are_left_out_without_their_plugin(tmp_path: Path) -> None:
    opened = open_model(saved(tmp_path / "folder", reference()), plugins=["image"])
    assert "video" not in opened._opened.job.hooks.enabled


IMAGE = {**OPTIONS, "mean": (0.4, 0.5, 0.6), "deviation": (0.1, 0.2, 0.3)}


@pytest.mark.parametrize(
    ("given", "read_as"),
    [
        ({}, {"fps": 2.0, "least_frames": 4, "frames": 768, "least_pixels": 100352, "most_pixels": 602112}),
        ({"min_pixels": 784, "max_pixels": 3136}, {"least_pixels": 784, "size": 56, "most_pixels": 0}),
        ({"video_processor": {"num_frames": 7}, "max_pixels": 9}, {"frames": 8, "most_pixels": 602112}),
        ({"video_processor": {"max_frames": 9, "fps": 1}}, {"frames": 8, "fps": 1.0, "temporal": 2}),
    ],
)
def test_the_file_for_clips_is_read(given: dict[str, Any], read_as: dict[str, Any]) -> None:
    found = processor.read_clips(given, IMAGE)
    assert {key: found[key] for key in read_as} == read_as
    assert ("fps" in found) == ("num_frames" not in given.get("video_processor", {}))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"image_mean": [0.5, 0.5, 0.5]}, r"image_mean: clips and images share one, \[0.4, 0.5, 0.6\]; found"),
        ({"cap_pixels_per_frame": True}, "cap_pixels_per_frame: a frame's pixels do not depend"),
        ({"temporal_patch_size": 1}, "temporal_patch_size: expected 2, as vision_config has, found 1"),
        ({"do_resize": False}, "do_resize: expected True"),
    ],
)
def test_a_file_for_clips_without_counterpart_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"video_preprocessor_config.json: {says}"):
        processor.read_clips({"video_processor": given}, IMAGE)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"encoded_by": "video"}, "needs video.encoded_by = 'image'; found 'video'"),
        ({"positions_per_second": 0.0}, "needs a whole number of video.positions_per_second; found 0.0"),
        ({"positions_per_second": 2.5}, "needs a whole number of video.positions_per_second; found 2.5"),
    ],
)
def test_clips_that_qwen_has_not_are_not_written(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "folder", reference())
    job = open_model(folder, plugins=["image", "video"])._opened.job
    section = job.hooks.plugins["video"].config
    object.__setattr__(job.hooks.plugins["video"], "config", type(section)(**{**vars_of(section), **options}))
    ((_, inner),) = hookspecs.export_hf(job)
    image = job.hooks.plugins["image"].config
    with pytest.raises(ConfigError, match=says):
        write(image, Pictures(image), inner, job)


def vars_of(section: Any) -> dict[str, Any]:
    return {name: getattr(section, name) for name in section.__dataclass_fields__}
