"""`multimodal`: every item once, at its placeholder, on any number of workers and ranks; and what mistakes are told."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from forge_train import MASKED, Batch, ConfigError
from forge_train.base.errors import PluginError
from forge_train_kit.data.plugin import Prefetch
from forge_train_kit.data.prepare import Preparation, Report, prepare
from forge_train_kit.data.reading import SampleError
from forge_train_kit.modalities import ItemSource
from forge_train_plugins.data.mixture import Mixture, Source
from forge_train_plugins.data.multimodal import Multimodal
from forge_train_tools.testing import run_forge
from items_data import FEATURES, Scan, encoded, job, same, scan, write_records, write_scans

pytestmark = [pytest.mark.unit]

SIZES = (1, 4, 2, 3, 5, 2, 1)
TEXTS = ("<scan>ab", "a<scan><scan>bcd", "only text", "<scan>", "x<scan>y<scan>z", "<scan>!")
END = 256


def records(folder: Path) -> list[dict[str, Any]]:
    names = iter(write_scans(folder / "scans", SIZES))
    return [{"text": text, "scans": [f"scans/{next(names)}" for _ in range(text.count("<scan>"))]} for text in TEXTS]


def plugin(folder: Path, given: list[dict[str, Any]] | None = None, **options: Any) -> Multimodal:
    file = write_records(folder / "data.jsonl", records(folder) if given is None else given)
    values = {"path": str(file), "cache": str(folder / "cache"), "held_out": 0.0, **options}
    return Multimodal(Multimodal.Config(**values))


def rendered(batch: Batch, row: int) -> list[tuple[str, list[tuple[float, ...]]]]:
    """Of each record in a row: its text, with * at positions of items, and the values that stand there."""
    places, values = batch.extras["scan_places"][row], batch.extras["scan_values"][row]
    assert batch.document_ids is not None
    found = []
    for number in sorted(set(batch.document_ids[row].tolist())):
        text, items = "", list[tuple[float, ...]]()
        for at in (batch.document_ids[row] == number).nonzero().flatten().tolist():
            place, id = int(places[at]), int(batch.inputs[row, at])
            if place >= 0:
                assert id == END
                text += "*"
                items.append(tuple(values[place].tolist()))
            elif id != END:
                text += chr(id)
        found.append((text, items))
    return found


def wanted() -> list[tuple[str, list[Any]]]:
    sizes, number, found = iter(SIZES), 0, []
    for text in TEXTS:
        items: list[Any] = []
        while "<scan>" in text:
            size = next(sizes)
            text = text.replace("<scan>", "*" * size, 1)
            items += map(tuple, scan(number, size).tolist())
            number += 1
        found.append((text, items))
    return found


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_each_record_is_there_once_with_its_items_at_their_places(tmp_path: Path, packing: str) -> None:
    loader = plugin(tmp_path, packing=packing).build_data(job(micro_batch=1), "train")
    seen: list[Any] = []
    while len(seen) < len(TEXTS):
        batch = next(loader)
        seen += [one for one in rendered(batch, 0) if one[0]]
        assert batch.extras["scan_values"].shape[2] == FEATURES
        assert batch.extras["scan_values"].shape[1] == max(1, int(batch.extras["scan_grids"].prod(-1).sum()))
    assert sorted(seen) == sorted(wanted())


def test_no_position_of_an_item_is_learned_and_all_text_is(tmp_path: Path) -> None:
    batch = next(
        plugin(tmp_path, [{"text": "a<scan>bc", "scans": write_scans(tmp_path, [2])}]).build_data(job(), "train")
    )
    assert batch.inputs[0, :6].tolist() == [97, END, END, 98, 99, END]
    assert batch.labels[0, :6].tolist() == [MASKED, MASKED, 98, 99, END, MASKED]
    assert batch.extras["scan_places"][0, :4].tolist() == [-1, 0, 1, -1]


def test_an_item_takes_one_position_where_the_fusion_gives_it_one(tmp_path: Path) -> None:
    scans = write_scans(tmp_path, [4, 3])
    given = [{"text": "a<scan>b<scan>", "scans": scans}]
    batch = next(plugin(tmp_path, given).build_data(job(Scan(merge=2), gives="token"), "train"))
    assert batch.inputs[0, :5].tolist() == [97, END, 98, END, END]
    assert batch.extras["scan_places"][0, :6].tolist() == [-1, 0, -1, 1, -1, -1]
    assert batch.extras["scan_grids"][0].tolist() == [[1, 1, 4], [1, 1, 3]]


class Framed(Scan):
    """Text among the vectors, and after the last one."""

    missing = 0

    def written(self, source: ItemSource) -> str:
        count = self.positions(self.measure(source)) - self.missing
        return f"[{'<scan>'.join(map(str, range(count)))}<scan>]"


@pytest.mark.parametrize("store", ["references", "decoded"])
def test_an_item_may_have_text_among_its_vectors(tmp_path: Path, store: Any) -> None:
    given = [{"text": "a<scan>b<scan>", "scans": write_scans(tmp_path, [2, 1])}]
    batch = next(plugin(tmp_path, given, store=store).build_data(job(Framed()), "train"))
    shown = [ord(one) if one != "*" else END for one in "a[0*1*]b[0*]"]
    assert batch.inputs[0, :13].tolist() == [*shown, END]
    assert batch.labels[0, :13].tolist() == [*[MASKED] * 6, ord("b"), *[MASKED] * 4, END, MASKED]
    assert batch.extras["scan_places"][0, :13].tolist() == [-1, -1, -1, 0, -1, 1, -1, -1, -1, -1, 2, -1, -1]
    assert batch.extras["scan_grids"][0].tolist() == [[1, 1, 2], [1, 1, 1]]
    assert batch.extras["scan_values"][0].equal(torch.from_numpy(np.concatenate([scan(0, 2), scan(1, 1)])))


def test_a_text_with_other_than_a_placeholder_for_each_vector_is_told(tmp_path: Path) -> None:
    wrong = Framed()
    wrong.missing = 1
    given = [{"text": "a<scan>", "scans": write_scans(tmp_path, [3])}]
    with pytest.raises(PluginError, match=r"'scan': its text has 2 placeholders, .* the grid \(1, 1, 3\) 3 vectors"):
        plugin(tmp_path, given).build_data(job(wrong), "train")


def test_a_batch_without_items_has_one_patch_of_zeros(tmp_path: Path) -> None:
    made = plugin(tmp_path, [{"text": "abc"}])
    for batch in (next(made.build_data(job(), "train")), made.example_batch(job())):
        shapes = {name: list(tensor.shape) for name, tensor in batch.extras.items()}
        assert shapes == {"scan_values": [2, 1, FEATURES], "scan_grids": [2, 1, 3], "scan_places": [2, 24]}
        assert not batch.extras["scan_values"].any()
        assert (batch.extras["scan_places"] == -1).all()
        assert batch.axes_of("scan_places").sequence == 1
        assert batch.axes_of("scan_values").sequence is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_workers_change_no_bit(tmp_path: Path, kind: Any) -> None:
    alone = plugin(tmp_path).build_data(job(), "train")
    prefetch = Prefetch(workers=2, kind=kind)
    ahead: Any = plugin(tmp_path, prefetch=prefetch).build_data(job(), "train")
    assert all(same(next(alone), next(ahead)) for _ in range(6))
    ahead.close()


def test_ranks_divide_the_rows_of_one_process_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    whole = plugin(tmp_path).build_data(job(micro_batch=1, batches=(2,)), "train")
    batches = [next(whole) for _ in range(8)]
    ranks = [plugin(tmp_path).build_data(job(micro_batch=1, rank=rank, ranks=2), "train") for rank in range(2)]
    for at in range(4):
        assert all(same(next(ranks[rank]), batches[2 * at + rank]) for rank in range(2))
    again = plugin(tmp_path).build_data(job(micro_batch=1, batches=(2,)), "train")
    again.load_state_dict(ranks[0].state_dict())
    assert same(next(again), next(whole))


def test_items_in_records_are_kept_beside_the_tokens(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    given = records(tmp_path)
    one = next(plugin(tmp_path, given).build_data(job(micro_batch=4), "train"))
    inside = [
        {**record, "scans": [{"bytes": (tmp_path / name).read_bytes(), "path": None} for name in record["scans"]]}
        for record in given
    ]
    parquet.write_table(pyarrow.Table.from_pylist(inside), tmp_path / "data.parquet")
    other = Multimodal(
        Multimodal.Config(path=str(tmp_path / "data.parquet"), cache=str(tmp_path / "cache"), held_out=0.0)
    )
    assert same(one, next(other.build_data(job(micro_batch=4), "train")))
    urls = [{**record, "scans": [_url((tmp_path / name).read_bytes()) for name in record["scans"]]} for record in given]
    (tmp_path / "urls").mkdir()
    assert same(one, next(plugin(tmp_path / "urls", urls).build_data(job(micro_batch=4), "train")))
    for kept in tmp_path.rglob("*.items"):
        kept.unlink()
    assert same(one, next(plugin(tmp_path / "urls", urls).build_data(job(micro_batch=4), "train")))


def test_items_beside_a_remote_file_are_kept_beside_the_tokens(tmp_path: Path) -> None:
    system = pytest.importorskip("fsspec").filesystem("memory")
    given = records(tmp_path)
    expected = next(plugin(tmp_path, given).build_data(job(micro_batch=4), "train"))
    for path in (tmp_path / "data.jsonl", *(tmp_path / "scans").iterdir()):
        system.pipe(f"/bucket/{path.relative_to(tmp_path)}", path.read_bytes())
    made = plugin(tmp_path, given, path="memory://bucket/data.jsonl")
    assert same(expected, next(made.build_data(job(micro_batch=4), "train")))


def _url(content: bytes) -> str:
    return f"data:application/octet-stream;base64,{base64.b64encode(content).decode()}"


def test_data_that_moved_is_the_same(tmp_path: Path) -> None:
    first = plugin(tmp_path / "a", _made(tmp_path / "a")).build_data(job(), "train")
    second = plugin(tmp_path / "b", _made(tmp_path / "b")).build_data(job(), "train")
    second.load_state_dict(first.state_dict())  # which refuses another corpus
    assert same(next(first), next(second))


def _made(folder: Path) -> list[dict[str, Any]]:
    folder.mkdir()
    return records(folder)


def test_prepared_data_is_made_again_when_the_modality_counts_otherwise(tmp_path: Path) -> None:
    scans = write_scans(tmp_path, [4])
    for merge, length in ((1, 4), (2, 2)):
        made = plugin(tmp_path, [{"text": "<scan>", "scans": scans}]).build_data(job(Scan(merge=merge)), "train")
        assert int((next(made).extras["scan_places"][0] >= 0).sum()) == length


@pytest.mark.parametrize(("place", "text"), [("before", "***ab"), ("after", "ab***")])
def test_items_of_a_text_without_placeholders_may_have_a_place(tmp_path: Path, place: str, text: str) -> None:
    given = [{"text": "ab", "scans": write_scans(tmp_path, [1, 2])}, {"text": "<scan>c", "scan": "0.npy"}]
    loader = plugin(tmp_path, given, place=place, packing="pad", shuffle=False).build_data(job(), "train")
    batch = next(loader)
    assert [rendered(batch, row)[0][0] for row in range(2)] == [text, "*c"]


def test_a_placeholder_of_the_name_stands_for_that_of_the_modality(tmp_path: Path) -> None:
    padded = Scan()
    padded.placeholder = "<|scan_pad|>"
    given = [{"text": "a<scan>b<|scan_pad|>", "scans": write_scans(tmp_path, [1, 2])}]
    batch = next(plugin(tmp_path, given).build_data(job(padded), "train"))
    assert rendered(batch, 0)[0][0] == "a*b**"


def test_records_of_the_same_items_are_held_out_together(tmp_path: Path) -> None:
    names = write_scans(tmp_path, [1] * 40)
    given = [{"text": f"<scan>{text}", "scans": [name]} for name in names for text in ("a", "b")]
    made = plugin(tmp_path, given, held_out=0.4, packing="pad")
    seen = []
    for side in ("train", "validation"):
        loader: Any = made.build_data(job(micro_batch=1), side)  # type: ignore[arg-type]
        rows = loader._stream.rows.count
        seen.append([float(next(loader).extras["scan_values"].min()) for _ in range(rows)])
        assert all(seen[-1].count(one) == 2 for one in seen[-1])
        assert rows > 10
    assert not set(seen[0]) & set(seen[1])


@pytest.mark.parametrize(("long", "says"), [("right", ["ab**"]), ("left", ["***cd"]), ("drop", ["fits"])])
def test_an_item_is_never_cut(tmp_path: Path, long: str, says: list[str]) -> None:
    scans = write_scans(tmp_path, [2, 3, 3])
    given = [{"text": "ab<scan><scan>x<scan>cd", "scans": scans}, {"text": "fits"}]
    made = plugin(tmp_path, given, long=long, packing="pad", shuffle=False)
    batch = next(made.build_data(job(sequence=6, micro_batch=1), "train"))
    assert [text for text, _ in rendered(batch, 0) if text] == says
    first = {"right": 0, "left": 2000}.get(long, 0)
    assert float(batch.extras["scan_values"].min()) == first


def test_a_broken_item_stops_the_run_or_is_skipped(tmp_path: Path) -> None:
    given = records(tmp_path)
    options = {"packing": "pad", "shuffle": False}
    stops = plugin(tmp_path, given, **options).build_data(job(), "train")
    made = plugin(tmp_path, given, **options, prefetch=Prefetch(on_error="skip"))
    told: list[str] = []
    made.on_skip = told.extend  # type: ignore[method-assign, assignment]
    skips = made.build_data(job(), "train")
    (tmp_path / "scans" / "1.npy").write_bytes(b"broken")
    with pytest.raises(SampleError, match=r"data\.jsonl, line 2: .*scans/1\.npy: a broken scan\."):
        next(stops)
    batch = next(skips)
    assert [rendered(batch, row)[0][0] for row in range(2)] == ["*ab", "only text"]
    assert len(told) == 1
    assert "line 2" in told[0]


def test_records_whose_items_can_not_be_measured_are_left_out_where_that_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scans = [*write_scans(tmp_path, [2, 2]), "missing.npy"]
    (tmp_path / "1.npy").write_bytes(b"broken")
    given = [{"text": f"<scan>{at}", "scans": [name]} for at, name in enumerate(scans)]
    with pytest.raises(ConfigError, match=r"line 2: .*1\.npy: a broken scan"):
        plugin(tmp_path, given).build_data(job(), "train")
    skip = Prefetch(on_error="skip")
    batch = next(plugin(tmp_path, given, prefetch=skip).build_data(job(micro_batch=1), "train"))
    assert [text for text, _ in rendered(batch, 0) if text] == ["**0"]
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(told) == 2
    assert "line 2" in told[0]
    assert "missing.npy: No such file or directory. The record is left out." in told[1]
    with pytest.raises(ConfigError, match=r"no text in 1 file; all is left out, such as: .*line 1: .*missing\.npy"):
        plugin(tmp_path, given[2:], prefetch=skip).build_data(job(), "train")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (scan(0, 3), r"has a grid of \(1, 1, 3\) .* prepared for \(1, 1, 2\)"),
        (scan(0, 2).astype(np.float64), r"has \d+ bytes, and had \d+ when its record was prepared"),
    ],
)
def test_an_item_that_changed_since_it_was_measured_is_told(tmp_path: Path, changed: Any, says: str) -> None:
    loader = plugin(tmp_path, [{"text": "<scan>", "scans": write_scans(tmp_path, [2])}]).build_data(job(), "train")
    (tmp_path / "0.npy").write_bytes(encoded(changed))
    with pytest.raises(SampleError, match=rf"line 1: .*0\.npy: {says}"):
        next(loader)


def test_a_run_does_not_go_on_with_other_bytes_in_its_records(tmp_path: Path) -> None:
    first = plugin(tmp_path, [{"text": "<scan>", "scan": _url(encoded(scan(0, 2)))}]).build_data(job(), "train")
    other = plugin(tmp_path, [{"text": "<scan>", "scan": _url(encoded(scan(1, 2)))}]).build_data(job(), "train")
    with pytest.raises(ConfigError, match="the corpus is not the one this state was saved with"):
        other.load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"text": "a<scan>"}, "the text has 1 placeholder <scan> for 0 scans; write one for each."),
        ({"text": "a", "scans": ["0.npy"]}, "the text has 0 placeholders <scan> for 1 scan; write one for each."),
        ({"text": "a<scan>", "scans": ["no.npy"]}, "no.npy: No such file or directory."),
        ({"text": "a<scan>", "scans": "0.npy"}, "'scans': expected a list of items, found '0.npy'."),
        ({"text": "a<scan>", "scans": [3]}, "expected an item: a path, an address, or an object"),
        ({"text": "a<scan>", "scans": [{"bytes": None}]}, "expected an item: a path, an address, or an object"),
        ({"text": "a<scan>", "scans": ["text.npy"]}, "text.npy: is not a readable scan: "),
        ({"text": "a<scan>", "scans": ["data:,x"]}, "a data: URL must be of base64"),
        ({"text": "a<scan>", "scans": ["data:;base64,x"]}, "the content of an item is not base64"),
        ({"text": "a<clip>", "clips": ["0.npy"]}, "no enabled plugin gives a modality 'clip', whose items are"),
        ({"text": "<scan>", "scans": ["long.npy"]}, "line 2, has 31, 30 of them positions of items."),
        ({"scans": []}, "no string under 'text' (multimodal.field)"),
    ],
)
def test_a_mistake_is_told_by_file_and_record(tmp_path: Path, record: dict[str, Any], says: str) -> None:
    write_scans(tmp_path, [2])
    (tmp_path / "text.npy").write_text("not a scan")
    (tmp_path / "long.npy").write_bytes(encoded(scan(0, 30)))
    with pytest.raises(ConfigError) as error:
        plugin(tmp_path, [{"text": "fine"}, record]).build_data(job(), "train")
    assert f"{tmp_path / 'data.jsonl'}, line 2" in str(error.value)
    assert says in str(error.value)


def test_an_item_that_fits_in_no_row_is_told(tmp_path: Path) -> None:
    (tmp_path / "long.npy").write_bytes(encoded(scan(0, 30)))
    given = [{"text": "a<scan>", "scans": ["long.npy"]}]
    with pytest.raises(ConfigError, match=r"line 1: an item of 'scan' takes 30 positions, and a row has 24 tokens"):
        plugin(tmp_path, given, long="right").build_data(job(), "train")


@pytest.mark.slow
def test_a_run_that_stops_goes_on_bitwise_with_other_workers(tmp_path: Path) -> None:
    names = write_scans(tmp_path, (1, 3, 2, 4))
    given = [{"text": f"<scan>{at}", "scans": [names[at % 4]]} for at in range(40)]
    values = {
        "multimodal.path": str(write_records(tmp_path / "data.jsonl", given)),
        "multimodal.cache": str(tmp_path / "cache"),
        "decoder.vocabulary": 257,
        "train.evaluate_every": 0,
    }
    plugins = ("multimodal", "items_data:Scans")
    whole = run_forge(plugins, values, steps=4, folder=tmp_path / "whole")
    run_forge(plugins, values, steps=4, stop_at=2, folder=tmp_path / "parts")
    ahead = {"multimodal.prefetch": {"workers": 2, "kind": "processes"}}
    parts = run_forge(plugins, values | ahead, steps=4, folder=tmp_path / "parts")
    for (name, one), other in zip(whole.model.named_parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert any("fusion" in name for name, _ in whole.model.named_parameters())


def test_a_mixture_has_items_beside_texts(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("plain words\n" * 40)
    prepare(Preparation((str(tmp_path / "text.txt"),), tmp_path / "tokens", held_out=0.2), Report())
    write_records(tmp_path / "data.jsonl", records(tmp_path))
    sources = (
        Source(path=str(tmp_path / "tokens"), name="text"),
        Source(path=str(tmp_path / "data.jsonl"), name="scans", items=True),
    )
    options = {"sources": sources, "packing": "best_fit", "held_out": 0.0, "cache": str(tmp_path / "cache")}
    run = job(micro_batch=3, global_batch=3, total_steps=20, batch_warmup=(), steps=20, epochs=0)
    run.config.train.batch_at = lambda step: 3
    loader = Mixture(Mixture.Config(**options)).build_data(run, "train")  # type: ignore[arg-type]
    ahead: Any = Mixture(Mixture.Config(**options, prefetch=Prefetch(workers=2))).build_data(run, "train")  # type: ignore[arg-type]
    alone = ItemsOf(plugin(tmp_path).build_data(job(micro_batch=1), "train"))
    texts = with_items = 0
    for _ in range(6):
        batch = next(loader)
        assert same(batch, next(ahead))
        for row, source in enumerate(batch.targets["source"].tolist()):
            here = batch.extras["scan_places"][row] >= 0
            if source == 0:
                assert not here.any()
                assert not batch.extras["scan_values"][row].any()
                texts += 1
            else:
                assert rendered(batch, row) in alone.rows
                with_items += 1
    ahead.close()
    assert texts == with_items == 9


def test_a_mixture_names_the_source_whose_records_are_wrong(tmp_path: Path) -> None:
    write_records(tmp_path / "data.jsonl", [{"text": "a<scan>"}])
    options = {"sources": (Source(path=str(tmp_path / "data.jsonl"), items=True),), "packing": "pad", "held_out": 0.0}
    with pytest.raises(
        ConfigError, match=r"^mixture\.sources\[0\]\.path: .*data\.jsonl, line 1: the text has 1 placeholder <scan>"
    ):
        Mixture(Mixture.Config(**options, cache=str(tmp_path / "cache"))).build_data(job(), "train")  # type: ignore[arg-type]


class ItemsOf:
    """The rows of a loader's first epoch."""

    def __init__(self, loader: Any) -> None:
        self.rows = [rendered(next(loader), 0) for _ in range(loader.epoch)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"packing": "split"}, "'split' cuts items, which source 0 has; choose best_fit or pad."),
        ({"sources": (Source(path="x", items=True, dtype="uint16"),)}, "item 0: dtype has no effect on records"),
        ({"sources": (Source(path="x", long="drop"),)}, "item 0: long has no effect without items"),
    ],
)
def test_options_of_a_mixture_that_do_not_go_together_are_told(options: dict[str, Any], says: str) -> None:
    values = {"sources": (Source(path="x", items=True),), "packing": "best_fit", **options}
    made = Mixture(Mixture.Config(**values))  # type: ignore[arg-type]
    config: Any = SimpleNamespace(train=SimpleNamespace(epochs=0, total_steps=5, micro_batch=1))
    assert any(says in problem.message for problem in made.check_config(config))
