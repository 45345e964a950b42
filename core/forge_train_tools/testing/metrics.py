"""Metrics held to their contract."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forge_train.contract.events import Bins, Metric, Value

MAKE = Callable[[], Any]


def check_metric(make: MAKE, observations: Sequence[tuple[Any, ...]], *, rel: float = 1e-9) -> Value:
    """Hold a metric to the contract of `forge_train.Metric`: one process, several ranks however uneven, and a run that
    is resumed in between all find the same, and the device is never waited for.

    Args:
        make: makes the metric; every rank calls it.
        observations: arguments of `update`, one tuple for each call; three at least.
        rel: relative difference that another order of additions may make.

    Raises:
        AssertionError: saying what is wrong.

    Returns:
        The value over all observations.
    """
    assert len(observations) >= 3, "give three observations at least: every rank of three should have one"
    whole = _observed(make, observations)
    for name, state in (("sums", whole.sums), ("maxima", whole.maxima)):
        fresh = getattr(make(), name)
        assert isinstance(state, Tensor), f"`{name}` must stay a tensor"
        assert (state.dtype, state.shape) == (torch.float64, fresh.shape), f"`{name}` must keep its dtype and shape"
        assert not state.requires_grad, f"`{name}` keeps a graph: detach what `update` is given"
    changed = not torch.equal(whole.sums, make().sums) or not torch.equal(whole.maxima, make().maxima)
    assert changed, "the state is what it was before: what was observed is kept elsewhere, or nowhere"
    expected = _value(whole)
    for ranks in (2, 3):
        for split in _splits(len(observations), ranks):
            metrics = [_observed(make, [observations[index] for index in part]) for part in split]
            _close(expected, _value(_merged(make, metrics)), rel, f"over ranks with {list(map(len, split))} updates")
    half = len(observations) // 2
    first, again = _observed(make, observations[:half]), make()
    again.sums, again.maxima = first.sums.clone(), first.maxima.clone()
    for arguments in observations[half:]:
        again.update(*arguments)
    same = torch.equal(again.sums, whole.sums) and torch.equal(again.maxima, whole.maxima)
    assert same, "it keeps something beside `sums` and `maxima`: after a resume its state differs"
    _check_waits(make, observations[0])
    return expected


def _observed(make: MAKE, observations: Sequence[tuple[Any, ...]]) -> Any:
    metric = make()
    assert isinstance(metric, Metric), f"expected a forge_train.Metric, found {type(metric).__name__}"
    for arguments in observations:
        metric.update(*arguments)  # type: ignore[attr-defined]
    return metric


def _value(metric: Metric) -> Value:
    """The value of a state, which is left as it was."""
    before = metric.sums.clone(), metric.maxima.clone()
    value = metric.value(metric.sums, metric.maxima)
    intact = torch.equal(before[0], metric.sums) and torch.equal(before[1], metric.maxima)
    assert intact, "`value` changes the state that it is given"
    numbers = isinstance(value, (int, float, Bins)) or all(isinstance(one, (int, float)) for one in value.values())
    assert numbers, f"`value` must give a number, a mapping of numbers or Bins, found {value!r}"
    return value


def _splits(count: int, ranks: int) -> list[list[range]]:
    """Round robin, all on the last rank, and one on the first."""
    rest = [range(0)] * (ranks - 2)
    return [
        [range(rank, count, ranks) for rank in range(ranks)],
        [range(0), *rest, range(count)],
        [range(1), *rest, range(1, count)],
    ]


def _merged(make: MAKE, metrics: Sequence[Metric]) -> Metric:
    merged: Metric = make()
    merged.sums = torch.stack([one.sums for one in metrics]).sum(0)
    merged.maxima = (
        torch.stack([one.maxima for one in metrics]).max(0).values if merged.maxima.numel() else merged.maxima
    )
    return merged


def _close(expected: Value, found: Value, rel: float, where: str) -> None:
    one, other = _numbers(expected), _numbers(found)
    assert one.keys() == other.keys(), f"{where}: {sorted(other)} instead of {sorted(one)}"
    for key, right in one.items():
        same = math.isclose(right, other[key], rel_tol=rel, abs_tol=1e-12) or (
            math.isnan(right) and math.isnan(other[key])
        )
        assert same, f"{where}: {key} is {other[key]} instead of {right}"


def _numbers(value: Value) -> dict[str, float]:
    if isinstance(value, Bins):
        return {str(edge): count for edge, count in zip(value.edges, value.counts, strict=False)}
    return dict(value) if isinstance(value, Mapping) else {"": value}


def _check_waits(make: MAKE, arguments: tuple[Any, ...]) -> None:
    """On the meta device no value exists: an update that reads one fails."""
    metric = make()
    metric.sums, metric.maxima = metric.sums.to("meta"), metric.maxima.to("meta")
    meta = [copy.copy(one).to("meta") if isinstance(one, Tensor) else one for one in arguments]
    try:
        metric.update(*meta)
    except (RuntimeError, NotImplementedError) as error:
        raise AssertionError(f"`update` waits for the device, or leaves it: {error}") from error
