"""Samples of a step are spread over micro-batches and ranks by cost: none is lost or doubled wherever it goes on."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from forge_train import Batch
from forge_train_kit.data.balance import spread
from forge_train_kit.data.items.costs import ItemCosts
from forge_train_kit.data.plugin import Prefetch
from forge_train_kit.data.prepare import Preparation, Report, prepare
from forge_train_kit.modalities import ItemSource
from forge_train_plugins.data.mixture import Mixture, Source
from forge_train_plugins.data.multimodal import Multimodal
from forge_train_plugins.modalities._vision.modality import Pictures
from forge_train_plugins.modalities.vision import Image
from items_data import Scan, job, same, write_records, write_scans

pytestmark = [pytest.mark.unit]

GLOBAL = 32


def lopsided(costs: NDArray[Any], shares: NDArray[Any]) -> float:
    """The largest share's cost, divided by the mean."""
    each = costs[shares].reshape(len(shares), -1).sum(1)
    return float(each.max() / each.mean())


@pytest.mark.parametrize(
    ("micro_batch", "ranks"),
    [(1, 1), (1, 2), (1, 3), (1, 24), (2, 1), (2, 4), (2, 6), (3, 4), (4, 1), (4, 6), (24, 1)],
)
def test_every_sample_is_in_one_micro_batch_which_is_the_same_on_all_layouts(micro_batch: int, ranks: int) -> None:
    draws = np.random.default_rng(0)
    for most in (1, 2, 9, 1000):
        costs = draws.integers(0, most, 24).astype(np.float64)
        found, alone = spread(costs, micro_batch, ranks), spread(costs, micro_batch, 1)
        assert found.shape == (ranks, 24 // micro_batch // ranks, micro_batch)
        assert sorted(found.ravel().tolist()) == [*range(24)]
        each = [{tuple(batch) for batch in one.reshape(-1, micro_batch).tolist()} for one in (found, alone)]
        assert each[0] == each[1]
        assert (np.diff(costs[found].sum(2), axis=1) <= 0).all(), "the costliest micro-batch comes first"


@pytest.mark.parametrize(("micro_batch", "ranks"), [(1, 4), (2, 4), (4, 4), (1, 8), (2, 8), (2, 6), (1, 3)])
def test_ranks_cost_the_same(micro_batch: int, ranks: int) -> None:
    draws = np.random.default_rng(0)
    found, before = [], []
    for _ in range(20):
        costs = draws.lognormal(0, 0.6, 96)
        found.append(lopsided(costs, spread(costs, micro_batch, ranks)))
        before.append(lopsided(costs, np.arange(96).reshape(-1, ranks, micro_batch).swapaxes(0, 1)))
    assert np.mean(found) < 1.03 < np.mean(before)


def test_samples_of_equal_costs_stay_in_their_order() -> None:
    assert spread(np.full(12, 7.0), 2, 3).tolist() == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]


