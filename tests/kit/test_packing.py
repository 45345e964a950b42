from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from forge_train_kit.data.packing import Packed, best_fit, buckets, cut
from forge_train_kit.data.permutation import permute

pytestmark = [pytest.mark.unit]

Int64s = NDArray[np.int64]


def ints(*values: int) -> Int64s:
    return np.array(values, np.int64)


def rows(packed: Packed) -> list[list[int]]:
    return [part.tolist() for part in np.split(packed.order, packed.row_ends[:-1])]


def shuffled(n: int, seed: int) -> list[int]:
    index = np.arange(n, dtype=np.int64)
    return permute(index, np.zeros_like(index), n, seed).tolist()


def realistic(n: int) -> Int64s:
    sigma = 1.0
    return np.maximum(1, np.random.default_rng(0).lognormal(np.log(600) - sigma**2 / 2, sigma, n)).astype(np.int64)


def reference_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """The spaces left in each row, found the slow way."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [space for space in spaces if space >= length]
        if fits:
            spaces.remove(min(fits))
        spaces.append((min(fits) if fits else capacity) - length)
    return sorted(spaces)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Int64s, int, int, int]:
    capacity = draw(st.integers(1, 300))
    lengths = draw(st.lists(st.integers(1, capacity), max_size=200))
    return np.array(lengths, np.int64), capacity, draw(st.integers(1, 250)), draw(st.integers(0, 2**63))


@settings(deadline=None)
@given(cases())
def test_best_fit_has_every_document_once_in_rows_that_hold_it(case: tuple[Int64s, int, int, int]) -> None:
    lengths, capacity, window, seed = case
    packed = best_fit(lengths, capacity, window=window, seed=seed)
    assert sorted(packed.order.tolist()) == list(range(len(lengths)))
    if len(lengths):
        assert packed.row_ends[-1] == len(lengths)
        assert (np.diff(packed.row_ends, prepend=0) > 0).all()
        assert max(int(lengths[row].sum()) for row in rows(packed)) <= capacity
        at = {document: position for position, document in enumerate(shuffled(len(lengths), seed))}
        assert all([at[a] for a in row] == sorted(at[a] for a in row) for row in rows(packed))
        assert [{at[a] // window for a in row} for row in rows(packed)] == sorted(
            [{at[row[0]] // window} for row in rows(packed)], key=min
        ), "a row lies in one window, and windows follow one another"


@settings(deadline=None)
@given(cases())
def test_best_fit_leaves_the_space_of_the_textbook_algorithm(case: tuple[Int64s, int, int, int]) -> None:
    lengths, capacity, _, seed = case
    packed = best_fit(lengths, capacity, seed=seed)
    left = sorted(capacity - int(lengths[row].sum()) for row in rows(packed)) if len(lengths) else []
    assert left == reference_best_fit(lengths.tolist(), capacity)


@settings(deadline=None)
@given(cases())
def test_batches_have_every_document_once_within_the_tokens(case: tuple[Int64s, int, int, int]) -> None:
    lengths, tokens, buffer, seed = case
    packed = buckets(lengths, tokens_per_batch=tokens, buffer=buffer, seed=seed)
    assert sorted(packed.order.tolist()) == list(range(len(lengths)))
    if len(lengths):
        assert max(int(lengths[row].max()) * len(row) for row in rows(packed)) <= tokens
        assert (np.diff(packed.row_ends, prepend=0) > 0).all()


@settings(deadline=None)
@given(cases())
def test_batches_are_of_like_length_and_as_large_as_they_can_be(case: tuple[Int64s, int, int, int]) -> None:
    lengths, tokens, _, seed = case
    packed = buckets(lengths, tokens_per_batch=tokens, buffer=len(lengths) + 1, seed=seed)
    batches = sorted(sorted(lengths[row].tolist()) for row in rows(packed)) if len(lengths) else []
    batches.sort(key=lambda batch: (batch[0], batch[-1], -len(batch)))
    for batch, after in pairwise(batches):
        assert batch[-1] <= after[0], "sorted by length, the batches do not overlap"
        assert after[0] * (len(batch) + 1) > tokens, "the next document did not fit"


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=50), st.integers(1, 300))
def test_cut_makes_whole_rows_and_a_rest(lengths: list[int], capacity: int) -> None:
    document, start, length = (part.tolist() for part in cut(np.array(lengths, np.int64), capacity))
    pieces = [
        (number, begin, min(capacity, whole - begin))
        for number, whole in enumerate(lengths)
        for begin in range(0, whole, capacity)
    ]
    assert list(zip(document, start, length, strict=True)) == pieces


@pytest.mark.parametrize("window", [10_000, 65_536])
def test_best_fit_uses_99_percent_of_the_tokens(window: int) -> None:
    _, _, lengths = cut(realistic(100_000), 2048)
    packed = best_fit(lengths, 2048, window=window, seed=1)
    assert lengths.sum() / (2048 * len(packed.row_ends)) >= 0.99


def test_best_fit_packs_150_000_documents_a_second() -> None:
    lengths = realistic(200_000).clip(max=2048)
    begin = time.process_time()  # of this process, however busy the machine is
    best_fit(lengths, 2048, seed=1)
    assert len(lengths) / (time.process_time() - begin) >= 150_000


def test_the_seed_alone_decides() -> None:
    lengths = realistic(3000).clip(max=2048)
    for packing in (
        lambda seed: best_fit(lengths, 2048, window=1000, seed=seed),
        lambda seed: buckets(lengths, tokens_per_batch=8192, buffer=1000, seed=seed),
    ):
        assert rows(packing(1)) == rows(packing(1))
        assert rows(packing(1)) != rows(packing(2))


def test_rows_do_not_come_by_length() -> None:
    lengths = realistic(20_000).clip(max=2048)
    packed = best_fit(lengths, 2048, window=20_000, seed=1)
    longest = np.array([lengths[row].max() for row in rows(packed)])
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.05
    batches = rows(buckets(lengths, tokens_per_batch=16_384, buffer=20_000, seed=1))
    longest = np.array([lengths[batch].max() for batch in batches])
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 3 / len(longest) ** 0.5


@pytest.mark.parametrize(
    ("lengths", "told"), [(ints(3, 9), "document 1 has 9 tokens"), (ints(0, 1), "document 0 has 0")]
)
def test_documents_that_no_row_holds_are_named(lengths: Int64s, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        best_fit(lengths, 8, seed=1)
    with pytest.raises(ValueError, match=told):
        buckets(lengths, tokens_per_batch=8, buffer=10, seed=1)


def test_rows_and_windows_of_nothing() -> None:
    with pytest.raises(ValueError, match="rows of 0 tokens"):
        cut(ints(1), 0)
    for window in (0, -1):
        with pytest.raises(ValueError, match=f"windows of {window} documents"):
            best_fit(ints(1), 8, window=window, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_permutations_of_every_length_to_10_000() -> None:
    index, epoch = np.arange(10_000), np.full(10_000, 3)
    for n in range(1, 10_001):
        assert (np.bincount(permute(index[:n], epoch[:n], n, seed=7), minlength=n) == 1).all(), n
