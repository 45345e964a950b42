"""Curves of reports: few points, and every spike among them; files that are read in one pass and read on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_train.base.errors import ConfigError
from forge_train_tools.reporting import metrics as reading
from forge_train_tools.reporting.curves import Curve
from forge_train_tools.reporting.metrics import Metrics, read_all

LIMIT = 200


def filled(steps: np.ndarray, values: np.ndarray, pieces: int) -> Curve:
    curve = Curve(LIMIT)
    for some in zip(np.array_split(steps, pieces), np.array_split(values, pieces), strict=True):
        curve.add(*some)
    return curve


@pytest.mark.unit
@pytest.mark.parametrize("pieces", [1, 7, 1000])
@pytest.mark.parametrize("count", [1, LIMIT, LIMIT + 1, 3001, 200_003])
def test_no_spike_is_lost(count: int, pieces: int) -> None:
    """Spikes in both directions are among the points, exactly and at their steps, wherever they are."""
    draw = np.random.default_rng(count * pieces)
    steps, values = np.arange(count) * 10.0 + 10, draw.normal(size=count)
    places = draw.choice(count, size=min(40, count), replace=False)
    values[places] = draw.normal(size=len(places)) * 1e6
    at, kept = filled(steps, values, min(pieces, count)).points()
    assert len(at) <= 2 * (LIMIT + 1) + 2
    assert (np.diff(at) > 0).all()
    found = dict(zip(at.tolist(), kept.tolist(), strict=True))
    assert all(values[int(step / 10) - 1] == value for step, value in found.items())
    assert {steps[0], steps[-1]} <= found.keys()
    width = 2 ** math.ceil(math.log2(max(count / LIMIT, 1)))
    for place in places:  # unless a larger one of the same sign is its neighbour
        near = values[max(place - 2 * width, 0) : place + 2 * width]
        if values[place] in (near.min(), near.max()):
            assert found[steps[place]] == values[place]
    assert (kept.min(), kept.max()) == (values.min(), values.max())


@pytest.mark.unit
def test_every_range_of_steps_has_its_extremes() -> None:
    steps = np.arange(1.0, 100_001)
    values = np.sin(steps / 977) + np.random.default_rng(0).normal(size=len(steps))
    at, kept = filled(steps, values, 13).points()
    width = 2 ** math.ceil(math.log2(len(steps) / LIMIT))
    for begin in range(0, len(steps) - 3 * width, width):
        inside = kept[(at > begin) & (at <= begin + 3 * width)]
        middle = values[begin + width : begin + 2 * width]
        assert inside.min() <= middle.min()
        assert inside.max() >= middle.max()


@pytest.mark.unit
def test_means_totals_and_values_that_are_not_finite() -> None:
    steps = np.arange(1.0, 5001)
    values = np.full(5000, 2.0)
    values[[100, 3000]] = np.nan, np.inf
    curve = filled(steps, values, 3)
    at, kept = curve.points()
    assert at[np.isnan(kept)].tolist() == [101, 3001]
    assert set(kept[~np.isnan(kept)]) == {2.0}
    assert set(curve.means()[1]) == {2.0}
    assert curve.total == 2.0 * 4998
    assert {"x", "y", "at", "mean"} == curve.plain().keys()
    assert {"x", "y"} == filled(steps[:9], values[:9], 2).plain().keys()


def line(step: int, /, **more: Any) -> str:
    return json.dumps({"version": 1, "step": step, "tokens": 8 * step, "loss": 2.0 + step % 3, "lr": None, **more})


def write(file: Path, *lines: str, mode: str = "w") -> None:
    with file.open(mode, encoding="utf-8") as out:
        out.writelines(f"{one}\n" for one in lines)


def steps_of(metrics: Metrics, key: str) -> list[float]:
    return metrics.curves[key].points()[0].tolist() if key in metrics.curves else []


def test_a_file_is_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LINES", 3)
    file = tmp_path / "metrics.jsonl"
    metrics = Metrics(file, LIMIT)
    assert not metrics.read()
    write(file, *(line(step, step_seconds=0.5) for step in (2, 4, 6, 8)), "")
    assert metrics.read()
    assert steps_of(metrics, "loss") == [2, 4, 6, 8]
    assert metrics.seconds == 0.5 * 8
    assert "lr" not in metrics.curves
    write(file, line(10, mine=1.0, text="words"), mode="a")
    with file.open("a", encoding="utf-8") as out:
        out.write(line(12)[:20])
    assert metrics.read()
    assert not metrics.read()
    assert (steps_of(metrics, "loss"), steps_of(metrics, "mine"), steps_of(metrics, "text")) == (
        [2, 4, 6, 8, 10],
        [10],
        [],
    )
    with file.open("a", encoding="utf-8") as out:
        out.write(line(12)[20:] + "\n")
    assert metrics.read()
    assert metrics.last["step"] == 12
    assert metrics.curves["tokens"].points()[1].tolist() == [16, 32, 48, 64, 80, 96]
    new = tmp_path / "new"
    write(new, line(2), line(4, loss=None, not_finite={"loss": "inf"}))
    new.replace(file)
    assert metrics.read()
    assert steps_of(metrics, "loss") == [2, 4]
    assert math.isnan(metrics.curves["loss"].points()[1][1])
    assert math.isnan(metrics.seconds)
    write(new, *(line(step) for step in (1, 3, 5, 7)))
    new.replace(file)
    assert metrics.read()
    assert steps_of(metrics, "loss") == [1, 3, 5, 7], "another file, though it is longer"


@pytest.mark.parametrize(
    ("damaged", "says"),
    [
        ("nonsense", "line 2: "),
        ('{"step": 3}', "line 2: it lacks 'loss'"),
        (line(3, step="3"), "line 2: 'step' is '3', which is no count"),
        (line(-3), "line 2: 'step' is '-3', which is no count"),
        (line(3, lr="high"), "line 2: 'lr' is a text"),
        (line(3, version=99), "was written by a newer forge"),
        ("[]", "line 2: it is a list"),
        ("[" * 5000, "line 2: it is nested too deeply"),
        (line(3, tokens=10**400), "line 2: 'tokens' is too large"),
        (line(3) + "," + line(4), "line 2: "),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damaged: str, says: str) -> None:
    file = tmp_path / "metrics.jsonl"
    write(file, line(1), damaged, line(5))
    with pytest.raises(ConfigError, match="metrics.jsonl") as caught:
        Metrics(file, LIMIT).read()
    assert says in str(caught.value)


def test_a_plugins_number_may_have_any_size(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    write(file, line(1, mine=10**400), line(2, mine=7))
    metrics = Metrics(file, LIMIT)
    metrics.read()
    assert np.isnan(metrics.curves["mine"].points()[1]).tolist() == [True, False]


def test_several_processes_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / f"{name}.jsonl" for name in "abc"]
    for at, file in enumerate(files[:2]):
        write(file, *(line(step) for step in range(1, 900 + at)))
    write(files[2], "nonsense")
    alone = [*read_all(files, LIMIT)]
    monkeypatch.setattr(reading, "LARGE", 0)
    monkeypatch.setattr(reading.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    together = [*read_all(files, LIMIT)]
    assert str(alone[2]) == str(together[2])
    for one, other in zip(alone[:2], together[:2], strict=True):
        assert isinstance(one, Metrics)
        assert isinstance(other, Metrics)
        assert {key: curve.plain() for key, curve in one.curves.items()} == {
            key: curve.plain() for key, curve in other.curves.items()
        }
        assert one.last == other.last
