"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from forge_train.base.format import format_bytes, format_list
from forge_train_kit.format import (
    format_column,
    format_count,
    format_duration,
    format_number,
    format_seconds,
    format_unit,
    sparkline,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (7, "7"), (999, "999"), (1000, "1.00k"), (12_345, "12.3k"), (999_499, "999k"), (999_600, "1.00M")),
        *((1.5, "1.50"), (705_664, "706k"), (8e9, "8.00G"), (2e12, "2.00T"), (-4200, "-4.20k")),
    ],
)
def test_short(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *(
            (0.0, "0"),
            (4.13649, "4.136"),
            (0.00298, "0.00298"),
            (3e-4, "3.00e-04"),
            (123456.7, "1.23e+05"),
            (123456.0, "123456"),
        ),
        *((2345.678, "2345.7"), (float("nan"), "nan"), (-0.5, "-0.5")),
    ],
)
def test_quantity(value: float, text: str) -> None:
    assert format_number(value) == text


def test_gib() -> None:
    assert [format_bytes(size) for size in (0, 1023, 1536, 2**20, 3 * 2**30, 2**40)] == [
        *("0 B", "1023 B", "1.50 KiB", "1.00 MiB", "3.00 GiB", "1.00 TiB")
    ]


def test_duration() -> None:
    assert [format_duration(seconds) for seconds in (0, 59.6, 61, 3723, 90_061, math.nan)] == [
        *("0:00", "1:00", "1:01", "1:02:03", "1d 01:01", "–")
    ]


def test_sparkline() -> None:
    assert sparkline([], 5) == ""
    assert sparkline([1, 2], 0) == ""
    assert sparkline([3, 3, 3], 5) == "▁▁▁"
    assert sparkline([0, 7], 5) == "▁█"
    assert sparkline([0, 0, 7, 7, 0, 0], 3) == "▁█▁"
    assert sparkline([math.nan], 3) == "×"
    assert len(sparkline(list(range(1000)), 40)) == 40


def test_the_first_of_a_list() -> None:
    assert format_list("abc") == "a, b, c"
    assert format_list("abcde") == "a, b, c, … 2 more"
    assert format_list(range(3), 2, "\n  ") == "0\n  1\n  … 1 more"


@pytest.mark.parametrize(
    ("value", "says"), [(4.62e6, "4.62 MFLOP"), (12, "12 FLOP"), (1.2e15, "1200 TFLOP"), (999.9e9, "1.00 TFLOP")]
)
def test_a_count_with_its_unit(value: float, says: str) -> None:
    assert format_unit(value, "FLOP") == says


@pytest.mark.parametrize(
    ("seconds", "says"),
    [(1.234, "1.23 s"), (0.0123, "12.3 ms"), (3.6e-5, "36.0 µs"), (2e-9, "2 ns"), (5000, "1:23:20")],
)
def test_a_time_in_the_unit_that_fits(seconds: float, says: str) -> None:
    assert format_seconds(seconds) == says


def test_sizes_below_each_other_share_a_unit() -> None:
    assert format_column([3 << 30, 5 << 20, 100, None, 0]) == [
        "3.00 GiB",
        "<0.01 GiB",
        "<0.01 GiB",
        "not known",
        "0.00 GiB",
    ]
    assert format_column([36, 4]) == ["36 B", "4 B"]
    assert format_column([2000 << 40]) == ["2,000.00 TiB"]
