"""Low precision where a rank, or an expert, gets hardly any rows: every recipe, every product, both passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import low_precision as low
from crossed import pairs
from forge_train_plugins.experts._moe.experts import Experts
from forge_train_plugins.precision._low_precision import recipes
from forge_train_plugins.precision._low_precision.kernels import rows_on_cpu
from forge_train_plugins.precision._low_precision.products import Recipe

pytestmark = [pytest.mark.unit]

ROWS = (0, 1, 2, 15, 16, 17)
IN, OUT = 48, 32
LINEAR: dict[str, Recipe] = {
    **{f"fp8 {name}": recipes.scaled(name, kernel=False) for name in ("tensorwise", "rowwise", "rowwise_gw_hp")},
    **{f"fp8 {name}, kernel": recipes.scaled(name, kernel=True) for name in ("tensorwise", "rowwise", "rowwise_gw_hp")},
    "deepseek_fp8": recipes.deepseek(),
    "deepseek_fp8 e8m0": recipes.deepseek("e8m0"),
    "mxfp8": recipes.mx(),
    "nvfp4": recipes.fp4("nvfp4"),
    "mxfp4": recipes.fp4("mxfp4"),
}
EXPERTS: dict[str, Recipe] = {
    "fp8": recipes.scaled_experts("rowwise", kernel=False),
    "fp8 gw_hp": recipes.scaled_experts("rowwise_gw_hp", kernel=False),
    **{name: recipe for name, recipe in LINEAR.items() if not name.startswith("fp8")},
}
DTYPES = (torch.float32, torch.bfloat16)


def operands(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(one.to(dtype) for one in low.operands(tokens=rows, inputs=IN, outputs=OUT))  # type: ignore[return-value]


def padded(x: Tensor) -> Tensor:
    """Zeros behind, to a size that no kernel minds: they change no scale."""
    return torch.nn.functional.pad(x, (0, 0, 0, 64 - len(x)))


def agree(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6 if one.dtype is torch.float32 else 1e-2, atol=1e-7)


@pytest.mark.parametrize(("name", "rows", "dtype"), pairs(LINEAR, ROWS, DTYPES))
def test_a_linear_layer_takes_any_number_of_rows(name: str, rows: int, dtype: torch.dtype) -> None:
    if name.endswith("kernel") and "rowwise" in name and not rows_on_cpu():
        pytest.skip("this torch's kernel takes one scale for each tensor")
    x, weight, gradient = operands(rows, dtype)
    layer = low.linear(LINEAR[name])
    found = low.passes(layer, x, weight, gradient)
    out, of_x, of_weight = low.passes(layer, padded(x), weight, padded(gradient))
    agree(found, (out[:rows], of_x[:rows], of_weight))
    for one, exact in zip(found, low.passes(low.exact, x, weight, gradient), strict=True):
        assert not exact.any() or low.decibels(exact, one) > (12 if "fp4" in name else 20)


@pytest.mark.parametrize(("name", "rows", "beyond", "dtype"), pairs(EXPERTS, ROWS, [0, 3], DTYPES))
def test_an_expert_takes_any_number_of_rows(name: str, rows: int, beyond: int, dtype: torch.dtype) -> None:
    """Alone on its rank, and beside others that have none and a few; rows beyond all of theirs hold anything."""
    recipe = EXPERTS[name]
    for sizes in ([rows], [0, rows, 0], [5, rows]):
        mine = sum(sizes)
        x, weight, gradient = operands(mine + beyond, dtype)
        weights = torch.stack([weight * (1 + index) for index in range(len(sizes))])
        garbage = x.index_fill(0, torch.arange(mine, mine + beyond), torch.nan)
        found = low.passes(low.grouped(recipe, torch.tensor(sizes)), garbage, weights, gradient)
        assert all(one.isfinite().all() for one in (found[0][:mine], found[1][:mine], found[2]))
        if name == "nvfp4" and len(sizes) > 1:
            continue  # its second scale is all experts' together
        parts = zip(x[:mine].split(sizes), weights, gradient[:mine].split(sizes), strict=True)
        each = [low.passes(low.linear(recipe), *part) for part in parts]
        out, of_x = (torch.cat([one[index] for one in each]) for index in (0, 1))
        of_weight = torch.stack([one[2] for one in each])
        agree((found[0][:mine], found[1][:mine], found[2]), (out, of_x, of_weight))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("matmul", ["grouped", "auto"])
def test_experts_in_full_precision_do_too(matmul: str, transposed: bool) -> None:
    for rows in ROWS[matmul == "grouped" :]:
        pair = []
        for kind in (matmul, "loop"):
            torch.manual_seed(0)
            experts = Experts(2, IN, OUT, matmul=kind)  # type: ignore[arg-type]
            for parameter in experts.parameters():
                torch.nn.init.normal_(parameter, std=0.1)
            x = torch.randn(IN, rows).t() if transposed else torch.randn(rows, IN)
            out = experts(x.requires_grad_(), torch.tensor([rows, 0]))
            pair.append((out, *torch.autograd.grad(out.square().sum(), (x, experts.gate, experts.down))))
        for one, other in zip(*pair, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
