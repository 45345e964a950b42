"""Targets of any shape, each with its axes, on one process and on two; slicing comes last however plugins are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import soft_targets
from forge_train import Axes, Batch, PluginError
from forge_train_kit.hookspecs import tokenizer
from forge_train_tools.testing import Pool, RunForge

pytestmark = [pytest.mark.dist]

TASK = ("soft_targets:SoftTask", "soft_targets:Weigh")
IN_ORDER = (*TASK, "soft_targets:Soften", "soft_targets:Shorten")
BY_NAME_WRONG = (*TASK, "soft_targets:ZSoften", "soft_targets:AShorten")
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "dp2": (("fsdp2",), {"parallel.dp_shard": 2}),
    "tp2": (("tp",), {"parallel.tp": 2, "tp.loss_parallel": False}),
}


def train(ranks: Pool, folder: Path, world: int, plugins: tuple[str, ...], config: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir()
    config = {"train.micro_batch": 6, "train.evaluate_every": 2, **config}
    reply: dict[str, Any] = ranks.run(
        "cases:train", world, folder=str(folder), plugins=plugins, config=config, steps=4
    )[0]
    return reply


def test_soft_targets_on_one_process_and_on_two_in_the_order_of_phases(ranks: Pool, tmp_path: Path) -> None:
    alone = train(ranks, tmp_path / "one", 1, IN_ORDER, {})
    other = train(ranks, tmp_path / "names", 1, BY_NAME_WRONG, {})
    for what in ("losses", "norms", "evaluations"):
        assert other[what] == alone[what]
    for name, (more, config) in LAYOUTS.items():
        reply = train(ranks, tmp_path / name, 2, (*BY_NAME_WRONG, *more), config)
        for what in ("losses", "norms", "evaluations"):
            assert reply[what] == pytest.approx(alone[what], rel=1e-5), (name, what)


def test_what_reaches_the_task_is_made_of_the_whole_sequence_and_cut_along_its_own_axes(run_forge: RunForge) -> None:
    run = run_forge([getattr(soft_targets, name.partition(":")[2]) for name in BY_NAME_WRONG], steps=1)
    hooks = run.job.hooks
    raw = next(hooks.build_data("train"))
    (batch,) = hooks.prepare_batch()([raw])
    rows, half = raw.inputs.shape[0], raw.inputs.shape[1] // 2
    assert batch.inputs.equal(raw.inputs[:, :half])
    assert batch.labels.shape == (rows, half, tokenizer(run.job).vocabulary)
    assert batch.targets["weights"].equal((raw.inputs[:, :half] % 3 > 0).float().T)
    last = batch.labels[0, half - 1].nonzero().flatten().tolist()
    assert last == sorted(set(raw.labels[0, half - 1 : half - 1 + soft_targets.WINDOW].clamp(min=0).tolist()))
    assert not batch.targets.keys() & batch.model_inputs().keys()


def test_an_evaluation_counts_positions_and_not_the_values_of_their_labels(run_forge: RunForge) -> None:
    plugins = [getattr(soft_targets, name.partition(":")[2]) for name in (*TASK, "soft_targets:Soften")]
    config = {"train.evaluate_every": 1, "train.evaluate_batches": 1}
    run = run_forge(plugins, config, steps=1)
    (found,) = [event for event in run.events if event["event"] == "evaluation"]
    assert found["tokens"] == run.job.config.train.tokens_per_step


def test_a_tensor_that_does_not_lie_along_its_axes_is_refused(run_forge: RunForge) -> None:
    with pytest.raises(
        PluginError, match=r"hook prepare_batch .*'weights' is \[32, 5\], and its batch axis is said to"
    ):
        run_forge([soft_targets.Misshapen])


@pytest.mark.unit
def test_axes_of_a_batch() -> None:
    ids, classes = torch.zeros(2, 8, dtype=torch.int64), torch.tensor([1, 2])
    batch = Batch(ids, classes, extras={"image": torch.ones(2, 3)}, targets={"scores": torch.ones(8, 4, 2)})
    assert "say which it is with Batch(axes={'scores'" in batch.problem()
    batch = Batch(ids, classes, ids, targets={"scores": torch.ones(8, 4, 2)}, axes={"scores": Axes(2, 0)})
    assert not batch.problem()
    cut = batch.slice("sequence", (0, 3))
    assert {name: list(tensor.shape) for name, tensor in cut.tensors().items()} == {
        "inputs": [2, 3],
        "labels": [2],
        "position_ids": [2, 3],
        "positions": [3],
        "scores": [3, 4, 2],
    }
    assert [list(t.shape) for t in batch.slice("batch", (1, 2)).tensors().values()] == [
        [1, 8],
        [1],
        [1, 8],
        [8, 4, 1],
    ]
    assert "two of its tensors are named 'labels'" in Batch(ids, ids, targets={"labels": ids}).problem()
    assert Batch(ids[:0], ids[:0]).problem().endswith("there is no token")
    assert "`axes` names 'score'" in Batch(ids, ids, axes={"score": Axes()}).problem()
