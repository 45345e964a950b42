"""Parameter groups, operation counts, and the scale of residual projections."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from forge_train.nn import decay_groups, depth_scaled, flops_per_token, full_tensor

pytestmark = pytest.mark.unit


def model(**parameters: nn.Parameter) -> Any:
    return SimpleNamespace(named_parameters=parameters.items, roles={"table": "embedding", "head": "head"})


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*(shape or (2, 2))))


@pytest.mark.parametrize("decay_embeddings", [False, True])
def test_matrices_decay_and_vectors_do_not(decay_embeddings: bool) -> None:
    table, weight, head, norm = matrix(), matrix(), matrix(), matrix(2)
    groups = decay_groups(
        model(table=table, weight=weight, head=head, norm=norm), 0.1, decay_embeddings=decay_embeddings
    )
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert decays == {id(weight): 0.1, id(head): 0.1, id(norm): 0.0, id(table): 0.1 if decay_embeddings else 0.0}
    assert len(groups) == 2


def test_frozen_parameters_are_left_out() -> None:
    frozen = matrix().requires_grad_(False)
    ((group),) = decay_groups(model(frozen=frozen, weight=matrix()), 0.1, decay_embeddings=False)
    assert len(group["params"]) == 1


def test_each_mesh_has_its_own_group() -> None:
    here, there = matrix(), matrix()
    there.device_mesh = "expert"  # type: ignore[attr-defined]
    assert len(decay_groups(model(here=here, there=there), 0.1, decay_embeddings=False)) == 2


def test_residual_projections_keep_the_variance_of_the_stream() -> None:
    layers, std = 8, 0.5
    assert 2 * layers * depth_scaled(std, layers) ** 2 == pytest.approx(std**2)


def test_operations_of_a_matrix_and_of_attention() -> None:
    assert flops_per_token(100, weights=10) == 6 * 10
    assert flops_per_token(100, weights=10, width=3) == 6 * 10 + 6 * 100 * 3


def test_a_plain_tensor_is_whole() -> None:
    x = torch.ones(2)
    assert full_tensor(x) is x