class Counted(Scan):
    """Scans, of which it is known which were decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.decoded: list[str] = []

    def read(self, source: ItemSource) -> Any:
        self.decoded.append(source.path)
        return super().read(source)


def heavy(folder: Path, count: int = 160) -> list[dict[str, Any]]:
    """Records of scans of log-normal sizes, and texts among them."""
    draws = np.random.default_rng(1)
    sizes = np.clip(draws.lognormal(1.5, 0.9, count), 1, 40).astype(int).tolist()
    names = write_scans(folder, sizes)
    return [{"text": f"<scan>{at}", "scans": [name]} if at % 5 else {"text": f"{at}"} for at, name in enumerate(names)]


def loaders(folder: Path, ranks: int, micro_batch: int, **options: Any) -> tuple[list[Any], list[Counted]]:
    """Those of all ranks."""
    file = folder / "data.jsonl"
    if not file.exists():
        write_records(file, heavy(folder))
    prefetch = Prefetch(workers=options.pop("workers", 0))
    values = {"path": str(file), "cache": str(folder / "cache"), "held_out": 0.0, "packing": "pad", **options}
    made, scans = [], [Counted() for _ in range(ranks)]
    for rank, one in enumerate(scans):
        run = job(one, rank=rank, ranks=ranks, micro_batch=micro_batch, sequence=48, batches=(GLOBAL,))
        made.append(Multimodal(Multimodal.Config(**values, prefetch=prefetch)).build_data(run, "train"))
        one.decoded.clear()
    return made, scans


def step(ranks: list[Any], micro_batch: int) -> list[list[Batch]]:
    """The micro-batches of a step, by rank."""
    return [[next(one) for _ in range(GLOBAL // micro_batch // len(ranks))] for one in ranks]


def patches(batches: list[Batch]) -> int:
    return sum(int(batch.extras["scan_grids"].prod(-1).sum()) for batch in batches)


def by_row(steps: list[list[Batch]]) -> dict[int, tuple[Any, ...]]:
    """Number of a row → its tokens and where its items stand."""
    found = {}
    for batch in itertools.chain.from_iterable(steps):
        assert batch.sample_ids is not None
        for number, tokens, places in zip(
            batch.sample_ids.tolist(), batch.inputs.tolist(), batch.extras["scan_places"].tolist(), strict=True
        ):
            assert number not in found
            found[number] = tokens, places
    return found


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_ranks_have_as_many_patches_and_decode_only_their_own(tmp_path: Path, micro_batch: int) -> None:
    ranks, scans = loaders(tmp_path, 4, micro_batch)
    for _ in range(4):
        each = [patches(batches) for batches in step(ranks, micro_batch)]
        assert max(each) <= 1.1 * sum(each) / 4
    decoded = [name for one in scans for name in one.decoded]
    assert len(decoded) == len(set(decoded)) > 2 * GLOBAL


def test_a_step_has_the_rows_of_the_stream_on_any_layout_resumed_on_another(tmp_path: Path) -> None:
    alone, _ = loaders(tmp_path, 1, 1)
    wanted = [by_row(step(alone, 1)) for _ in range(6)]
    assert [sorted(rows) for rows in wanted] == [[*range(at * GLOBAL, (at + 1) * GLOBAL)] for at in range(6)]
    state: dict[str, Any] | None = None
    at = 0
    for ranks, micro_batch, workers in ((4, 2, 0), (2, 1, 2), (8, 4, 0)):
        every, _ = loaders(tmp_path, ranks, micro_batch, workers=workers)
        for one in every if state else ():
            one.load_state_dict(state)
        for _ in range(2):
            assert by_row(step(every, micro_batch)) == wanted[at]
            at += 1
        state = every[0].state_dict()
        for one in every:
            one.close()


@pytest.mark.parametrize("given", [0, 3, 11])
def test_a_state_in_the_middle_of_a_step_goes_on_there(tmp_path: Path, given: int) -> None:
    (whole, other), _ = loaders(tmp_path, 2, 2)
    for _ in range(given):
        next(whole)
    state = json.loads(json.dumps(whole.state_dict()))
    assert ("begun" in state) == bool(given % (GLOBAL // 4))
    (again, _), _ = loaders(tmp_path, 2, 2)
    next(again)
    again.load_state_dict(state)
    assert all(same(next(again), next(whole)) for _ in range(12))
    other.load_state_dict(state)
    other.skip(GLOBAL)
    assert other.state_dict().get("begun") == state.get("begun")


def test_what_is_read_again_in_the_middle_of_a_step_goes_on_there(tmp_path: Path) -> None:
    (whole, *_), _ = loaders(tmp_path, 2, 2)
    (closed, *_), _ = loaders(tmp_path, 2, 2, workers=1)
    for at in range(12):
        assert same(next(whole), next(closed))
        if at in (2, 9):
            closed.close()
    closed.close()


def test_an_item_costs_what_its_encoder_computes() -> None:
    scans = ItemCosts({"scan": Scan()})
    assert scans("scan", (1, 2, 3)) == 6 * scans("scan", (1, 1, 1)) > 0
    pictures = ItemCosts(
        {"image": Pictures(Image.Config(size=32, patch=8, merge=1, fit="keep", dim=32, layers=1, heads=2))}
    )
    assert pictures("image", (1, 8, 8)) > 4 * pictures("image", (1, 4, 4)) > 0
    assert not vars(pickle.loads(pickle.dumps(pictures))).keys() & {"_encoders"}


def test_a_mixture_spreads_rows_with_items_and_texts(tmp_path: Path) -> None:
    file = write_records(tmp_path / "data.jsonl", heavy(tmp_path))
    (tmp_path / "text.txt").write_text("plain words\n" * 40)
    prepare(Preparation((str(tmp_path / "text.txt"),), tmp_path / "tokens", held_out=0.2), Report())
    sources = Source(name="items", path=str(file), items=True), Source(name="texts", path=str(tmp_path / "tokens"))
    config = Mixture.Config(sources=sources, packing="best_fit", cache=str(tmp_path / "cache"), held_out=0.0)
    made = []
    for rank in range(2):
        run = job(Scan(), rank=rank, ranks=2, micro_batch=1, sequence=48, batches=(GLOBAL,))
        vars(run.config.train).update(global_batch=GLOBAL, total_steps=20, batch_warmup=(), steps=20, epochs=0)
        run.config.train.batch_at = lambda step: GLOBAL
        made.append(Mixture(config).build_data(run, "train"))
    for at in range(3):
        batches = step(made, 1)
        assert sorted(by_row(batches)) == [*range(at * GLOBAL, (at + 1) * GLOBAL)]
        each = [patches(one) for one in batches]
        assert max(each) <= 1.1 * sum(each) / 2
        assert {int(source) for one in batches for batch in one for source in batch.targets["source"]} == {0, 1}


def test_smaller_batches_at_first_divide_what_is_spread(tmp_path: Path) -> None:
    """A step of 8 and then one of 32 have the first 8 rows and the next 32."""
    write_records(tmp_path / "data.jsonl", heavy(tmp_path))
    run = job(Scan(), micro_batch=2, sequence=48, batches=(8, GLOBAL))
    values: dict[str, Any] = {"path": str(tmp_path / "data.jsonl"), "cache": str(tmp_path / "cache"), "held_out": 0.0}
    loader = Multimodal(Multimodal.Config(**values)).build_data(run, "train")
    first = by_row([[next(loader) for _ in range(4)]])
    assert sorted(first) == [*range(8)]
    assert sorted(by_row(step([loader], 2))) == [*range(8, 8 + GLOBAL)]
