from __future__ import annotations

import time
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_train.base.errors import ConfigError
from forge_train_kit.data.proportions import RESOLUTION, Phases, Proportions, capped, tempered

pytestmark = [pytest.mark.unit]

UNEVEN = {"web": 0.62, "code": 0.21, "books": 0.1, "maths": 0.0667, "law": 0.0033}
ROUNDED = {"web": 2**0.5, "code": 0.3333333333, "books": 1e-5}
"""Without a common denominator within the resolution."""


def weightings(most: int = 8, digits: int = 2) -> st.SearchStrategy[dict[str, float]]:
    """Weights of few digits make a short cycle, and a quick test."""
    weight = st.one_of(st.integers(1, 20), st.floats(0.01, 10).map(lambda x: round(x, digits)), st.just(0))
    weights = st.lists(weight, min_size=1, max_size=most).filter(any)
    return weights.map(lambda some: {f"s{at}": weight for at, weight in enumerate(some)})


def check_window(mixture: Proportions | Phases, weights: dict[str, float], start: int, samples: int = 10_000) -> None:
    """The share of every source, and that its numbers follow one another."""
    source, number = mixture.at(np.arange(start, start + samples, dtype=np.int64))
    for at, name in enumerate(mixture.names):
        mine = number[source == at]
        share = Fraction(weights[name]) / sum(Fraction(weight) for weight in weights.values())
        bound = 1 + share * (len(weights) - 2) + Fraction(samples, RESOLUTION)  # the last is what rounding may do
        assert abs(len(mine) - samples * share) <= bound <= max(len(weights), 2), (start, name)
        assert (np.diff(mine) == 1).all(), (start, name)
    assert (number >= 0).all()


@settings(deadline=None, max_examples=30)
@given(weightings(digits=16), st.integers(0, 2**63), st.integers(0, 10**12))
def test_any_window_has_the_weights(weights: dict[str, float], seed: int, start: int) -> None:
    check_window(Proportions(weights, seed), weights, start)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [UNEVEN, ROUNDED, {"only": 3}, {f"s{at}": 1 + at for at in range(100)}])
def test_any_window_of_real_mixtures_has_the_weights(weights: dict[str, float]) -> None:
    mixture = Proportions(weights, seed=5)
    for start in [*range(0, 40_000, 997), RESOLUTION - 5000, 10**12 - 5000, 10**12 * 7 + 3]:
        check_window(mixture, weights, start)


@settings(deadline=None, max_examples=50)
@given(weightings(), st.integers(0, 2**63), st.integers(0, 3000))
def test_counts_and_index_agree_with_at(weights: dict[str, float], seed: int, samples: int) -> None:
    mixture = Proportions(weights, seed)
    source, number = mixture.at(np.arange(samples, dtype=np.int64))
    assert mixture.counts(samples).tolist() == np.bincount(source, minlength=len(weights)).tolist()
    for at in range(samples - 1, max(0, samples - 20), -1):
        assert mixture.index(int(source[at]), int(number[at])) == at


def test_numbers_go_on_at_1e12_where_counts_says() -> None:
    for weights in (UNEVEN, ROUNDED):
        mixture, start = Proportions(weights, seed=2), 10**12 + 17
        source, number = mixture.at(np.arange(start, start + 200_000, dtype=np.int64))
        for at, past in enumerate(mixture.counts(start).tolist()):
            mine = number[source == at]
            assert mine.tolist() == list(range(past, past + len(mine)))


def test_order_is_a_function_of_the_index_and_the_seed() -> None:
    mixture, index = Proportions(UNEVEN, seed=1), np.arange(5000, dtype=np.int64)
    backwards = [values[::-1] for values in mixture.at(index[::-1])]
    assert np.array_equal(mixture.at(index), backwards)
    assert np.array_equal(mixture.at(index), Proportions(UNEVEN, seed=1).at(index))
    assert not np.array_equal(mixture.at(index), Proportions(UNEVEN, seed=2).at(index))


def test_finds_a_million_samples_in_a_moment() -> None:
    mixture, index = Proportions(ROUNDED, seed=1), np.arange(10**12, 10**12 + 10**6, dtype=np.int64)
    begin = time.process_time()
    mixture.at(index)
    assert time.process_time() - begin < 1


@st.composite
def phases(draw: st.DrawFn) -> list[tuple[int, dict[str, float]]]:
    starts = sorted(draw(st.sets(st.integers(1, 1500), max_size=4)))
    return [(start, draw(weightings(5))) for start in [0, *starts]]


@settings(deadline=None)
@given(phases(), st.integers(0, 2**63))
def test_phases_count_on(several: list[tuple[int, dict[str, float]]], seed: int) -> None:
    mixture = Phases(several, seed)
    source, number = mixture.at(np.arange(2000, dtype=np.int64))
    for at in range(len(mixture.names)):
        mine = number[source == at]
        assert mine.tolist() == list(range(len(mine))), "every sample of a source once and in order"
    assert mixture.counts(2000).tolist() == np.bincount(source, minlength=len(mixture.names)).tolist()
    for (first, weights), (until, _) in pairwise([*several, (2000, {})]):
        total = sum(Fraction(weight) for weight in weights.values())
        here = np.bincount(source[first:until], minlength=len(mixture.names)).tolist()
        for name, count in zip(mixture.names, here, strict=True):
            expected = (until - first) * Fraction(weights.get(name, 0)) / total
            assert abs(count - expected) <= len(mixture.names)


