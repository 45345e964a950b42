"""`deepseek_fp8`: blocks, overrides and stochastic rounding."""

from __future__ import annotations

import json
from statistics import mean
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fused_kernels
import low_precision as low
from forge_train import ConfigError
from forge_train_plugins.precision._low_precision import recipes
from forge_train_plugins.precision._low_precision.formats import Blocks, rounded
from forge_train_plugins.precision._low_precision.minifloat import E4M3, nearest
from forge_train_tools.testing import RunForge

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("rows", "columns"), [(256, 384), (130, 200)])
def test_each_tile_has_its_own_scale(rows: int, columns: int) -> None:
    """By a loop over tiles and blocks, each cast by torch; the last ones may be smaller."""
    x = torch.randn(rows, columns) * torch.logspace(-3, 3, columns)
    for form, height in ((Blocks(E4M3, 128), 1), (Blocks(E4M3, 128, square=True), 128)):
        expected = torch.empty_like(x)
        for top in range(0, rows, height):
            for left in range(0, columns, 128):
                tile = x[top : top + height, left : left + 128]
                scale = tile.abs().max() / 448
                cast = (tile / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
                expected[top : top + height, left : left + 128] = cast * scale
        assert low.same_bits(rounded(x, form.scale(x), form), expected)


@pytest.mark.parametrize("scales", ["float32", "e8m0"])
def test_signal_to_noise_over_five_seeds(scales: Any) -> None:
    recipe = recipes.deepseek(scales)
    for seed in range(5):
        x, weight, gradient = low.operands(seed)
        found = low.passes(low.linear(recipe), x, weight, gradient)
        right = low.passes(low.exact, x, weight, gradient)
        assert min(low.decibels(one, other) for one, other in zip(right, found, strict=True)) >= 27


def test_one_outlier_spoils_its_tile_only() -> None:
    """What blocks are for: the same value costs a tensor's scale its small values."""
    x, weight, _ = low.operands()
    x[3, 5] = 1e6
    right, blocks, tensor = (
        x @ weight.t(),
        *(low.linear(recipe)(x, weight) for recipe in (recipes.deepseek(), recipes.scaled("tensorwise", kernel=False))),
    )
    others = torch.arange(len(x)) != 3
    assert low.decibels(right[others], blocks[others]) > 27
    assert low.decibels(right[others], tensor[others]) < 10


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    torch.manual_seed(0)
    x = torch.tensor([1.03, -0.3, 3e-3, 447.0, 2.0**-9 * 0.25, 0.0]).repeat(200_000, 1)
    found = nearest(x, E4M3, stochastic=True)
    up, down = found.amax(0), found.amin(0)
    assert (up - down).tolist() == pytest.approx([0.125, 0.03125, 2.0**-9, 32, 2.0**-9, 0])
    assert found.mean(0).tolist() == pytest.approx(x[0].tolist(), rel=5e-3, abs=1e-9)
    assert low.same_bits(nearest(found, E4M3), found), "not all of them are values of e4m3"


def test_stochastic_rounding_is_of_gradients() -> None:
    x, weight, gradient = low.operands()
    recipe = recipes.deepseek(stochastic=True)
    once, twice = (low.passes(low.linear(recipe), x, weight, gradient) for _ in range(2))
    assert torch.equal(once[0], twice[0])
    assert not torch.equal(once[1], twice[1])
    assert not torch.equal(once[2], twice[2])


@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"), [(256, 512, 256), (7, 144, 272), (1, 128, 16), (300, 640, 128)]
)
def test_the_kernel_is_given_what_emulation_rounds(
    tokens: int, inputs: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where sizes are no multiples of 128; gradients too."""
    asked: list[Any] = []

    def scaled_mm(*given: Any, **more: Any) -> torch.Tensor:
        asked.append([one.name for one in given if isinstance(one, F.ScalingType)])
        on_meta = [one.to("meta") if isinstance(one, torch.Tensor) else one for one in given]
        found = fused_kernels.scaled_mm(*given, **more)
        assert real(*on_meta, **more).shape == found.shape  # torch's own checks (2.13)
        return found

    real = F.scaled_mm
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    torch.manual_seed(0)
    x, weight, gradient = (
        torch.randn(*shape, dtype=torch.bfloat16) * torch.logspace(-3, 3, shape[1], dtype=torch.bfloat16)
        for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    by_kernel, emulated = (
        low.passes(low.linear(recipes.deepseek(kernel=kernel)), x, weight, gradient) for kernel in (True, False)
    )
    tile, block = "BlockWise1x128", "BlockWise128x128"
    assert asked == [[tile, block], [tile, block], [tile, tile]]
    for one, other in zip(by_kernel, emulated, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=0)
        assert one.shape == other.shape


def test_the_kernel_rounds_gradients_stochastically(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_mm", fused_kernels.scaled_mm)
    x, weight, gradient = (one.bfloat16() for one in low.operands())
    recipe = recipes.deepseek(stochastic=True, kernel=True)
    once, twice = (low.passes(low.linear(recipe), x, weight, gradient) for _ in range(2))
    assert [torch.equal(*pair) for pair in zip(once, twice, strict=True)] == [True, False, False]


def test_a_kernel_that_is_not_there_is_refused(run_forge: RunForge) -> None:
    with pytest.raises(ConfigError, match=r"emulate = 'off' needs a kernel for blocks, but only Hopper has one"):
        run_forge(["deepseek_fp8"], {"deepseek_fp8.emulate": "off"})


def note_of(run: Any) -> str:
    return next(one["note"] for one in json.loads((run.run / "composition.json").read_text()) if one["slot"] == "fp8")


def test_a_module_that_is_named_must_be_able_to(run_forge: RunForge) -> None:
    settings = {"deepseek_fp8.overrides": ["layers.0.feed_forward.up=fp8"], "decoder.hidden": 40}
    with pytest.raises(ConfigError, match=r"feed_forward.up' can't multiply in low precision: \d+ → 40 are not both"):
        run_forge(["deepseek_fp8"], settings)


def test_overrides_choose_single_modules(run_forge: RunForge) -> None:
    overrides = ["layers.0.*=high", "layers.0.attention.q=fp8", "layers.1.attention.o = fp8"]
    settings = {"deepseek_fp8.exclude": ["head", "layers.1.attention.*"], "deepseek_fp8.overrides": overrides}
    run = run_forge(["deepseek_fp8"], settings)
    assert note_of(run).startswith("1 × 128 and 128 × 128, emulated: 5 linear; as they are: layers.0.attention.k")
    products = run.plugin("deepseek_fp8")._conversion.products
    assert {name for name in products if "attention" in name} == {"layers.0.attention.q", "layers.1.attention.o"}


@pytest.mark.parametrize(
    ("override", "says"),
    [("layers.9.*=high", "matches none of the 15 modules"), ("head=fp4", "expected name=fp8 or name=high")],
)
def test_an_override_that_has_no_effect_is_refused(run_forge: RunForge, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_forge(["deepseek_fp8"], {"deepseek_fp8.overrides": [override]})


@pytest.mark.slow
@pytest.mark.extended
def test_losses_stay_within_a_percent_of_bf16(run_forge: RunForge) -> None:
    """On a toy, where chance is small; `benchmarks/run.py low_precision` is the measurement."""
    config = {"train.precision": "bf16", "adamw.lr": 3e-3}
    runs: dict[str, tuple[list[str], dict[str, Any]]] = {
        "bf16": (["moe"], {}),
        "tensorwise": (["moe", "fp8"], {}),
        "rowwise": (["moe", "fp8"], {"fp8.recipe": "rowwise"}),
        "deepseek": (["moe", "deepseek_fp8"], {}),
    }
    last = {
        name: mean(run_forge(plugins, {**config, **more}, steps=60).losses[-10:])
        for name, (plugins, more) in runs.items()
    }
    assert last["bf16"] < 3
    for name, loss in last.items():
        assert loss <= 1.01 * last["bf16"], f"{name}: {last}"
