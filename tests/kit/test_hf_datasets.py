"""Data sets of the library `datasets`: every document once an epoch, streams go on exactly, mistakes in a sentence."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from crossed import crossed, few
from forge_train import ConfigError, Loader
from forge_train_kit.data.plugin import Prefetch
from forge_train_kit.data.tokenizers.byte import ByteTokenizer
from forge_train_plugins.data._hf_datasets.opening import Wanted, open_stream
from forge_train_plugins.data.hf_datasets import HFDatasets
from forge_train_plugins.data.tokenizer import Tokenizer
from forge_train_tools.testing import Pool, PoolError, run_forge

pytestmark = pytest.mark.unit

TEXTS = [f"{number}:" + "x" * (number * 37 % 61) for number in range(90)]
END = 256
SEQUENCE = 32


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library's cache in the test's folder, and nothing on the screen; the network is off in all tests."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """The same records in two files of each kind, and as the library saves them."""
    halves = [{"text": text, "n": number} for number, text in enumerate(TEXTS)]
    for at, records in enumerate((halves[:50], halves[50:])):
        (tmp_path / f"{at}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
        datasets.Dataset.from_list(records).to_parquet(tmp_path / f"{at}.parquet", batch_size=8)
    whole = datasets.Dataset.from_list(halves)
    datasets.DatasetDict(train=whole, few=whole.select(range(10))).save_to_disk(tmp_path / "saved")
    return {
        "json": {"path": "json", "data_files": str(tmp_path / "*.jsonl")},
        "parquet": {"path": "parquet", "data_files": tuple(str(tmp_path / f"{at}.parquet") for at in (0, 1))},
        "saved": {"path": str(tmp_path / "saved")},
    }


class Ranks:
    """As many ranks as asked for, each with its plugin and loader, in threads where they talk to each other."""

    def __init__(self, ranks: int, side: str = "train", micro_batch: int = 2, **settings: Any) -> None:
        self.barrier, self.said = threading.Barrier(ranks), dict[int, Any]()
        self.plugins = [HFDatasets(HFDatasets.Config(**settings)) for _ in range(ranks)]
        self.jobs = [self._job(rank, ranks, micro_batch) for rank in range(ranks)]
        pairs = zip(self.plugins, self.jobs, strict=True)
        self.loaders: list[Loader] = [plugin.build_data(one, side) for plugin, one in pairs]  # type: ignore[arg-type]

    def _job(self, rank: int, ranks: int, micro_batch: int) -> Any:
        def gather(value: Any) -> list[Any]:
            self.said[rank] = value
            self.barrier.wait(20)
            found = [self.said[one] for one in range(ranks)]
            self.barrier.wait(20)
            return found

        return SimpleNamespace(
            hooks=SimpleNamespace(
                call=lambda spec, arguments: [] if spec.name == "modalities" else ByteTokenizer(),
                provider=lambda slot: "tokenizer",
                plugins={"tokenizer": Tokenizer(Tokenizer.Config())},
            ),
            config=SimpleNamespace(
                train=SimpleNamespace(sequence=SEQUENCE, micro_batch=micro_batch, evaluate_every=0),
                sections={"tokenizer": SimpleNamespace(path="bytes")},
            ),
            dist=SimpleNamespace(main=not rank, data_rank=rank, data_ranks=ranks, gather_objects=gather),
            device=torch.device("cpu"),
            seed=7,
        )

    def take(self, batches: int) -> list[list[list[Any]]]:
        """Rows of each rank: of every tensor."""
        return [
            [tensor.tolist() for _ in range(batches) for tensor in next(loader).tensors().values()]
            for loader in self.loaders
        ]

    def save(self) -> dict[str, Any]:
        """What a checkpoint keeps; the same of every rank."""
        with ThreadPoolExecutor(len(self.plugins)) as pool:
            states = list(pool.map(lambda plugin: plugin.state_dict(), self.plugins))
        assert all(state == states[0] for state in states)
        every = [loader.state_dict() for loader in self.loaders]
        assert all(one == every[0] for one in every)
        state: dict[str, Any] = json.loads(json.dumps({"data": every[0], "plugin": states[0]}))
        return state

    def load(self, state: dict[str, Any]) -> None:
        for loader, plugin in zip(self.loaders, self.plugins, strict=True):
            loader.load_state_dict(state["data"])
            plugin.load_state_dict(state["plugin"])


def documents(loader: Loader, tokens: int) -> list[str]:
    """The first documents that a rank is given, of rows without isolation or shuffled rows."""
    ids: list[int] = []
    while len(ids) < tokens:
        ids += next(loader).inputs.ravel().tolist()
    return bytes(id if id < END else 0 for id in ids).decode().split("\0")[:-1]


def first_epoch(found: Sequence[str]) -> list[str]:
    """What comes before anything comes again."""
    return list(found[: next(at for at, one in enumerate(found) if one in found[:at])])


@pytest.mark.parametrize(("kind", "ranks"), crossed(["json", "parquet", "saved"], [1, 2, 3]))
def test_a_stream_gives_every_document_once_an_epoch(sources: dict[str, Any], kind: str, ranks: int) -> None:
    every = Ranks(ranks, streaming=True, shuffle_buffer=16, held_out=0, **sources[kind])
    assert all(isinstance(loader, Loader) for loader in every.loaders)
    shares = [documents(loader, 9000) for loader in every.loaders]
    firsts = [first_epoch(share) for share in shares]
    assert sorted(text for first in firsts for text in first) == sorted(TEXTS)
    for share, first in zip(shares, firsts, strict=True):
        second = share[len(first) : 2 * len(first)]
        assert sorted(second) == sorted(first)
        assert second != first  # every epoch has its own order
    assert firsts[0] != [text for text in TEXTS if text in firsts[0]]


@pytest.mark.parametrize(
    ("kind", "workers", "ranks"),
    few(
        [*itertools.product(["json", "parquet", "saved"], [0, 1], [1, 2, 3])],
        [("json", 0, 2), ("json", 1, 1), ("parquet", 1, 3), ("parquet", 0, 1), ("saved", 0, 3), ("saved", 1, 2)],
    ),
)
def test_a_stream_is_resumed_twice_bit_for_bit(sources: dict[str, Any], kind: str, workers: int, ranks: int) -> None:
    settings = {"streaming": True, "shuffle_buffer": 16, **sources[kind]}
    expected = Ranks(ranks, **settings).take(23)
    settings["prefetch"] = Prefetch(workers=workers, batches=4)
    found: list[list[Any]] = [[] for _ in range(ranks)]
    state: dict[str, Any] = {}
    for batches in (5, 9, 9):  # in the first epoch, in a block; in another block; on to the second epoch
        every = Ranks(ranks, **settings)
        if state:
            every.load(state)
        for rank, rows in enumerate(every.take(batches)):
            found[rank] += rows
        state = every.save()
        if batches == 9:  # there and back: what was read ahead is forgotten
            place = every.loaders[0].state_dict()
            every.loaders[0].skip(6 * ranks)
            skipped = [tensor.tolist() for tensor in next(every.loaders[0]).tensors().values()]
            assert skipped == Ranks(ranks, **settings).take(len(found[0]) // 4 + 4)[0][-4:]
            every.loaders[0].load_state_dict(place)
            state = every.save()
        for loader in every.loaders:
            loader.close()  # type: ignore[attr-defined]
    assert found == expected
    with pytest.raises(
        ConfigError, match=f"continues with the number of data-parallel ranks .* {ranks}, and not with 4"
    ):
        Ranks(4, **settings).load(state)


def test_a_stream_finds_its_place_from_the_count_alone(sources: dict[str, Any]) -> None:
    settings = {"streaming": True, "shuffle_buffer": 16, **sources["parquet"]}
    expected = Ranks(2, **settings).take(12)
    skipped, counted = Ranks(2, **settings), Ranks(2, **settings)
    for loader in skipped.loaders:
        next(loader)
        loader.skip(2 * 2 * 4)
    fresh = skipped.save()
    for loader in counted.loaders:
        next(loader)
        loader.load_state_dict({"sequences": 2 * 2 * 5})
    saved = Ranks(2, **settings)
    saved.load(fresh)
    tensors = len(expected[0]) // 12
    for every in (skipped, counted, saved):
        assert every.take(7) == [rank[5 * tensors :] for rank in expected]


def test_rows_of_a_stream_are_those_of_the_whole_text(sources: dict[str, Any]) -> None:
    from forge_train_kit.data.documents import Documents
    from forge_train_kit.data.rows import SplitRows
    from forge_train_kit.data.shard import Shard

    ids = [np.array([*text.encode(), END], np.int64) for text in TEXTS]
    text = Documents([Shard(Path("x"), np.concatenate(ids), np.cumsum([len(one) for one in ids]))])
    for isolate in (True, False):
        expected = SplitRows(text, SEQUENCE, isolate=isolate)
        (loader,) = Ranks(
            1, micro_batch=1, streaming=True, shuffle=False, held_out=0, isolate=isolate, **sources["json"]
        ).loaders
        for row in range(expected.count):
            wanted, batch = expected.read(np.array([row])), next(loader)
            for name, tensor in batch.tensors().items():
                assert tensor.tolist() == getattr(wanted, name).tolist(), name


@pytest.mark.parametrize("kind", ["json", "parquet", "saved"])
def test_without_streaming_both_sides_are_everything(sources: dict[str, Any], kind: str, tmp_path: Path) -> None:
    settings = {"held_out": 0.3, "shuffle": False, "isolate": False, "cache": str(tmp_path / "cache"), **sources[kind]}
    sides: dict[str, list[str]] = {}
    for side in ("train", "validation"):
        (loader,) = Ranks(1, side, micro_batch=1, **settings).loaders
        given = loader._stream.rows._documents  # type: ignore[attr-defined]
        ids = np.zeros(given.tokens, np.int64)
        given.take(0, ids)
        sides[side] = bytes(id if id < END else 0 for id in ids.tolist()).decode().split("\0")[:-1]
        (stream,) = Ranks(1, side, streaming=True, **{**settings, "isolate": True}).loaders
        found = first_epoch(documents(stream, 9000))
        assert found[: len(sides[side])] == sides[side]
        assert found[len(sides[side]) :] == ([] if side == "train" else [""]), "held-out text ends in padding"
    assert sorted(sides["train"] + sides["validation"]) == sorted(TEXTS)
    if kind == "json":
        chosen = {**settings, "split": "train[10:40]", "held_out": 0, "shuffle": True}
        (loader,) = Ranks(1, micro_batch=1, **chosen).loaders
        assert loader._stream.rows._documents.count == 30  # type: ignore[attr-defined]
    if kind == "saved":
        (loader,) = Ranks(1, "validation", micro_batch=1, **{**settings, "held_out": 0.01, "validation": "few"}).loaders
        assert loader._stream.rows._documents.count == 10  # type: ignore[attr-defined]


class TestMistakes:
    @pytest.mark.parametrize("streaming", [True, False])
    def test_of_names(self, sources: dict[str, Any], tmp_path: Path, streaming: bool) -> None:
        def refused(why: str, **settings: Any) -> None:
            options = {"streaming": streaming, "cache": str(tmp_path / "cache"), **settings}
            with pytest.raises(ConfigError, match=why) as caught:
                Ranks(1, **options).take(1)
            assert "\n" not in str(caught.value)

        refused(
            "no string under 'body' .hf_datasets.field.; the record has 'text', 'n'", field="body", **sources["json"]
        )
        refused("no string under 'n'", field="n", **sources["json"])
        refused("can't be read: .*(Unknown|Bad) split", split="test", **sources["json"])
        refused("no split 'test'; there is 'train', 'few'", split="test", **sources["saved"])
        refused("can't be read: .*nowhere", path="nowhere/at-all")
        empty = datasets.Dataset.from_dict({"text": []}, features=datasets.Features(text=datasets.Value("string")))
        empty.save_to_disk(tmp_path / "empty")
        refused("has no records", path=str(tmp_path / "empty"))
        empty.to_parquet(tmp_path / "none.parquet")
        refused("no data|finds no text", path="parquet", data_files=str(tmp_path / "none.parquet"))
        datasets.Dataset.from_dict({"text": [""] * 4}).save_to_disk(tmp_path / "blank")
        refused("finds no text|no text in", path=str(tmp_path / "blank"))
        broken = tmp_path / "broken.parquet"
        broken.write_bytes((tmp_path / "1.parquet").read_bytes()[:-40])
        refused("can't be read", path="parquet", data_files=str(broken))

    def test_fewer_documents_than_ranks(self, sources: dict[str, Any], tmp_path: Path) -> None:
        (tmp_path / "one.jsonl").write_text('{"text": "alone"}\n')
        with pytest.raises(ConfigError, match="a data rank finds no text"):
            Ranks(2, streaming=True, held_out=0, path="json", data_files=str(tmp_path / "one.jsonl")).take(1)

    def test_records_that_changed_since(self, sources: dict[str, Any], tmp_path: Path) -> None:
        settings = {"streaming": True, "shuffle_buffer": 16, "held_out": 0, **sources["json"]}
        every = Ranks(1, **settings)
        every.take(3)
        state = every.save()
        file = tmp_path / "0.jsonl"
        file.write_text(file.read_text().replace("x:", "y:").replace("xxx", "yyy"))
        other = Ranks(1, **settings)
        other.load(state)
        with pytest.raises(ConfigError, match="not the one this state was saved with"):
            other.take(1)

    def test_options_without_effect(self) -> None:
        run: Any = SimpleNamespace(train=SimpleNamespace(epochs=0))
        plugin = HFDatasets(HFDatasets.Config(validation="test", held_out=0.5, shuffle_buffer=5))
        assert [one.key for one in plugin.check_config(run)] == [
            "hf_datasets.path",
            "hf_datasets.held_out",
            "hf_datasets.shuffle_buffer",
        ]
        ahead = Prefetch(workers=2, on_error="skip")
        plugin = HFDatasets(HFDatasets.Config(path="json", streaming=True, prefetch=ahead))
        assert [one.key for one in plugin.check_config(run)] == [
            "hf_datasets.prefetch",
            "hf_datasets.prefetch.on_error",
        ]
        with pytest.raises(ConfigError, match="nothing is held out"):
            Ranks(1, "validation", path="x", held_out=0)


@pytest.mark.parametrize("ranks", [2, 3])
def test_uneven_files_repeat_nothing(tmp_path: Path, ranks: int) -> None:
    """Six documents in one file, sixty in another, of equal length: after n epochs each was seen n times."""
    for name, numbers in (("a", range(6)), ("b", range(6, 66))):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": f"document {n:02}"}) + "\n" for n in numbers)
        )
    files = tuple(str(tmp_path / f"{name}.jsonl") for name in "ab")
    stream = open_stream(Wanted("json", "", files, "train"), 1, ranks)
    assert [record["text"] for record in stream] == [f"document {n:02}" for n in range(1, 66, ranks)]
    every = Ranks(ranks, streaming=True, shuffle_buffer=16, held_out=0, path="json", data_files=files)
    share = 66 // ranks
    seen = Counter(text for loader in every.loaders for text in documents(loader, 13 * share * 4)[: 3 * share])
    assert set(seen.values()) == {3}
    assert len(seen) == 66


def train(folder: str, path: str, name: str, stop_at: int = 0) -> list[float]:
    """Four steps on the ranks there are."""
    settings = {
        "hf_datasets.path": path,
        "hf_datasets.streaming": True,
        "hf_datasets.shuffle_buffer": 16,
        "hf_datasets.held_out": 0.3,
        "train.global_batch": 4,
        "train.micro_batch": 1,
        "train.evaluate_every": 2,
    }
    more = {"stop_at": stop_at} if stop_at else {}
    return run_forge(("hf_datasets",), settings, steps=4, folder=Path(folder), name=name, **more).losses  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_stop_and_go_on(ranks: Pool, sources: dict[str, Any], tmp_path: Path) -> None:
    common = {"folder": str(tmp_path / "runs"), "path": sources["saved"]["path"]}
    whole = ranks.run(train, 2, name="whole", **common)
    ranks.run(train, 2, name="parts", stop_at=3, **common)
    with pytest.raises(PoolError, match="continues with the number of data-parallel ranks"):
        ranks.run(train, 1, name="parts", **common)
    assert ranks.run(train, 2, name="parts", **common) == whole