def test_phases_at_large_indices() -> None:
    late = {"web": 0.2, "maths": 0.8}
    mixture = Phases([(0, UNEVEN), (10**12, late)], seed=3)
    border = Proportions(UNEVEN, seed=3).counts(10**12)
    source, number = mixture.at(np.arange(10**12, 10**12 + 10_000, dtype=np.int64))
    for at, name in enumerate(mixture.names):
        mine = number[source == at]
        assert mine.tolist() == list(range(border[at], border[at] + len(mine)))
        assert abs(len(mine) - 10_000 * late.get(name, 0)) <= len(mixture.names)


def play(several: list[tuple[int, dict[str, float]]], seed: int) -> list[str]:
    mixture = Phases(several, seed)
    return [mixture.names[at] for at in mixture.at(np.arange(2000, dtype=np.int64))[0].tolist()]


@pytest.mark.slow
@settings(deadline=None)
@given(
    phases(), st.dictionaries(st.sampled_from(["s0", "s1", "s2", "s3", "s4"]), st.integers(0, 600)), st.integers(0, 99)
)
def test_capped_sources_give_exactly_what_they_have(
    several: list[tuple[int, dict[str, float]]], caps: dict[str, int], seed: int
) -> None:
    known = {name for _, weights in several for name in weights}
    caps = {name: cap for name, cap in caps.items() if name in known}
    became, end = capped(several, caps, seed)
    if not became:
        assert end == 0
        return
    names = play(became, seed)[: 2000 if end is None else min(end, 2000)]
    assert all(names.count(name) <= cap for name, cap in caps.items())
    for start, weights in became:
        if start < len(names):
            before = names[:start]
            [(_, asked)] = [(first, some) for first, some in several if first <= start][-1:]
            for name, weight in asked.items():
                used_up = name in caps and before.count(name) == caps[name]
                assert weights[name] == (0 if used_up else weight), "at its cap, not before it and not after it"
    if end is not None and end <= 2000:
        open_here = [name for name, weight in [some for first, some in several if first <= end][-1].items() if weight]
        assert all(names.count(name) == caps[name] for name in open_here)


def test_a_cap_gives_its_weight_to_the_others() -> None:
    became, end = capped([(0, {"a": 1, "b": 2, "c": 1})], {"b": 1_000_003}, seed=1)
    assert [list(weights.values()) for _, weights in became] == [[1, 2, 1], [1, 0, 1]]
    assert end is None
    border = became[1][0]
    mixture = Phases(became, seed=1)
    assert mixture.counts(border)[1] == 1_000_003
    assert mixture.counts(border - 1)[1] == 1_000_002
    check_window(mixture, {"a": 1, "b": 0, "c": 1}, border)


def test_a_mixture_whose_sources_all_end_ends() -> None:
    became, end = capped([(0, {"a": 3, "b": 1})], {"a": 30, "b": 70}, seed=1)
    assert (end, len(became)) == (100, 2)
    assert Phases(became, seed=1).counts(100).tolist() == [30, 70]


def test_a_cap_of_an_unknown_source() -> None:
    with pytest.raises(ConfigError, match="no source 'wbe' to cap; the mixture has web, code"):
        capped([(0, {"web": 1}), (9, {"code": 1})], {"wbe": 7}, seed=1)


def test_temperature() -> None:
    assert tempered({"a": 1, "b": 4}, 2) == pytest.approx({"a": 1 / 3, "b": 2 / 3})
    assert tempered({"a": 1, "b": 4, "c": 0}, 1) == pytest.approx({"a": 0.2, "b": 0.8, "c": 0})
    assert tempered({"a": 1e300, "b": 3e300}, 0.5) == pytest.approx({"a": 0.1, "b": 0.9})


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ({"web": 1, "code": -1}, "'code' is -1"),
        ({"web": float("nan")}, "'web' is nan"),
        ({"web": float("inf")}, "'web' is inf"),
        ({"web": 0, "code": 0.0}, "all sources are 0 .web, code"),
        ({}, "there is no source"),
        ({"web": 1, "code": 1e-9}, "'code' is 1e-09, less than one sample in 1,048,576"),
    ],
)
def test_weights_that_are_no_mixture(weights: dict[str, float], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Proportions(weights, seed=1)
    with pytest.raises(ConfigError, match=told if weights else "all sources are 0 .web."):
        Phases([(0, {"web": 1}), (5, weights)], seed=1)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_is_none(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature of a mixture"):
        tempered(UNEVEN, temperature)


@pytest.mark.parametrize("starts", [[], [1], [0, 5, 5], [0, 9, 3]])
def test_phases_out_of_order(starts: list[int]) -> None:
    with pytest.raises(ConfigError, match="begin at sample 0 and ascend"):
        Phases([(start, UNEVEN) for start in starts], seed=1)
