"""`next_token` and `sequential`: one step's forward and backward."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fakes
from forge_train import MASKED, Batch, ConfigError
from forge_train_plugins.parallel.sequential import Sequential
from forge_train_plugins.tasks.next_token import NextToken

pytestmark = pytest.mark.unit


def batch(rows: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = torch.randint(0, 61, (2, rows, 9), generator=generator)
    labels[0, : 3 + seed] = MASKED
    return Batch(inputs, labels)


def executor(part: Any, on_micro_batch: Any = lambda last, batch: None) -> Any:
    job = fakes.job()
    task = fakes.make(NextToken).task(job)
    return fakes.make(Sequential).executor(fakes.part_model(part, on_micro_batch), task, job)


def test_a_batch_weighs_its_unmasked_labels() -> None:
    weight = fakes.make(NextToken).task(fakes.job()).weight(batch(2))
    assert (weight, type(weight)) == (2 * 9 - 3, int)


def test_outputs_are_logits() -> None:
    part, micro = fakes.decoder(), batch(2)
    hidden = part(micro.inputs)
    outputs = fakes.make(NextToken).task(fakes.job()).outputs(part, hidden, micro)
    assert torch.equal(outputs, part.head(hidden))


def test_accumulated_micro_batches_are_one_large_batch() -> None:
    """Uneven masks: only sums, divided by the tokens of all, add up."""
    micros = [batch(2, seed) for seed in range(3)]
    joined = Batch(torch.cat([m.inputs for m in micros]), torch.cat([m.labels for m in micros]))
    found: list[tuple[Tensor, list[Tensor]]] = []
    for batches in (micros, [joined]):
        part = fakes.decoder()
        loss = executor(part).train(batches, 0.125)
        found.append((loss, [p.grad for p in part.parameters()]))
    (loss, gradients), (expected, wanted) = found
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, wanted)
    assert not loss.requires_grad


def test_the_scale_multiplies_gradients_but_not_the_loss() -> None:
    found = []
    for scale in (1.0, torch.tensor(0.5)):
        part = fakes.decoder()
        found.append((executor(part).train([batch(2)], scale), part.head.weight.grad))
    (loss, gradient), (same, halved) = found
    assert torch.equal(loss, same)
    torch.testing.assert_close(gradient * 0.5, halved)


def test_tells_which_micro_batch_is_the_last() -> None:
    told: list[bool] = []
    executor(fakes.decoder(), lambda last, batch: told.append(last)).train([batch(1), batch(1), batch(1)], 1.0)
    assert told == [False, False, True]


def test_evaluation_leaves_no_gradient_and_the_mode_as_it_was() -> None:
    part, modes = fakes.decoder(), []
    part.register_forward_hook(lambda module, *_: modes.append(module.training))
    micro = batch(2)
    loss = executor(part).evaluate(micro)
    assert torch.equal(loss, executor(fakes.decoder()).train([micro], 1.0))
    assert modes == [False]
    assert part.training
    assert all(p.grad is None for p in part.parameters())


def test_what_a_batch_carries_reaches_the_model() -> None:
    micro = dataclasses.replace(
        batch(1), document_ids=torch.tensor([[0] * 4 + [1] * 5]), extras={"images": torch.ones(1)}
    )
    with pytest.raises(TypeError, match="images"):
        executor(fakes.decoder()).evaluate(micro)
    packed = dataclasses.replace(micro, extras={})
    run = executor(fakes.decoder())
    assert not torch.equal(run.evaluate(packed), run.evaluate(dataclasses.replace(packed, document_ids=None)))


def test_a_model_in_several_parts_needs_another_executor() -> None:
    with pytest.raises(ConfigError, match="pipeline"):
        fakes.make(Sequential).executor(SimpleNamespace(parts=[1, 2]), None, None)
