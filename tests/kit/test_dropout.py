"""Dropout whose masks are a function of the sample."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_train import Batch, BatchPhase, CurrentStep, Job, Plugin, PluginError, PrepareBatch, StepResult, hookimpl
from forge_train_kit.model import Dropout
from forge_train_kit.model.dropout import mixed
from forge_train_tools.testing import RunForge

pytestmark = [pytest.mark.unit]

ROWS, LENGTH, FEATURES = 8, 64, 96


def passing(first: int = 0, rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> Any:
    """A job, a micro-batch of which passes through the model."""
    ids = torch.zeros(rows, length, dtype=torch.int64)
    batch = Batch(ids, ids, sample_ids=torch.arange(first, first + rows))
    return SimpleNamespace(seed=seed, step=CurrentStep([batch], batch))


def kept(job: Any, rate: float = 0.5, name: str = "a", shape: tuple[int, ...] = (ROWS, LENGTH, FEATURES)) -> Tensor:
    return Dropout(rate, job, name)(torch.ones(shape)) != 0


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_masks_have_their_rate_in_every_direction(rate: float) -> None:
    found = 1 - kept(passing(), rate).double()
    for over in ((0, 1, 2), (0, 1), (0, 2), (1, 2)):
        shares = found.mean(over)
        count = found.numel() / shares.numel()
        spread = (rate * (1 - rate) / count) ** 0.5
        assert (shares - rate).abs().max() < 5 * spread
    assert not Dropout(0.0, passing(), "a")(torch.zeros(ROWS, LENGTH, 2)).any()


def test_what_is_kept_is_divided_by_the_rest_and_so_is_its_gradient() -> None:
    x = torch.randn(ROWS, LENGTH, FEATURES, dtype=torch.bfloat16, requires_grad=True)
    out = Dropout(0.2, passing(), "a")(x)
    assert out.dtype is torch.bfloat16
    out.sum().backward()
    mask = kept(passing(), 0.2).to(torch.bfloat16) * 1.25
    assert torch.equal(out, x * mask)
    assert torch.equal(x.grad, mask)


@pytest.mark.parametrize("other", [{"seed": 1}, {"first": ROWS}, {"name": "b"}], ids=str)
def test_another_seed_sample_or_name_has_another_mask(other: dict[str, Any]) -> None:
    name = other.pop("name", "a")
    ours, others = kept(passing()), kept(passing(**other), name=name)
    agree = (ours == others).double().mean()
    assert abs(agree - 0.5) < 5 * 0.5 / ours.numel() ** 0.5


def test_neighbours_know_nothing_of_each_other() -> None:
    found = kept(passing()).double() * 2 - 1
    for dim, steps in enumerate(((1, 2), (1, 2, 16), (1, 2, 16))):
        for step in steps:
            one, other = found.narrow(dim, step, found.shape[dim] - step), found.narrow(dim, 0, found.shape[dim] - step)
            assert abs(float((one * other).mean())) < 5 / one.numel() ** 0.5


def test_a_mask_is_that_of_the_sample_in_whatever_batch_it_comes() -> None:
    whole = kept(passing(first=40))
    assert torch.equal(whole[2:5], kept(passing(first=42, rows=3), shape=(3, LENGTH, FEATURES)))
    assert torch.equal(whole[:, :9], kept(passing(first=40, length=9), shape=(ROWS, 9, FEATURES)))
    assert torch.equal(whole, kept(passing(first=40)))


def test_pieces_of_a_sequence_have_pieces_of_the_mask() -> None:
    job = passing(length=10)
    whole, module = Dropout(0.5, job, "a")(torch.ones(ROWS, 10, 4)), Dropout(0.5, job, "a")
    pieces = []
    for piece in range(4):
        module.sequence_piece = (piece, 4)
        pieces.append(module(torch.ones(ROWS, 3, 4)))
    assert torch.equal(torch.cat(pieces, 1)[:, :10], whole)


def test_any_features_and_a_copy() -> None:
    job = passing()
    module = Dropout(0.5, job, "a")
    flat, heads = module(torch.ones(ROWS, LENGTH, 6)), copy.deepcopy(module)(torch.ones(ROWS, LENGTH, 2, 3))
    assert torch.equal(flat, heads.flatten(2))


def test_evaluation_drops_nothing_and_needs_no_step() -> None:
    module, x = Dropout(0.5, SimpleNamespace(seed=0, step=CurrentStep()), "a"), torch.randn(2, 3, 4)
    assert module.eval()(x) is x
    with pytest.raises(PluginError, match="does not know which samples pass"):
        module.train()(x)


def test_sizes_that_are_not_the_batchs_are_refused() -> None:
    with pytest.raises(PluginError, match=r"given \[8, 32\] .* \[8, 64\]; .* must name it as 'sequence'"):
        kept(passing(), shape=(ROWS, LENGTH // 2, 3))
    with pytest.raises(ValueError, match="less than 1, found 1"):
        Dropout(1.0, passing(), "a")


def test_mixing_is_a_permutation() -> None:
    assert len(mixed(torch.arange(-(2**17), 2**17, dtype=torch.int32)).unique()) == 2**18


# -- in a run ---------------------------------------------------------------------------------------------------------

DROPOUT = {"decoder.dropout": 0.2, "decoder.embedding_dropout": 0.1}


@pytest.mark.slow
def test_micro_batches_and_recomputation_change_nothing(run_forge: RunForge) -> None:
    plain = run_forge(config=DROPOUT)
    assert plain.losses != run_forge().losses
    for plugins, size in (((), 1), ((), 4), (("ac",), 2)):
        other = run_forge(plugins, DROPOUT | {"train.micro_batch": size})
        assert other.losses == pytest.approx(plain.losses, rel=1e-6)


def test_a_resumed_run_goes_on_with_the_masks(run_forge: RunForge) -> None:
    config = DROPOUT | {"checkpoint.every": 2}
    through = run_forge(config=config, steps=4, name="through")
    half = run_forge(config=config, steps=4, stop_at=2, name="half")
    resumed = run_forge(config=config, steps=4, name="half")
    assert half.run == resumed.run
    assert through.losses[2:] == resumed.losses[-2:]


class Numbers(Plugin):
    """Keeps the numbers of samples that each step had; a preparation reads them, and makes two rows of each."""

    api = (1, 0)
    twice = False

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareBatch:
        self.prepared: list[int] = []

        def double(batch: Batch) -> Batch:
            assert batch.sample_ids is not None
            self.prepared += batch.sample_ids.tolist()
            rows = torch.arange(len(batch.inputs)).repeat_interleave(1 + self.twice)
            return Batch(batch.inputs[rows], batch.labels[rows])

        return PrepareBatch(BatchPhase.MAKE, double)

    @hookimpl
    def on_start(self, job: Job) -> None:
        self.job, self.found = job, []

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        ids = torch.cat([batch.sample_ids for batch in self.job.step.batches if batch.sample_ids is not None])
        self.found.append((step.data_range, ids.tolist()))


class Twice(Numbers):
    twice = True


@pytest.mark.parametrize("size", [1, 2, 4])
def test_samples_are_numbered_through_the_run(run_forge: RunForge, size: int) -> None:
    plugin = run_forge([Numbers], {"train.micro_batch": size}).plugin("numbers")
    assert plugin.found == [((at, at + 4), [at, at + 1, at + 2, at + 3]) for at in (0, 4, 8)]
    assert plugin.prepared == [*range(12)]


def test_rows_made_of_a_sample_are_numbered_each(run_forge: RunForge) -> None:
    plugin = run_forge([Twice], {"train.micro_batch": 2}).plugin("twice")
    assert plugin.found == [((at, at + 4), [*range(2 * at, 2 * at + 8)]) for at in (0, 4, 8)]
    assert plugin.prepared == [*range(12)]
