"""Items that are kept decoded beside the tokens of prepared data: the batches are those of their files."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_cli import forge
from forge_train import Batch, ConfigError, PluginError
from forge_train_kit.data.plugin import Prefetch
from forge_train_kit.data.reading import SampleError
from forge_train_kit.modalities import Item, ItemSource
from forge_train_plugins.data.multimodal import Multimodal
from forge_train_plugins.modalities._vision.modality import Clips
from forge_train_plugins.modalities.vision import Video
from items_data import Scan, encoded, job, same, scan, write_records, write_scans
from test_video_reading import RAMP, write

pytestmark = [pytest.mark.unit]


def plugin(folder: Path, given: list[dict[str, Any]], **options: Any) -> Multimodal:
    file = write_records(folder / "data.jsonl", given)
    return Multimodal(Multimodal.Config(**{"path": str(file), "cache": str(folder / "cache"), **options}))


def batches(made: Multimodal, split: Any, run: Any) -> list[Batch]:
    loader = made.build_data(run, split)
    return [next(loader) for _ in range(3)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_batches_are_those_of_the_files_which_may_be_gone(tmp_path: Path, split: Any, workers: int) -> None:
    names = write_scans(tmp_path / "scans", (1, 3, 2, 4))
    given: list[dict[str, Any]] = [
        {"text": f"<scan>{at}<scan>", "scans": [f"scans/{names[at % 4]}", url(at)]} for at in range(12)
    ]
    options = {"held_out": 0.3, "prefetch": Prefetch(workers=workers)}
    wanted = batches(plugin(tmp_path, given, **options), split, job())
    plugin(tmp_path, given, store="decoded", **options).build_data(job(), split)
    shutil.rmtree(tmp_path / "scans")
    made = Multimodal(Multimodal.Config(**{**vars_of(tmp_path), "store": "decoded", **options}))
    for one, other in zip(batches(made, split, job()), wanted, strict=True):
        assert same(one, other)
        assert one.extras["scan_values"].any()


def url(number: int) -> str:
    return f"data:;base64,{base64.b64encode(encoded(scan(number, 2))).decode()}"


def vars_of(folder: Path) -> dict[str, Any]:
    return {"path": str(folder / "data.jsonl"), "cache": str(folder / "cache")}


def test_clips_with_times_and_contents_that_are_equal_are_kept_once(tmp_path: Path) -> None:
    write(tmp_path / "a.mp4", RAMP)
    shutil.copy(tmp_path / "a.mp4", tmp_path / "b.mp4")
    given = [{"text": "<video><video>", "videos": ["a.mp4", "b.mp4"]}]
    clips = Clips(Video.Config(size=16, patch=8, merge=1, frames=4, dim=12, heads=1, times=True))
    run = job(clips, sequence=96, micro_batch=1)  # type: ignore[arg-type]
    wanted = next(plugin(tmp_path, given, held_out=0.0).build_data(run, "train"))
    made = plugin(tmp_path, given, held_out=0.0, store="decoded")
    assert same(next(made.build_data(run, "train")), wanted)
    (kept,) = (tmp_path / "cache").glob("*/*.items")
    assert kept.stat().st_size == 4 * 16 * 16 * 3
    ended = forge("data", "inspect", kept.parent, "--html", tmp_path / "page.html")
    assert ended.code == 0, ended.err
    assert "not shown: it is kept decoded<figcaption>" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_what_is_wrong_with_kept_values_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [{"text": "<scan>", "scans": write_scans(tmp_path, [2])}]
    made = plugin(tmp_path, given, held_out=0.0, store="decoded")
    loader = made.build_data(job(), "train")
    (kept,) = (tmp_path / "cache").glob("*/*.items")
    kept.write_bytes(kept.read_bytes()[:-4])
    with pytest.raises(SampleError, match=r"line 1: .*\.items: ValueError: .*; delete its folder to prepare the data"):
        next(loader)
    with pytest.raises(ConfigError, match=r"line 1: .*gone\.npy: No such file or directory"):
        plugin(tmp_path, [{"text": "<scan>", "scan": "gone.npy"}], store="decoded").build_data(job(), "train")

    def wrong(self: Scan, source: ItemSource) -> Item:
        return Item(np.zeros((3, 1)), (1, 1, 2))

    monkeypatch.setattr(Scan, "read", wrong)
    with pytest.raises(PluginError, match=r"Modality 'scan': read gave \(3, 1\) values, and its grid says \(2, 3\)\."):
        plugin(tmp_path, given * 2, store="decoded").build_data(job(), "train")
