"""Both halves of a split backward pass against the whole of it, where weights share nodes of the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input
from torch.utils.checkpoint import checkpoint

from forge_train_kit.pipeline import Action, Work
from forge_train_plugins.parallel._pp.split import add_weight_gradients
from forge_train_plugins.parallel._pp.step import Step

Part = Callable[[Tensor, Sequence[nn.Parameter]], Tensor]


def shared_product(x: Tensor, weights: Sequence[nn.Parameter]) -> Tensor:
    a, b, both = weights
    return (x @ (a * both)).tanh() @ (b * both)


def shared_sum(x: Tensor, weights: Sequence[nn.Parameter]) -> Tensor:
    """No node saves anything that a second pass would miss, and all gradients are one tensor."""
    a, b, both = weights
    return (x + (a + both)) + (b + both)


def tied(x: Tensor, weights: Sequence[nn.Parameter]) -> Tensor:
    """A weight before and behind another one that is between."""
    first, between, last = weights
    return ((x @ first).sin() @ between + last).exp() @ first


@pytest.mark.parametrize("part", [shared_product, shared_sum, tied])
def test_two_halves_are_the_whole(part: Part) -> None:
    chance = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(4, 4, generator=chance, dtype=torch.float64)) for _ in range(3)]
    x = torch.randn(4, 4, generator=chance, dtype=torch.float64).requires_grad_()
    right = torch.autograd.grad(part(x, weights).square().sum(), [x, *weights])
    for _ in range(2):  # the second is added
        (of_x,), groups = stage_backward_input([part(x, weights).square().sum()], None, [x], iter(weights))
        add_weight_gradients(weights, groups)
        torch.testing.assert_close(of_x, right[0])
    for weight, gradient in zip(weights, right[1:], strict=True):
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, 2 * gradient)


class Recomputing(nn.Module):
    """A unit with four weights that counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(4, 4, generator=chance) for _ in range(4))
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(self._product, x, use_reentrant=False))

    def _product(self, x: Tensor) -> Tensor:
        self.passes += 1
        for weight in self.weights:
            x = (x @ weight).tanh()
        return x


def test_units_are_recomputed_once_in_each_half() -> None:
    first, unit, x = nn.Embedding(8, 4), Recomputing(), torch.arange(6)
    task = SimpleNamespace(loss=lambda part, hidden, batch: hidden.square().sum())
    model = SimpleNamespace(on_micro_batch=lambda *given: None)
    batch = SimpleNamespace(inputs=x, model_inputs=dict)
    given: Any = (model, task, {0: first, 1: unit}, 2, None, [batch], 1.0)
    parameters = [*first.parameters(), *unit.parameters()]
    right = torch.autograd.grad(unit(first(x)).square().sum(), parameters)
    unit.passes = 0
    step = Step(*given, recomputes=True)
    for part, work in ((0, "F"), (1, "F"), (1, "I"), (1, "W"), (0, "I"), (0, "W")):
        step.do(Action(Work(work), part, 0), last=True)
    assert unit.passes == 3
    for parameter, gradient in zip(parameters, right, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
