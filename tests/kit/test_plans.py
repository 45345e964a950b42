"""Packing plans in the cache: made once, read by others, rebuilt where they are not the right ones."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from forge_train_kit.data import plans, tokens
from forge_train_kit.data.documents import Documents
from forge_train_kit.data.rows import Rows
from forge_train_kit.data.shard import Shard
from forge_train_kit.data.tokens import rows_of

pytestmark = [pytest.mark.unit]

SEQUENCE = 64
_made: list[int] = []


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(plans, "LEAST", 100)
    real = tokens._pieces

    def counted(*arguments: object) -> object:
        _made.append(1)
        return real(*arguments)  # type: ignore[arg-type]

    _made.clear()
    monkeypatch.setattr(tokens, "_pieces", counted)
    return tmp_path / "cache" / "forge-train" / "packing"


def corpus(seed: int, count: int = 300) -> Documents:
    ends = np.cumsum(np.random.default_rng(seed).integers(1, 150, count))
    return Documents([Shard(Path("x"), np.arange(ends[-1], dtype=np.uint32), ends)])


def rows(documents: Documents, sequence: int = SEQUENCE) -> Rows:
    return rows_of(documents, sequence, packing="best_fit", isolate=True, pad=0)


def same(one: Rows, other: Rows) -> bool:
    every = np.arange(one.count)
    found, expected = one.read(every), other.read(every)
    names = ("inputs", "labels", "position_ids", "document_ids")
    alike = all(np.array_equal(getattr(found, name), getattr(expected, name)) for name in names)
    return alike and one.digest == other.digest


def test_a_plan_is_made_once(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    first = rows(corpus(0))
    assert same(rows(corpus(0)), first)
    assert len(_made) == 1
    rows(corpus(0), 32)
    rows(corpus(1))
    assert len(_made) == len(list(folder.glob("*.plan"))) == 3
    assert not list(folder.glob("*.part"))
    monkeypatch.setattr(plans, "LEAST", 1000)
    assert same(rows(corpus(0)), first)
    assert len(_made) == 4


@pytest.mark.parametrize("damage", ["a byte", "its end", "its header", "foreign", "empty"])
def test_what_is_not_the_plan_is_made_again(folder: Path, damage: str) -> None:
    first = rows(corpus(0))
    (path,) = folder.glob("*.plan")
    good = path.read_bytes()
    if damage == "foreign":
        rows(corpus(1))
        (bad,) = (one.read_bytes() for one in folder.glob("*.plan") if one != path)
    else:
        flipped = good[:2000] + bytes([good[2000] ^ 1]) + good[2001:]
        bad = {"a byte": flipped, "its end": good[:-8], "its header": b"[" + good[1:], "empty": b""}[damage]
    path.unlink()  # the one that is mapped stays
    path.write_bytes(bad)
    before = len(_made)
    assert same(rows(corpus(0)), first)
    assert len(_made) == before + 1
    assert path.read_bytes() == good


def test_without_a_folder_to_write_in(folder: Path) -> None:
    folder.parent.parent.mkdir()
    folder.parent.write_text("a file in its place")
    assert same(rows(corpus(0)), rows(corpus(0)))
    assert len(_made) == 2


def _rank(barrier: object, made: object) -> None:
    plans.LEAST, real = 100, tokens._pieces

    def counted(*arguments: object) -> object:
        with made.get_lock():  # type: ignore[attr-defined]
            made.value += 1  # type: ignore[attr-defined]
        return real(*arguments)  # type: ignore[arg-type]

    tokens._pieces = counted  # type: ignore[assignment]
    barrier.wait(60)  # type: ignore[attr-defined]
    rows(corpus(0))


@pytest.mark.slow
def test_ranks_share_one_plan() -> None:
    context = multiprocessing.get_context("spawn")
    barrier, made = context.Barrier(3), context.Value("i", 0)
    ranks = [context.Process(target=_rank, args=(barrier, made)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    assert made.value == 1
