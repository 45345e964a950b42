"""Both halves of a split backward pass against the whole of it, where weights share nodes of the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input

from forge_train_plugins.parallel._pp.split import add_weight_gradients

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
