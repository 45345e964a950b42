"""How context parallelism cuts sequences: pure functions of a batch, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge_train import Axes, Batch, ConfigError
from forge_train_plugins.parallel._cp import cut as cuts
from forge_train_plugins.parallel._cp.moving import moves, put_together, take_apart
from forge_train_plugins.parallel._cp.slices import sliced

pytestmark = [pytest.mark.unit]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Document ids of some rows, and a number of ranks that can cut them."""
    ranks, length = draw(st.integers(2, 5)), draw(st.sampled_from([1, 3, 8, 32]))
    length *= 2 * ranks
    return torch.stack([row(draw, length) for _ in range(draw(st.integers(1, 3)))]), ranks


def positions(cut: cuts.Cut, rank: int) -> Tensor:
    """All positions of a rank."""
    return torch.cat([torch.arange(start, stop) for start, stop in cut.spans[rank]])


def row(draw: st.DrawFn, length: int) -> Tensor:
    borders = sorted(draw(st.sets(st.integers(1, length - 1), max_size=12)))
    names = draw(st.permutations(range(len(borders) + 1)))
    sizes = [stop - start for start, stop in zip([0, *borders], [*borders, length], strict=True)]
    return torch.tensor(names).repeat_interleave(torch.tensor(sizes))


@settings(deadline=None)
@given(batches())
def test_ranks_have_all_positions_once_and_as_many_as_any(batch: tuple[Tensor, int]) -> None:
    ids, ranks = batch
    length = ids.shape[1]
    for starts in (None, cuts.document_starts(ids)):
        cut = cuts.cut_of(starts, length, ranks)
        parts = [positions(cut, rank) for rank in range(ranks)]
        assert {len(part) for part in parts} == {length // ranks}
        assert torch.cat(parts).sort().values.tolist() == [*range(length)]
        assert all(part.diff().gt(0).all() for part in parts), "in order"
        assert all(len(own) <= cuts.FINEST for own in cut.spans)
        assert cut.of(range(ranks)) == ((0, length),)


@settings(deadline=None)
@given(batches(), st.randoms())
def test_slices_in_any_order_tell_where_documents_lie(batch: tuple[Tensor, int], chance: object) -> None:
    ids, ranks = batch
    starts = cuts.document_starts(ids)
    assert torch.equal(starts[:, :, None] == starts[:, None], ids[:, :, None] == ids[:, None])
    cut = cuts.cut_of(starts, ids.shape[1], ranks)
    order = list(range(ranks))
    chance.shuffle(order)  # type: ignore[attr-defined]
    together = torch.cat([starts[:, positions(cut, rank)] for rank in order], 1)
    assert torch.equal(cuts.gathered_starts(together), starts)
    assert cuts.cut_of(cuts.gathered_starts(together), ids.shape[1], ranks) == cut


@settings(deadline=None)
@given(batches())
def test_put_together_and_apart_are_inverse(batch: tuple[Tensor, int]) -> None:
    ids, ranks = batch
    cut = cuts.cut_of(cuts.document_starts(ids), ids.shape[1], ranks)
    slices = torch.stack([ids[:, positions(cut, rank)] for rank in range(ranks)])
    how = moves(cut.spans)
    assert torch.equal(put_together(slices, how), ids)
    back = torch.full_like(slices, -1)
    take_apart(ids, how, back)
    assert torch.equal(back, slices)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_without_documents_work_is_even(ranks: int) -> None:
    length = 2 * ranks * 64
    cut = cuts.cut_of(None, length, ranks)
    assert cuts.unevenness(cut, torch.arange(1, length + 1)) == 1.0
    assert all(len(own) <= 2 for own in cut.spans)


LENGTHS: dict[str, Sequence[int]] = {
    "one long, many short": [2048] + [64] * 32,
    "equal": [256] * 16,
    "long last": [100] * 20 + [2096],
    "two long": [1500, 1500] + [73] * 15 + [1],
}


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_work_over_packed_documents_is_nearly_even(name: str, ranks: int) -> None:
    """Within 5 % at 4,096 tokens, where a chunk of the front and one of the end are up to twice the mean."""
    ids = torch.arange(len(LENGTHS[name])).repeat_interleave(torch.tensor(LENGTHS[name]))[None]
    starts = cuts.document_starts(ids)
    costs = cuts.seen_by(starts)
    assert cuts.unevenness(cuts.cut_of(starts, 4096, ranks), costs) <= 1.05


def test_a_chunk_of_each_end_would_not_be_even() -> None:
    ids = torch.arange(33).repeat_interleave(torch.tensor(LENGTHS["one long, many short"]))[None]
    starts = cuts.document_starts(ids)
    assert cuts.unevenness(cuts.head_tail(4096, 8), cuts.seen_by(starts)) > 1.5


def test_a_slice_keeps_what_belongs_to_its_tokens() -> None:
    inputs = torch.arange(24).view(2, 12)
    ids = torch.tensor([[4] * 5 + [2] * 7, [0] * 12])
    places = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    batch = Batch(
        inputs,
        inputs + 1,
        places,
        ids,
        extras={"seen": inputs.T.clone(), "image": torch.zeros(2, 3)},
        axes={"seen": Axes(batch=1, sequence=0)},
    )
    cut = cuts.cut_of(cuts.document_starts(ids), 12, 3)
    for rank in range(3):
        at = positions(cut, rank)
        own = sliced(batch, rank, 3)
        assert own.positions is not None
        assert torch.equal(own.positions, at)
        assert torch.equal(own.inputs, inputs[:, at])
        assert torch.equal(own.labels, inputs[:, at] + 1)
        assert own.position_ids is not None
        assert torch.equal(own.position_ids, places[:, at])
        assert own.document_ids is not None
        assert torch.equal(own.document_ids[0], torch.tensor([0] * 5 + [5] * 7)[at])
        assert torch.equal(own.extras["seen"], inputs.T[at])
        assert own.extras["image"].shape == (2, 3)
        assert not own.problem()


def test_positions_are_made_where_there_are_none() -> None:
    inputs = torch.zeros(2, 8, dtype=torch.int64)
    own = sliced(Batch(inputs, inputs), 1, 2)
    assert own.position_ids is not None
    assert own.position_ids.tolist() == [[2, 3, 4, 5]] * 2
    assert own.document_ids is None


@pytest.mark.parametrize(
    ("length", "labels", "says"),
    [
        (10, (2, 10), "parallel.cp = 3 cuts sequences into 2 × 3 chunks, which do not divide the 10 tokens"),
        (12, (2,), "parallel.cp = 3: the labels of a batch have no positions"),
    ],
)
def test_what_can_not_be_cut_is_refused(length: int, labels: tuple[int, ...], says: str) -> None:
    batch = Batch(torch.zeros(2, length, dtype=torch.int64), torch.zeros(labels, dtype=torch.int64))
    with pytest.raises(ConfigError, match=says):
        sliced(batch, 0, 3)


def test_a_document_that_comes_back_is_refused() -> None:
    with pytest.raises(ValueError, match="its tokens must be neighbours"):
        cuts.document_starts(torch.tensor([[0, 1, 0, 0]]))
