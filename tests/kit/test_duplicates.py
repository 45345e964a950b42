"""Duplicates: the estimates are those of exact sets, whatever the order of documents and shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from forge_train_kit.data.documents import Documents
from forge_train_kit.data.inspection import minhash
from forge_train_kit.data.inspection.minhash import ALIKE, duplicates, near, shingles, signatures
from forge_train_kit.data.shard import Shard

pytestmark = pytest.mark.unit


def documents(texts: Sequence[Sequence[int]], shards: int = 1) -> Documents:
    made = []
    for part in np.array_split(np.arange(len(texts)), shards):
        ids = [np.array(texts[at], np.uint16) for at in part]
        made.append(Shard(Path("x"), np.concatenate(ids), np.cumsum([len(one) for one in ids])))
    return Documents(made)


def ngrams(ids: Sequence[int], size: int = 5) -> set[tuple[int, ...]]:
    return {tuple(ids[at : at + size]) for at in range(max(len(ids) - size + 1, 1))}


def jaccard(one: Sequence[int], two: Sequence[int]) -> float:
    a, b = ngrams(one), ngrams(two)
    return len(a & b) / len(a | b)


def variants(seed: int) -> list[list[int]]:
    """Documents of 40 to 300 tokens, each followed by copies in which more and more tokens differ."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(30):
        base = random.integers(0, 5000, random.integers(40, 300))
        for changed in (0, 1, 2, 4, 8, 16):
            copy = base.copy()
            copy[random.integers(0, len(base), changed)] = 9999
            found.append(copy.tolist())
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_signatures_estimate_jaccard(seed: int) -> None:
    texts = variants(seed)
    signed = signatures(documents(texts, 3), np.arange(len(texts)), words=False)
    errors = []
    for at in range(1, len(texts)):
        for other in (at - at % 6, (at + 7) % len(texts)):
            errors.append((signed[at] == signed[other]).mean() - jaccard(texts[at], texts[other]))
    assert abs(np.mean(errors)) < 0.01
    assert np.max(np.abs(errors)) < 0.2, "five standard errors of 128 permutations"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_near_duplicates_are_those_of_exact_sets(seed: int) -> None:
    texts = variants(seed)
    found = near(signatures(documents(texts), np.arange(len(texts)), words=False))
    margin = 0.12
    for at, text in enumerate(texts):
        most = max((jaccard(text, texts[before]) for before in range(at)), default=0)
        if most > ALIKE + margin:
            assert found[at], most
        if most < ALIKE - margin:
            assert not found[at], most
    assert 0 < found.sum() < len(texts)


def test_exact_and_near_are_counted_apart() -> None:
    base = list(range(200))
    texts = [base, base, [*base[:-1], 9], list(range(300, 500)), base, [1, 2], [1, 2], [2, 1]]
    for shards in (1, 3):
        found = duplicates(documents(texts, shards), words=False)
        assert (found.documents, found.exact, found.near) == (8, 3, 1)
        assert found.compared == 8


def test_the_first_of_two_is_no_duplicate() -> None:
    """Each pair counts once: the later one."""
    base = list(range(200))
    texts = [[*base, at] for at in range(10)]
    assert duplicates(documents(texts), words=False).near == 9


def test_only_the_first_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [list(range(100)), [*range(99), 500], list(range(200, 300)), list(range(100))]
    for name, bound in (("DOCUMENTS", 3), ("TOKENS", 310)):
        with monkeypatch.context() as patch:
            patch.setattr(minhash, name, bound)
            found = duplicates(documents(texts), words=False)
        assert (found.compared, found.exact_compared, found.near, found.exact) == (3, 0, 1, 1)


def test_a_document_longer_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(2)
    long = random.integers(0, 5000, 5000).tolist()
    texts = [[1, 2, 3], long, [*long[:-3], 1, 2, 3], [7] * 30]
    monkeypatch.setattr(minhash, "_CHUNK", 1024)
    assert duplicates(documents(texts), words=False).near == 1


def words(*texts: str) -> list[set[int]]:
    """Shingles of each text."""
    ids = [np.array([*text.encode(), 256]) for text in texts]
    hashes, counts = shingles(np.concatenate(ids), np.cumsum([len(one) for one in ids]), words=True)
    assert len(hashes) == counts.sum()
    return [set(part.tolist()) for part in np.split(hashes, np.cumsum(counts)[:-1])]


def test_bytes_are_compared_by_words() -> None:
    one, same, other, none, short = words(
        *("the quick brown fox jumps over", "  the quick\n\nbrown fox\tjumps over ", "the quick brown fox jumps ovre"),
        *(" \n", "two words"),
    )
    assert one == same
    assert (len(one), len(one | other), none, len(short)) == (2, 3, set(), 1)


def test_neighbours_change_no_shingles() -> None:
    texts = ["a b", "c", "", "a b c d e f", "g", " ", "a b c d e f"]
    assert words(*texts) == [words(text)[0] for text in texts]
    ids = [np.arange(size) for size in (3, 1, 5, 9, 3)]
    hashes, counts = shingles(np.concatenate(ids), np.cumsum([len(one) for one in ids]), words=False)
    assert counts.tolist() == [1, 1, 1, 5, 1]
    alone = [shingles(one, np.array([len(one)]), words=False)[0] for one in ids]
    assert np.array_equal(hashes, np.concatenate(alone))
    assert len(set(hashes.tolist())) == 7, "three tokens come twice, and five begin nine"
