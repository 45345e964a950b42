"""Token shards: what is written is read, and a damaged file is told."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_train import ConfigError
from forge_train_kit.data.documents import Documents
from forge_train_kit.data.shard import Shard
from forge_train_kit.data.store import MAGIC, START, ShardWriter, content, open_shard, read_header
from forge_train_kit.data.tokens import divided

pytestmark = pytest.mark.unit

texts = st.lists(st.lists(st.integers(0, 299), min_size=1, max_size=9), min_size=1, max_size=12)


def shard(path: Path, documents: list[list[int]], *, vocabulary: int = 300, trained: bool = False) -> Path:
    with ShardWriter(path, vocabulary, "digest", trained=trained) as writer:
        ids = [np.array(document, np.uint32) for document in documents]
        masks = [np.array([i % 2 for i in range(len(one))], np.uint8) for one in documents] if trained else []
        writer.add(ids, sum(map(len, documents)), masks)
        writer.close()
    return path


@pytest.mark.parametrize("vocabulary", [256, 300, 70_000])
@pytest.mark.parametrize("trained", [False, True])
def test_gives_back_what_was_written(tmp_path: Path, vocabulary: int, trained: bool) -> None:
    documents = [[1, 2, 3], [4], [255, 0, 7, 7, 7]]
    found, header = open_shard(shard(tmp_path / "a.tokens", documents, vocabulary=vocabulary, trained=trained))
    assert found.tokens.tolist() == [id for one in documents for id in one]
    assert found.tokens.dtype.itemsize == {256: 1, 300: 2, 70_000: 4}[vocabulary]
    assert found.ends.tolist() == [3, 4, 9]
    assert (header.tokens, header.documents, header.bytes, header.largest) == (9, 3, 9, 255)
    assert (found.trained is None) != trained
    if found.trained is not None:
        assert found.trained.tolist() == [0, 1, 0, 0, 0, 1, 0, 1, 0]
    with (tmp_path / "a.tokens").open("rb") as file:
        assert content(file) == header.content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tokens"]


def test_the_same_documents_make_the_same_file(tmp_path: Path) -> None:
    one, two = (shard(tmp_path / name, [[1, 2], [3]]) for name in ("a", "b"))
    assert one.read_bytes() == two.read_bytes()


def test_without_tokens(tmp_path: Path) -> None:
    found, header = open_shard(shard(tmp_path / "a.tokens", [], trained=True))
    assert len(found.tokens) == len(found.ends) == header.tokens == 0
    assert header.largest == -1
    assert Documents([found]).tokens == 0


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with ShardWriter(tmp_path / "a.tokens", 300, "digest", trained=True) as writer:
            writer.add([np.array([1, 2], np.uint16)], 2, [np.array([1, 1], np.uint8)])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], "truncated or damaged"),
        (lambda data: data + b"x", "truncated or damaged"),
        (lambda data: data[:START], "truncated or damaged"),
        (lambda data: data[:12], "header is damaged"),
        (lambda data: b"X" + data[1:], "no token shard"),
        (lambda data: b"", "no token shard"),
        (lambda data: MAGIC + struct.pack("<I", 9) + data[12:], "of format 9"),
        (lambda data: data[:20] + b"\xff" + data[21:], "header is damaged"),
        (lambda data: data.replace(b'"uint16"', b'"int128"', 1), "damaged"),
    ],
)
def test_a_damaged_file_is_told(tmp_path: Path, change: object, message: str) -> None:
    path = shard(tmp_path / "a.tokens", [[1, 2, 3], [4]])
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(ConfigError, match=message) as told:
        read_header(path)
    assert str(path) in str(told.value)


def in_shards(documents: list[list[int]], files: int) -> list[Shard]:
    """Documents in so many shards, every second of which says what is learned."""
    shards = []
    for number, part in enumerate(np.array_split(np.arange(len(documents)), files)):
        mine = [documents[at] for at in part]
        tokens = np.array([id for one in mine for id in one], np.int64)
        trained = (tokens % 3 != 0).astype(np.uint8) if number % 2 else None
        shards.append(Shard(Path("x"), tokens, np.cumsum([len(one) for one in mine], dtype=np.int64), trained))
    return shards


@given(documents=texts, files=st.integers(1, 5), data=st.data())
@settings(max_examples=80, deadline=None)
def test_shards_read_as_one_text(documents: list[list[int]], files: int, data: st.DataObject) -> None:
    shards = in_shards(documents, files)
    whole = Documents(shards)
    flat = [id for one in documents for id in one]
    ends = np.cumsum([len(one) for one in documents]).tolist()
    assert (whole.tokens, whole.count, whole.lengths().tolist()) == (len(flat), len(documents), [*map(len, documents)])
    start = data.draw(st.integers(0, len(flat)))
    size = data.draw(st.integers(0, len(flat) + 3))
    out = np.full(size, -1, np.int64)
    whole.take(start, out)
    expected = flat[start : start + size]
    assert out.tolist() == expected + [-1] * (size - len(expected))
    learned, known = np.zeros(size, bool), [id for one in shards for id in _learned(one)]
    whole.learned(start, learned)
    assert learned.tolist()[: len(expected)] == known[start : start + size]
    assert whole.ends_within(start, start + size).tolist() == [e for e in ends if start < e <= start + size]
    assert [whole.span(at) for at in range(len(documents))] == list(zip([0, *ends], ends, strict=False))


def _learned(shard: Shard) -> list[bool]:
    return [True] * len(shard.tokens) if shard.trained is None else [bool(one) for one in shard.trained]


@given(documents=texts, files=st.integers(1, 4), share=st.floats(0.01, 0.99))
@settings(max_examples=80, deadline=None)
def test_the_last_documents_are_held_out(documents: list[list[int]], files: int, share: float) -> None:
    shards = in_shards(documents, files)
    sides = divided(shards, share)
    parts = []
    for side in ("train", "validation"):
        out = np.empty(sides[side].tokens, np.int64)
        sides[side].take(0, out)
        parts += out.tolist()
    assert parts == [id for one in documents for id in one]
    assert sides["train"].count + sides["validation"].count == len(documents)
    if len(documents) > 1:
        assert sides["validation"].count
    longest = max(map(len, documents))
    assert abs(sides["validation"].tokens - share * len(parts)) <= longest + 1
