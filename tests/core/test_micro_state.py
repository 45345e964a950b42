"""What is kept for a step is cut for its micro-batches, joined for its global batch, and gone after it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forge_train import Axes, Batch, PluginError, Stack, StateKey, StepState, shard_of_tree
from forge_train.contract.micro_state import POSITIONS
from forge_train.contract.transform import MicroBatch

pytestmark = [pytest.mark.unit, pytest.mark.accept("axes", 1)]

TOKENS: StateKey[Tensor] = StateKey("own.tokens", Axes(0, 1))
ROWS: StateKey[dict[str, Tensor]] = StateKey("own.rows", {"cut": Axes(), "mean": Axes(batch=None)})
EACH: StateKey[Tensor] = StateKey("own.each", Stack())


def begun(state: StepState, sizes: tuple[int, ...] = (2, 1), length: int = 4, sliced: bool = False) -> list[Batch]:
    ids = [torch.zeros(size, length, dtype=torch.int64) for size in sizes]
    return state.begin([Batch(one, one) for one in ids], sliced=sliced)


def test_written_for_the_global_batch_and_read_for_each_micro_batch() -> None:
    state = StepState()
    one, two = begun(state)
    whole, mean = torch.arange(12).view(3, 4), torch.tensor(2.0)
    state[TOKENS], state[EACH] = whole, torch.tensor([5, 6])
    state[ROWS] = {"cut": whole[:, 0], "mean": mean}
    assert torch.equal(one.state[TOKENS], whole[:2])
    assert torch.equal(two.state[TOKENS], whole[2:])
    assert two.state[EACH].tolist() == 6
    assert two.state[ROWS]["cut"].tolist() == [8]
    assert one.state[ROWS]["mean"] is two.state[ROWS]["mean"] is mean
    assert torch.equal(state[TOKENS], whole)
    assert state[EACH].tolist() == [5, 6]
    assert state[ROWS]["mean"] is not None


def test_cut_with_the_batch_and_moved_with_it() -> None:
    state = StepState()
    batches = begun(state, (1, 1), sliced=True)
    state[TOKENS] = torch.arange(8).view(2, 4)
    spans = [[(0, 1), (3, 4)], [(1, 3)]]
    slices = [shard_of_tree(one, one.spec("sequence", spans=spans), 2, 0) for one in batches]
    state.use(slices)
    assert slices[1].state[TOKENS].tolist() == [[4, 7]]
    assert slices[1].state[POSITIONS].tolist() == [0, 3]
    assert state[TOKENS].tolist() == [[0, 3], [4, 7]]
    moved = slices[1].to(torch.device("meta"))
    assert moved.state[TOKENS].is_meta
    assert replace(slices[1], labels=slices[1].inputs).state is slices[1].state


def test_written_for_each_micro_batch_and_read_for_all() -> None:
    state = StepState()
    batches = begun(state)
    state.use(batches)
    assert EACH not in state
    for number, batch in enumerate(batches):
        batch.state[EACH] = torch.tensor(0.5 * number)
        batch.state[TOKENS] = torch.full((len(batch.inputs), 4), number, dtype=torch.float32).requires_grad_() * 2
    assert EACH in state
    assert state[EACH].tolist() == [0, 0.5]
    assert state[TOKENS][:, 0].tolist() == [0, 0, 2]
    assert not state[TOKENS].requires_grad
    batches[0].state[EACH] = torch.tensor(7.0)
    assert state[EACH].tolist() == [7, 0.5]


def test_parts_of_a_batch_keep_for_themselves() -> None:
    state = StepState()
    (batch,) = begun(state, (2,))
    first = shard_of_tree(batch, batch.spec("batch"), 2, 0)
    first.state[EACH] = torch.tensor(1.0)
    assert EACH in first.state
    assert EACH not in batch.state
    assert EACH not in shard_of_tree(batch, batch.spec("batch"), 2, 1).state


def test_nothing_is_left_of_a_step() -> None:
    state = StepState()
    batches = begun(state)
    before, _ = batches
    state[EACH] = torch.tensor([5, 6])
    state.use(batches)
    state.passes(MicroBatch(last=True, state=before.state))
    assert state.micro is before.state
    state.passes(MicroBatch(last=True))
    assert state.micro is None, "the executor does not say which"
    state.passes(before)
    state.end()
    assert state.micro is None
    for where, ask in (("batch.state", lambda: before.state[EACH]), ("job.step_state", lambda: state[EACH])):
        with pytest.raises(PluginError, match=rf"^{where} was asked for 'own.each', and there is no step: it lasts"):
            ask()
    with pytest.raises(PluginError, match=r"^batch\.state was asked"):
        before.state[EACH] = torch.tensor(1)
    with pytest.raises(PluginError, match=r"^job\.step_state was asked"):
        state[EACH] = torch.tensor([1, 2])
    with pytest.raises(PluginError, match=r"^batch\.state was asked"):
        Batch(before.inputs, before.inputs).state[EACH]
    after = begun(state)
    assert EACH not in state
    assert EACH not in after[0].state
    with pytest.raises(PluginError, match=r"^batch\.state was asked"):
        assert EACH not in before.state


def test_mistakes_are_told_in_a_sentence() -> None:
    state = StepState()
    batches = begun(state)
    with pytest.raises(
        PluginError, match=r"'own\.tokens' has 4 rows \(axis 0 of \[4, 4\]\); the step's batches have 3 \(2 \+ 1\)\."
    ):
        state[TOKENS] = torch.zeros(4, 4)
    with pytest.raises(
        PluginError, match=r"'own\.rows', at cut, is \[\], without axis 0 for rows; the step's batches have 3"
    ):
        state[ROWS] = {"cut": torch.tensor(1.0), "mean": torch.tensor(1.0)}
    with pytest.raises(PluginError, match=r"'own\.rows': the tree: the spec names 'mean', which is not there"):
        state[ROWS] = {"cut": torch.zeros(3)}
    with pytest.raises(PluginError, match=r"has no 'own\.each' on this rank; there is nothing\. What is written in a"):
        state[EACH]
    batches[0].state[EACH] = torch.tensor(1.0)
    with pytest.raises(PluginError, match=r"'own\.each' was written for 1 of 2 micro-batches"):
        state[EACH]
    with pytest.raises(PluginError, match=r"has no 'own\.each' on this rank"):
        batches[1].state[EACH]
    with pytest.raises(PluginError, match=r"'own\.each' is written with Stack\(dim=0\), and used with Axes\(batch=0, "):
        batches[0].state[StateKey("own.each")]
    with pytest.raises(PluginError, match=r"asked with a StateKey, found 'own\.each': KEY = StateKey"):
        batches[0].state["own.each"]  # type: ignore[index]
    batches[0].state[ROWS] = {"cut": torch.zeros(2), "mean": torch.tensor(1.0)}
    batches[1].state[ROWS] = {"cut": torch.zeros(1), "mean": torch.tensor(2.0)}
    with pytest.raises(
        PluginError, match=r"'own\.rows' can't be joined from its micro-batches: mean: part 1 differs from part 0"
    ):
        state[ROWS]
    state.use(batches)
    with pytest.raises(PluginError, match=r"'own\.tokens' was written for the global batch after its batches were cut"):
        state[TOKENS] = torch.zeros(3, 4)


def test_a_value_of_another_size_is_refused_when_it_is_written() -> None:
    state = StepState()
    batches = begun(state, (1, 1), sliced=True)
    with pytest.raises(PluginError, match=r"'own\.tokens' has 2 positions \(axis 1 of \[2, 2\]\); the step's .* 4\.$"):
        state[TOKENS] = torch.zeros(2, 2)
    first, _ = batches
    rank = shard_of_tree(first, first.spec("sequence", spans=[[(0, 1)], [(1, 4)]]), 2, 1)
    for micro, rows, length in ((first.state, 1, 4), (rank.state, 1, 3), (rank.to(torch.device("meta")).state, 1, 3)):
        with pytest.raises(PluginError, match=rf"'own\.tokens' has 2 positions .*; the micro-batch has {length}\.$"):
            micro[TOKENS] = torch.zeros(rows, 2)
        with pytest.raises(PluginError, match=rf"'own\.rows', at cut, has 5 rows; the micro-batch has {rows}\.$"):
            micro[ROWS] = {"cut": torch.zeros(5), "mean": None}
        with pytest.raises(PluginError, match=r"'own\.tokens' is 1\.0, and must be a tensor with rows; the micro-"):
            micro[TOKENS] = 1.0  # type: ignore[misc]
        assert TOKENS not in micro
        assert ROWS not in micro
        micro[TOKENS] = torch.zeros(rows, length)


def test_the_axes_of_a_key_count_from_the_end_too() -> None:
    last: StateKey[Tensor] = StateKey("own.last", Axes(batch=-2, sequence=-1))
    (batch,) = begun(StepState(), (2,))
    batch.state[last] = torch.zeros(5, 2, 4)
    with pytest.raises(PluginError, match=r"'own\.last' has 3 positions \(axis -1 of \[5, 2, 3\]\)"):
        batch.state[last] = torch.zeros(5, 2, 3)


def test_no_micro_batch_passes_in_a_prepare_step() -> None:
    state = StepState()
    batches = begun(state)
    with pytest.raises(
        PluginError, match=r"micro was asked for while .*: in a PrepareStep, write job\.step_state\[KEY\]"
    ):
        assert state.micro
    state.use(batches)
    assert state.micro is None


def test_context_parallel_ranks_must_agree_on_what_has_no_positions() -> None:
    class Two:
        """Context-parallel ranks with half of the sequences each, of which the other has twice the values."""

        def gather_tensors(self, tensor: Tensor, axis: str) -> list[Tensor]:
            if axis == "dp":
                return [tensor]
            return [tensor, tensor + 2 if tensor.dtype == torch.int64 else 2 * tensor]

    state, row = StepState(), StateKey[Tensor]("own.row", Axes(batch=0))
    (whole,) = begun(state, (2,), sliced=True)
    half = shard_of_tree(whole, whole.spec("sequence"), 2, 0)
    state.use([half])
    half.state[row], half.state[TOKENS] = torch.ones(2), torch.ones(2, 2)
    assert state.gather(TOKENS, Two()).tolist() == [[1, 1, 2, 2]] * 2  # type: ignore[arg-type]
    with pytest.raises(
        PluginError, match=r"'own\.row' can't be joined from its context-parallel ranks, which must agree"
    ):
        state.gather(row, Two())  # type: ignore[arg-type]
