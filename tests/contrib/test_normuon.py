"""NorMuon, a rule of a third party, against its formula; on several ranks in tests/dist/test_matrix_optimizers.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forge_train_contrib.normuon import NormalisedRows, orthogonal
from forge_train_kit.optim import MatrixOptimizer
from forge_train_tools.testing import assert_conforms


@pytest.mark.slow
def test_it_conforms() -> None:
    assert_conforms("normuon", strict=True)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (2, 6, 10)])
def test_is_the_papers_algorithm(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(shape, generator=generator))
    group = {"params": [weight], "lr": 0.1, "weight_decay": 0.2, "momentum": 0.9, "nesterov": False}
    made = MatrixOptimizer([group], NormalisedRows(0.8, 5))
    theta = weight.detach().double()
    momentum, second = torch.zeros_like(theta), torch.zeros(*shape[:-1], 1, dtype=torch.float64)
    for _ in range(3):
        gradient = weight.grad = torch.randn(shape, generator=generator)
        momentum = 0.9 * momentum + 0.1 * gradient.double()
        update = orthogonal(momentum, 5)
        second = 0.8 * second + 0.2 * update.square().mean(-1, keepdim=True)
        update = update / (second.sqrt() + 1e-8)
        size = update.norm(dim=(-2, -1), keepdim=True) / (shape[-2] * shape[-1]) ** 0.5
        theta = theta - 0.1 * 0.2 * theta - 0.1 * 0.2 * update / size
        made.step()
    torch.testing.assert_close(weight.detach().double(), theta, rtol=1e-4, atol=1e-5)
    state = made.state[weight]["second_moment"]
    assert state.shape == (*shape[:-1], 1)
    torch.testing.assert_close(state.double(), second, rtol=1e-4, atol=1e-6)


def test_rows_that_hardly_move_are_moved_as_far_as_others() -> None:
    x = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0))
    x[0, 0] *= 1e-3
    state = {"second_moment": torch.zeros(1, 8, 1)}
    sizes = NormalisedRows(0.95, 5).direction(x, state)[0].square().mean(-1).sqrt()
    torch.testing.assert_close(sizes, torch.ones(8), rtol=1e-3, atol=1e-3)
