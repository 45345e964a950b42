"""Operation counts and the scale of residual projections."""

from __future__ import annotations

import pytest
import torch

from forge_train_kit.model import depth_scaled, flops_per_token, full_tensor

pytestmark = pytest.mark.unit


def test_residual_projections_keep_the_variance_of_the_stream() -> None:
    layers, std = 8, 0.5
    assert 2 * layers * depth_scaled(std, layers) ** 2 == pytest.approx(std**2)


def test_operations_of_a_matrix_and_of_attention() -> None:
    assert flops_per_token(100, weights=10) == 6 * 10
    assert flops_per_token(100, weights=10, width=3) == 6 * 10 + 6 * 100 * 3


def test_a_plain_tensor_is_whole() -> None:
    x = torch.ones(2)
    assert full_tensor(x) is x
