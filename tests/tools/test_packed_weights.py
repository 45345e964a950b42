"""Packed weights while rows are generated: a layout of the same numbers, which nobody else sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tiny_models
from forge_train_tools.generation import packed as module
from forge_train_tools.generation.engine import follow, run
from forge_train_tools.generation.packed import ABLE, packed
from generation_rows import generated, recomputed, requests, worst

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ABLE, reason="this CPU packs nothing"),
]
PRODUCT = torch.ops.mkldnn._linear_pointwise.default


class Counted(TorchDispatchMode):
    """Rows of each product with packed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is PRODUCT:
            self.rows.append(args[0].shape[:-1].numel())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def every(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST", 0)


def changed(model: Any) -> list[str]:
    return [name for name, one in model.parts[0].named_modules() if "forward" in vars(one)]


def product(layer: nn.Linear, x: Tensor) -> tuple[Tensor, list[int]]:
    with torch.no_grad(), Counted() as counted:
        return layer(x), counted.rows


@pytest.fixture
def layer(every: None) -> Iterator[nn.Linear]:
    layer = nn.Linear(24, 40)
    with packed([layer]):
        yield layer
    assert "forward" not in vars(layer)


def test_rows_do_not_depend_on_those_beside_them(every: None) -> None:
    job, model = tiny_models.composed("decoder.std=0.05", "decoder.bias=true")
    wanted = [recomputed(job, model, row) for row in requests(9)]
    with Counted() as counted:
        found = [generated(job, model, requests(9), slots) for slots in (1, 3, 8)]
    assert counted.rows, "nothing was multiplied by packed weights"
    for one in found:
        assert worst(one, wanted) <= 1e-6
        assert worst(one, found[0]) == 0


def test_layers_are_as_they_were_when_rows_end_or_are_given_up(every: None) -> None:
    job, model = tiny_models.composed()
    layers = [name for name, one in model.parts[0].named_modules() if isinstance(one, nn.Linear)]
    rows = run(job, model, iter(requests(3)), slots=2)
    next(rows)
    assert changed(model) == layers
    rows.close()  # type: ignore[attr-defined]
    assert changed(model) == []


def test_what_trains_or_follows_a_single_row_packs_nothing(every: None) -> None:
    job, model = tiny_models.composed()
    next(follow(job, model, requests(1)[0]))
    assert changed(model) == []
    rows = run(replace(job, run=None), model, iter(requests(3)), slots=2)  # type: ignore[arg-type]
    next(rows)
    assert changed(model) == []


def test_packed_weights_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow, last = nn.Linear(300, 300), nn.Linear(8, 8), nn.Linear(300, 300)
    monkeypatch.setattr(module, "MOST", 4 * 300 * 300 + 100)
    with packed([nn.ModuleList([narrow, wide, wide, last])]):
        assert ["forward" in vars(one) for one in (narrow, wide, last)] == [False, True, False]


def test_several_rows_take_the_packed_weight_and_one_the_weight(layer: nn.Linear) -> None:
    x = torch.randn(5, 1, 24)
    found, rows = product(layer, x)
    assert rows == [5]
    torch.testing.assert_close(found, nn.functional.linear(x, layer.weight, layer.bias))
    assert product(layer, x[:1])[1] == []


def test_weights_that_change_are_seen(layer: nn.Linear) -> None:
    x, other = torch.randn(5, 24), torch.randn(40, 24)
    with torch.no_grad():
        found = torch.func.functional_call(layer, {"weight": other}, (x,))
    assert torch.equal(found, x @ other.T + layer.bias)
    with torch.no_grad():
        layer.weight.fill_(1)
    assert torch.equal(product(layer, x)[0], nn.functional.linear(x, layer.weight, layer.bias))


def test_gradients_are_those_of_the_weights(layer: nn.Linear) -> None:
    layer(torch.ones(5, 24)).sum().backward()
    assert layer.weight.grad is not None
    assert (layer.weight.grad == 5).all()


def test_other_dtypes_and_products_are_left_alone(every: None) -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    kept = [nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.bfloat16), Own(8, 8)]
    kept.append(torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))
    with packed([nn.ModuleList(kept)]):
        assert ["forward" in vars(one) for one in kept] == [False] * 4
