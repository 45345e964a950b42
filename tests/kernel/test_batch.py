"""A batch is cut along the axes of each of its tensors, and keeps where its parts come from."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_train import Axes, Batch, CurrentStep, PluginError

pytestmark = [pytest.mark.unit]

ROWS, LENGTH = 3, 8
IDS = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)


def whole() -> Batch:
    """A batch with a tensor of every kind, each of which tells rows and positions apart."""
    batch = Batch(
        IDS,
        IDS + 100,
        IDS + 200,
        IDS + 300,
        extras={"image": IDS[:, :2] + 400},
        targets={"teacher": (IDS + 500).T.unsqueeze(-1)},
        axes={"teacher": Axes(batch=1, sequence=0)},
        sample_ids=torch.arange(40, 40 + ROWS),
    )
    return batch.with_targets({"own.mean": torch.tensor(0.5)}, Axes(batch=None)).with_targets(
        {"own.last": (IDS + 600).expand(2, -1, -1)}, Axes(batch=-2, sequence=-1)
    )


def spans_of(length: int) -> Any:
    span = st.tuples(st.integers(0, length), st.integers(0, length)).map(lambda pair: tuple(sorted(pair)))
    return st.lists(span, min_size=1, max_size=4)


@given(spans=spans_of(ROWS))
def test_rows_of_every_tensor(spans: list[tuple[int, int]]) -> None:
    kept, batch = [row for start, stop in spans for row in range(start, stop)], whole()
    part = batch.slice("batch", *spans)
    for name in ("inputs", "labels", "position_ids", "document_ids", "sample_ids", "image"):
        assert part.tensors()[name].equal(batch.tensors()[name][kept]), name
    assert part.targets["teacher"].equal(batch.targets["teacher"][:, kept])
    assert part.targets["own.last"].equal(batch.targets["own.last"][:, kept])
    assert part.targets["own.mean"] is batch.targets["own.mean"]
    assert part.positions is None


@given(spans=spans_of(LENGTH), again=spans_of(2))
def test_positions_of_every_tensor_and_of_a_part(spans: list[tuple[int, int]], again: list[tuple[int, int]]) -> None:
    kept, batch = [at for start, stop in spans for at in range(start, stop)], whole()
    part = batch.slice("sequence", *spans)
    for name in ("inputs", "labels", "position_ids", "document_ids"):
        assert part.tensors()[name].equal(batch.tensors()[name][:, kept]), name
    assert part.targets["teacher"].equal(batch.targets["teacher"][kept])
    assert part.targets["own.last"].equal(batch.targets["own.last"][..., kept])
    for name in ("sample_ids", "image", "own.mean"):
        assert part.tensors()[name] is batch.tensors()[name]
    assert part.positions is not None
    assert part.positions.tolist() == kept
    if len(kept) >= 2:
        twice = part.slice("sequence", *again)
        assert twice.positions is not None
        assert twice.positions.tolist() == [at for start, stop in again for at in kept[start:stop]]


def test_a_span_shares_memory_and_gradients_flow_through_several() -> None:
    batch = whole()
    assert batch.slice("sequence", (2, 4)).inputs.data_ptr() == batch.inputs[:, 2:].data_ptr()
    scores = torch.zeros(ROWS, LENGTH, requires_grad=True)
    part = batch.with_targets({"own.scores": scores}, Axes(0, 1)).slice("sequence", (0, 1), (6, 8))
    part.targets["own.scores"].sum().backward()
    assert scores.grad is not None
    assert scores.grad[0].tolist() == [1, 0, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("axis", "spans", "says"),
    [
        ("seq", [(0, 1)], r"cut along its axis 'batch' or 'sequence', not 'seq'"),
        ("sequence", [(0, 9)], r"slice\('sequence'\) takes spans \(start, stop\) within 0 and 8, found \(\(0, 9\),\)"),
        ("batch", [(-1, 1)], r"within 0 and 3, found \(\(-1, 1\),\)"),
        ("batch", [(2, 1)], r"within 0 and 3"),
        ("batch", [], r"within 0 and 3, found \(\)"),
    ],
)
def test_what_can_not_be_cut_is_refused(axis: Any, spans: list[tuple[int, int]], says: str) -> None:
    with pytest.raises(PluginError, match=says):
        whole().slice(axis, *spans)


def test_a_tensor_that_does_not_fit_is_named_before_it_is_cut() -> None:
    batch = whole().with_targets({"own.weights": torch.ones(ROWS, 5)}, Axes(0, 1))
    with pytest.raises(PluginError, match=r"'own\.weights' is \[3, 5\], and its sequence axis is said to be 1, of 8"):
        batch.slice("sequence", (0, 4))
    flat = whole().with_targets({"own.flat": torch.ones(ROWS)}, Axes(0, -2))
    assert "'own.flat' is [3], and its sequence axis is said to be -2" in flat.problem()
    assert "'sample_ids' is [2]" in replace(whole(), sample_ids=torch.arange(2)).problem()
    assert "'positions' is [3]" in replace(whole(), positions=torch.arange(3)).problem()
    assert "two of its tensors are named 'positions'" in whole().with_targets({"positions": IDS[:, 0]}).problem()


def test_all_of_a_batch_moves_and_what_was_recorded_too() -> None:
    batch = whole().slice("sequence", (0, 2))
    batch.intermediates["own.losses"] = torch.zeros(ROWS, 2)
    moved = batch.to(torch.device("meta"))
    assert all(tensor.is_meta for tensor in (*moved.tensors().values(), *moved.intermediates.values()))
    assert moved.tensors().keys() == batch.tensors().keys()
    assert moved.axes == batch.axes


def test_parts_of_a_batch_record_for_themselves() -> None:
    batch = whole()
    batch.intermediates["own.losses"] = torch.zeros(ROWS, LENGTH)
    first, second = (batch.slice("batch", span) for span in ((0, 1), (1, 3)))
    first.intermediates["own.norms"] = torch.ones(1)
    assert not second.intermediates
    assert batch.intermediates.keys() == {"own.losses"}
    assert replace(first, labels=first.inputs).intermediates is first.intermediates


def test_nothing_is_left_of_a_step_and_a_copied_module_sees_the_same() -> None:
    step = CurrentStep((whole(),), whole())
    assert copy.deepcopy(step) is step
    step.end()
    assert not step.batches
    assert step.batch is None
