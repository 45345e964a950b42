"""Items that can't be read, and fields that nothing reads: named, left out or replaced."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from forge_train import ConfigError
from forge_train_kit.data.plugin import Prefetch
from forge_train_kit.modalities import ItemSource
from forge_train_plugins.data.mixture import Mixture, Source
from forge_train_plugins.data.multimodal import Multimodal
from forge_train_plugins.data.text import Text
from forge_train_plugins.modalities._vision.modality import Clips, Pictures
from forge_train_plugins.modalities.vision import Image, Video
from forge_train_tools.testing import run_forge
from items_data import FEATURES, Scan, job, scan, write_records, write_scans

pytestmark = [pytest.mark.unit]

REPLACE = Prefetch(on_error="replace")


def plugin(folder: Path, given: list[dict[str, Any]], **options: Any) -> Multimodal:
    file = write_records(folder / "data.jsonl", given)
    values = {"path": str(file), "cache": str(folder / "cache"), "held_out": 0.0, "packing": "pad", "shuffle": False}
    return Multimodal(Multimodal.Config(**{**values, **options}))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    caplog.clear()
    return found


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"text": "a", "scanss": ["0.npy"]}, "nothing reads the items under 'scanss'. Did you mean 'scans'?"),
        ({"text": "a<scan>", "Scans": ["0.npy"]}, "nothing reads the items under 'Scans'. Did you mean 'scans'?"),
        ({"text": "a", "sacn": "0.npy"}, "nothing reads the items under 'sacn'. Did you mean 'scan'?"),
        ({"text": "a", "scan_path": {"path": "x"}}, "nothing reads the items under 'scan_path'. Did you mean 'scan'?"),
    ],
)
def test_a_misspelt_field_is_told_by_file_and_record(tmp_path: Path, record: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        plugin(tmp_path, [{"text": "fine"}, record]).build_data(job(), "train")
    assert str(error.value) == f"multimodal.path: {tmp_path / 'data.jsonl'}, line 2: {says}"


def test_other_fields_are_left_alone(tmp_path: Path) -> None:
    """Those of items, beside which a path may stand for whatever it likes; and those without items."""
    (name,) = write_scans(tmp_path, [1])
    given = [
        {"text": "<scan>", "scans": [name], "scan_path": "0.npy"},
        {"text": "a", "scan_id": "00012", "scan_sizes": [3, 4], "scanned": "on 1.2. by hand.", "scan_tags": ["x"]},
        {"text": "b", "scans": None, "scan_file": None, "scan_urls": []},
    ]
    assert plugin(tmp_path, given).build_data(job(), "train").epoch == 3


def test_what_was_left_out_is_told_by_later_runs_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = [{"text": "<scan>", "scans": write_scans(tmp_path, [1])}]
    given += [{"text": f"<scan>{at}", "scans": ["no.npy"]} for at in range(2)]
    skip = Prefetch(on_error="skip")
    made = plugin(tmp_path, given, prefetch=skip)
    made.build_data(job(), "train")
    first = f"multimodal.path: {tmp_path / 'data.jsonl'}, line 2: {tmp_path / 'no.npy'}: No such file or directory."
    told = warnings(caplog)
    assert told[0] == f"{first} The record is left out."
    assert len(told) == 2
    Multimodal(made.config).build_data(job(), "train")
    assert warnings(caplog) == [f"multimodal: 2 records left out when the data was prepared; the first: {first}"]


def test_an_empty_item_stands_in_for_one_that_can_not_be_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = write_scans(tmp_path, [2, 3])
    (tmp_path / "bad.npy").write_bytes(b"broken")
    given = [{"text": "a<scan>b<scan>c<scan>", "scans": [names[0], "bad.npy", names[1]]}]
    made = plugin(tmp_path, given, prefetch=REPLACE)
    batch = next(made.build_data(job(micro_batch=1), "train"))
    path = tmp_path / "data.jsonl"
    assert warnings(caplog) == [
        f"multimodal.path: {path}, line 1: {tmp_path / 'bad.npy'}: a broken scan. An empty item stands in for it."
    ]
    assert batch.extras["scan_grids"][0].tolist() == [[1, 1, 2], [1, 1, 1], [1, 1, 3]]
    assert batch.extras["scan_places"][0, :9].tolist() == [-1, 0, 1, -1, 2, -1, 3, 4, 5]
    wanted = np.concatenate([scan(0, 2), np.zeros((1, FEATURES)), scan(1, 3)])
    assert batch.extras["scan_values"][0].tolist() == wanted.tolist()
    Multimodal(made.config).build_data(job(), "train")
    (told,) = warnings(caplog)
    assert told.startswith("multimodal: 1 item replaced when the data was prepared; the first: ")
    alone = next(plugin(tmp_path, given, prefetch=REPLACE).build_data(job(gives="token", micro_batch=1), "train"))
    assert alone.extras["scan_places"][0, :7].tolist() == [-1, 0, -1, 1, -1, 2, -1]


@pytest.mark.parametrize("workers", [0, 2])
def test_and_for_one_that_breaks_later_in_the_place_that_it_had(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    names = write_scans(tmp_path, [2, 3])
    given = [{"text": f"a<scan>{at}", "scans": [name]} for at, name in enumerate(names)]
    whole = next(plugin(tmp_path, given).build_data(job(), "train"))
    made = plugin(tmp_path, given, prefetch=Prefetch(on_error="replace", workers=workers))
    metrics = made.metrics(None, job())  # type: ignore[arg-type]
    loader = made.build_data(job(), "train")
    (tmp_path / names[1]).write_bytes(b"broken")
    batch = next(loader)
    told = [one for one in warnings(caplog) if "stands in" in one]
    assert told == [
        f"{tmp_path / 'data.jsonl'}, line 2: {tmp_path / names[1]}: a broken scan. An empty item stands in for it."
    ]
    assert metrics is not None
    assert float(metrics["replaced"].sums[0]) == 1.0
    for name in ("inputs", "labels", "scan_grids", "scan_places"):
        assert torch.equal(batch.tensors()[name], whole.tensors()[name]), name
    assert torch.equal(batch.extras["scan_values"][0], whole.extras["scan_values"][0])
    assert not batch.extras["scan_values"][1].any()
    loader.close()


def test_replace_is_refused_where_nothing_can_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = Mixture.Config(sources=(Source(path="x"),), prefetch=REPLACE)
    train: Any = SimpleNamespace(train=SimpleNamespace(epochs=0, total_steps=5, micro_batch=1))
    for key, problems in (
        ("text", Text(Text.Config(path="x", prefetch=REPLACE)).check_config(train)),
        ("mixture", Mixture(mixture).check_config(train)),
    ):
        (told,) = [one.message for one in problems if one.key == f"{key}.prefetch.on_error"]
        assert told == "'replace' is for items beside text; choose 'stop' or 'skip'."
    monkeypatch.delattr(Scan, "smallest")
    with pytest.raises(ConfigError, match=r"^multimodal\.prefetch\.on_error: 'replace': modality 'scan' does not say"):
        plugin(tmp_path, [{"text": "a"}], prefetch=REPLACE).build_data(job(), "train")


@pytest.mark.parametrize("fit", ["square", "crop", "keep"])
def test_the_smallest_picture_and_clip_are_what_the_encoder_takes(fit: Any) -> None:
    options = {"size": 32, "patch": 8, "merge": 2, "fit": fit}
    side = 2 if fit == "keep" else 4
    assert Pictures(Image.Config(**options)).smallest() == (1, side, side)
    assert Clips(Video.Config(frames=4, **options)).smallest() == (4, side, side)
    assert Clips(Video.Config(frames=8, fps=2.0, temporal=2, **options)).smallest() == (2, side, side)


def test_memory_that_is_short_says_nothing_of_an_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run would otherwise train on other data."""
    given = [{"text": "<scan>", "scans": write_scans(tmp_path, [1])}]
    loader = plugin(tmp_path, given, prefetch=REPLACE).build_data(job(micro_batch=1), "train")

    def short(self: Scan, source: ItemSource) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(Scan, "read", short)
    with pytest.raises(Exception, match="no room"):
        next(loader)


def test_data_without_items_is_told_where_the_model_takes_some_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_records(tmp_path / "data.jsonl", [{"text": f"a<scan> {at}", "scans": ["0.npy"]} for at in range(99)])
    settings = {"text.path": str(file), "text.cache": str(tmp_path / "cache")}
    run_forge(("text", "items_data:Scans"), settings, steps=1, folder=tmp_path / "run")
    (said,) = (one.getMessage() for one in caplog.records if "takes in items" in one.getMessage())
    assert "'<scan>' in a text is a word" in said
    caplog.clear()
    run_forge(("scans:Scans",), steps=1, folder=tmp_path / "made")
    assert "takes in items" not in caplog.text, "a plugin that makes items out of batches"
