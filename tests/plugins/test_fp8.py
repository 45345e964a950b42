"""`fp8`: its casts are torch's, its recipes torchao's, and it says what it did to which modules."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Any

import pytest
import torch

import low_precision as low
from forge_train import ConfigError, DivergedError
from forge_train_plugins.precision._low_precision import kernels, recipes
from forge_train_plugins.precision._low_precision.formats import Scaled
from forge_train_plugins.precision._low_precision.minifloat import E4M3, E5M2, Minifloat, nearest, power_of_two
from forge_train_plugins.precision._low_precision.products import Recipe
from forge_train_tools.testing import RunForge

pytestmark = pytest.mark.unit

NAMES = ("tensorwise", "rowwise", "rowwise_gw_hp")
SIZES = [100, 0, 130, 1]


# -- arithmetic ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=lambda kind: kind.name)
def test_rounds_as_torch_casts_bit_for_bit(kind: Minifloat) -> None:
    assert kind.dtype is not None
    every = torch.arange(256, dtype=torch.uint8).view(kind.dtype).float()
    every = every[every.isfinite()].sort().values
    middle = (every[1:] + every[:-1]) / 2  # ties
    around = torch.cat([middle.nextafter(every[1:]), middle.nextafter(every[:-1])])
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (300_000,), generator=draw).to(torch.int32).view(torch.float32)
    x = torch.cat([every, middle, around, bits[bits.isfinite()], torch.randn(100_000, generator=draw)])
    cast = x.clamp(-kind.largest, kind.largest).to(kind.dtype).float()
    assert low.same_bits(nearest(x, kind), cast)
    assert nearest(torch.tensor([torch.nan]), kind).isnan().all()


def test_scales_are_the_next_power_of_two_upwards() -> None:
    scales = torch.tensor([1.0, 1.0000001, 0.75, 2.0**-40, 3e-12])
    assert power_of_two(scales).tolist() == [1.0, 2.0, 1.0, 2.0**-40, 2.0**-38]
    assert not power_of_two(torch.tensor([torch.nan, torch.inf])).isfinite().any()


@pytest.mark.parametrize("name", NAMES)
def test_gives_what_torchaos_own_layer_gives(name: Any) -> None:
    """With the same scales to the last bit; with torchao's default ones as exactly, measured by the noise."""
    theirs = name.replace("_gw_hp", "_with_gw_hp")
    x, weight, gradient = low.operands()
    ours = low.passes(low.linear(recipes.scaled(name, kernel=False)), x, weight, gradient)
    same = low.passes(low.torchao_layer(theirs, round_scales_to_power_of_2=True), x, weight, gradient)
    default = low.passes(low.torchao_layer(theirs), x, weight, gradient)
    plain = low.passes(low.exact, x, weight, gradient)
    for what, one, other, usual, right in zip(("out", "dx", "dw"), ours, same, default, plain, strict=True):
        assert torch.equal(one, other), what
        if not torch.equal(one, right):  # the product that `gw_hp` leaves as it is
            assert low.decibels(right, one) > 22, what
            assert abs(low.decibels(right, one) - low.decibels(right, usual)) < 0.5, what


@pytest.mark.parametrize("name", NAMES)
def test_torchs_kernel_gives_what_emulation_gives(name: Any) -> None:
    """The CPU's, also where tokens are no multiple of 16."""
    if name != "tensorwise" and not kernels.rows_on_cpu():
        pytest.skip("this torch's kernel takes one scale for each tensor")
    x, weight, gradient = low.operands(tokens=250)
    emulated, kernel = (
        low.passes(low.linear(recipes.scaled(name, kernel=kernel)), x, weight, gradient) for kernel in (False, True)
    )
    for one, other in zip(emulated, kernel, strict=True):
        assert low.decibels(one, other) > 100


def test_bf16_multiplies_the_same_values() -> None:
    x, weight, gradient = (one.bfloat16() for one in low.operands())
    recipe = recipes.scaled("rowwise", kernel=False)
    narrow = low.passes(low.linear(recipe), x, weight, gradient)
    wide = low.passes(low.linear(recipe), x.float(), weight.float(), gradient.float())
    for one, other in zip(narrow, wide, strict=True):
        assert one.dtype is torch.bfloat16
        assert torch.equal(one, other.bfloat16()) or low.decibels(other, one) > 47  # one rounding of the result


# -- experts ------------------------------------------------------------------------------------------------------

EXPERTS = {
    "fp8": recipes.scaled_experts("rowwise", kernel=False),
    "fp8 gw_hp": recipes.scaled_experts("rowwise_gw_hp", kernel=False),
    "deepseek_fp8": recipes.deepseek(),
    "mxfp8": recipes.mx(),
    "mxfp4": recipes.fp4("mxfp4"),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_give_what_a_layer_for_each_gives(name: str) -> None:
    """One without tokens, and one with a single one, among them; rows beyond their tokens hold anything."""
    x, _, gradient = low.operands(tokens=sum(SIZES) + 9)
    weight = torch.randn(len(SIZES), 256, 384, generator=torch.Generator().manual_seed(1)) * 0.02
    x[sum(SIZES) :] = torch.nan
    recipe = EXPERTS[name]
    found = low.passes(low.grouped(recipe, torch.tensor(SIZES)), x, weight, gradient)
    clean = torch.where(x.isnan(), 0.0, x)
    right = low.passes(low.looped(recipe, SIZES), clean, weight, gradient)
    mine = sum(SIZES)
    assert low.decibels(right[0][:mine], found[0][:mine]) > 100
    assert low.decibels(right[1][:mine], found[1][:mine]) > 100
    assert low.decibels(right[2], found[2]) > 100
    assert not found[2][1].any()


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_take_no_rows_at_all(name: str) -> None:
    weight = torch.randn(4, 32, 16)
    none = low.passes(
        low.grouped(EXPERTS[name], torch.zeros(4, dtype=torch.int64)), torch.zeros(0, 16), weight, torch.zeros(0, 32)
    )
    assert [tuple(one.shape) for one in none] == [(0, 32), (0, 16), (4, 32, 16)]
    assert not none[2].any()


def test_the_kernel_of_experts_takes_what_it_is_given() -> None:
    """Its shapes, strides and dtypes, as torch itself checks them; numbers need a GPU."""
    rows, weight, sizes = torch.randn(64, 32), torch.randn(4, 48, 32), torch.tensor([16, 0, 40, 8])
    form = Scaled(E4M3, rows=True)
    scales = form.scale(rows), form.scale(weight)
    out = kernels.scaled_grouped(
        rows.to("meta"), weight.to("meta"), sizes.to("meta"), (form, form),
        (scales[0].to("meta"), scales[1].to("meta")), torch.bfloat16,
    )  # fmt: skip
    assert out.shape == (64, 48)
    assert out.dtype is torch.bfloat16


# -- in a run -----------------------------------------------------------------------------------------------------

FAST = {"train.micro_batch": 4}


def composed(run: Any) -> dict[str, Any]:
    report = json.loads((run.run / "composition.json").read_text())
    found: dict[str, Any] = next(one for one in report if one["slot"] == "fp8")
    return found


def test_says_what_it_converted_and_what_it_left(run_forge: RunForge) -> None:
    run = run_forge(["fp8"], FAST)
    report = composed(run)
    assert len(report["matched"]) == 14
    assert report["note"] == "tensorwise, emulated: 14 linear; as they are: head"
    plain = run_forge([], FAST)
    assert run.losses != plain.losses
    assert run.losses == pytest.approx(plain.losses, rel=1e-2)
    assert list(dict(run.model.named_parameters())) == list(dict(plain.model.named_parameters()))
    assert type(run.model.parts[0].layers["0"].attention.q).__name__ == "Linear"


def test_alone_there_is_nothing_to_gather(run_forge: RunForge) -> None:
    run = run_forge(["fp8", "fsdp2"], {**FAST, "fp8.all_gather": True})
    assert composed(run)["note"] == "tensorwise, emulated, nothing to gather: 14 linear; as they are: head"
    assert run.losses == run_forge(["fp8"], FAST).losses


def test_experts_multiply_in_float8_too(run_forge: RunForge) -> None:
    run = run_forge(["fp8", "moe"], {**FAST, "moe.shared": 1})
    assert composed(run)["note"] == "tensorwise, emulated: 14 linear, 2 groups of experts; as they are: head"
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in run.model.parameters())
    assert run.losses != run_forge(["moe"], {**FAST, "moe.shared": 1}).losses


def test_bf16_and_recompute_go_with_it(run_forge: RunForge) -> None:
    narrow = run_forge(["fp8"], {**FAST, "train.precision": "bf16"})
    assert {parameter.dtype for parameter in narrow.model.parameters()} == {torch.float32}
    assert narrow.losses == pytest.approx(run_forge(["fp8"], FAST).losses, rel=1e-2)
    again = run_forge(["fp8", "ac"], {**FAST, "train.precision": "bf16"})
    assert again.losses == narrow.losses


@pytest.mark.slow
@pytest.mark.extended
def test_compiles_to_one_graph_for_all_layers(run_forge: RunForge, caplog: pytest.LogCaptureFixture) -> None:
    compiled = {"compile.backend": "aot_eager", "compile.fullgraph": True}
    torch._dynamo.reset()  # what another test compiled of the same code would be compiled again, as dynamic
    with caplog.at_level(logging.INFO, "forge_train"):
        run = run_forge(["fp8", "compile"], {**FAST, **compiled})
    assert "2 units in 1 graphs with 0 graph breaks" in caplog.text
    assert run.losses == pytest.approx(run_forge(["fp8"], FAST).losses, rel=1e-6)


def test_patterns_choose_modules(run_forge: RunForge) -> None:
    run = run_forge(["fp8"], {**FAST, "fp8.include": ["layers.*.attention.*"], "fp8.exclude": ["layers.0.*"]})
    assert composed(run)["matched"] == [f"layers.1.attention.{name}" for name in "koqv"]


@pytest.mark.parametrize(("key", "value"), [("include", "layers.*.atention.*"), ("exclude", "layers.7.*")])
def test_a_pattern_that_matches_nothing_is_refused(run_forge: RunForge, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"fp8\.{key}: '{value.replace('*', '.*')}' matches none of the 15 modules"):
        run_forge(["fp8"], {f"fp8.{key}": [value]})


def test_odd_dimensions_are_named(run_forge: RunForge, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "forge_train"):
        run = run_forge(["fp8"], {**FAST, "decoder.hidden": 40})
    assert "layers.0.feed_forward.gate: 32 → 40 are not both multiples of 16" in caplog.text
    assert composed(run)["note"].endswith(", … 4 more (6 for their shape)")
    with pytest.raises(ConfigError, match=r"no module can .*\n  layers.0.feed_forward.gate: 32 → 40 are not"):
        run_forge(["fp8"], {"decoder.hidden": 40, "fp8.include": ["*.feed_forward.*"]})


def test_auto_declines_where_it_does_not_pay(run_forge: RunForge) -> None:
    run = run_forge(["fp8", "moe"], {**FAST, "fp8.mode": "auto"})
    assert "0 linear" in composed(run)["note"]
    assert "declined 10 of 10: " in composed(run)["note"]
    assert " × the speed here" in composed(run)["note"]
    assert run.losses == run_forge(["moe"], FAST).losses


def test_auto_takes_what_is_faster(run_forge: RunForge, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_train_plugins.precision._low_precision import trial

    monkeypatch.setattr(trial, "_speed", lambda job, shape, recipe: 1.2 if shape == (32, 32) else 0.9)
    note = composed(run_forge(["fp8"], {**FAST, "fp8.mode": "auto"}))["note"]
    assert "4 linear" in note
    assert "declined 10 of 14: 16 × 32 runs at 0.90 × the speed here" in note


@pytest.mark.slow
def test_auto_judges_products_as_the_run_computes_them(run_forge: RunForge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eagerly, rounding costs many kernels; compiled, it is part of one."""
    import torch

    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    backend._tags = ()  # type: ignore[attr-defined]
    monkeypatch.setitem(torch._dynamo.backends.registry._COMPILER_FNS, "counted", backend)
    monkeypatch.setitem(torch._dynamo.backends.registry._BACKENDS, "counted", None)
    run_forge(["fp8"], {**FAST, "fp8.mode": "auto"})
    assert graphs == []
    torch._dynamo.reset()
    run = run_forge(["fp8", "compile"], {**FAST, "fp8.mode": "auto", "compile.backend": "counted"})
    shapes = {
        tuple(one.shape) for name, one in run.model.named_parameters() if name.startswith("layers") and one.ndim == 2
    }
    assert len(shapes) > 2
    assert sum(torch.nn.functional.linear in one or torch._C._nn.linear in one for one in graphs) >= len(shapes)


def test_only_the_forward_product_adds_up_fast(run_forge: RunForge, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torchao: gradients need all bits of fp32."""
    seen: list[bool] = []
    scaled = kernels.scaled

    def remembered(*args: Any, fast: bool = False) -> Any:
        seen.append(fast)
        return scaled(*args, fast=fast)

    monkeypatch.setattr(kernels, "scaled", remembered)
    run_forge(["fp8"], {**FAST, "fp8.emulate": "off"}, steps=1)
    assert seen.count(False) == 2 * seen.count(True) > 0


def test_the_kernel_can_be_asked_for(run_forge: RunForge, monkeypatch: pytest.MonkeyPatch) -> None:
    by_kernel = run_forge(["fp8"], {**FAST, "fp8.emulate": "off"})
    assert composed(by_kernel)["note"].startswith("tensorwise, by kernel")
    assert by_kernel.losses == pytest.approx(run_forge(["fp8"], FAST).losses, rel=1e-4)
    monkeypatch.setattr(kernels, "lacking", lambda device, dtype, rows: "there is none here")
    with pytest.raises(ConfigError, match="'off' needs a float8 kernel, but there is none here"):
        run_forge(["fp8"], {"fp8.emulate": "off"})


def test_two_of_them_are_refused(run_forge: RunForge) -> None:
    with pytest.raises(ConfigError, match=r"'fp4' and 'fp8'"):
        run_forge(["fp8", "fp4"])


def test_another_recipe_is_refused_at_resume(run_forge: RunForge) -> None:
    run_forge(["fp8"], FAST, steps=4, name="run", stop_at=2)
    rows = {**FAST, "fp8.recipe": "rowwise"}
    with pytest.raises(ConfigError, match=r"fp8\.recipe: 'tensorwise' in the checkpoint, 'rowwise' now"):
        run_forge(["fp8"], rows, steps=4, name="run")
    with pytest.raises(ConfigError, match="fp8: plugin no longer enabled"):
        run_forge([], FAST, steps=4, name="run")
    run = run_forge(["fp8"], {**rows, "checkpoint.allow_changes": ["fp8.recipe"]}, steps=4, name="run")
    assert run.finished.step == 4


def test_a_scale_that_is_not_finite_is_named(run_forge: RunForge) -> None:
    from forge_train import Job, Model, Plugin, hookimpl

    class Breaks(Plugin):
        """Puts a NaN into one weight."""

        api = (1, 0)

        @hookimpl
        def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
            with torch.no_grad():
                dict(model.named_parameters())["layers.1.feed_forward.up.weight"][3, 3] = torch.nan

    with pytest.raises(DivergedError, match=r"by step 2 a scale of 'layers.1.feed_forward.up', 'layers.1.feed_forward"):
        run_forge(["fp8", Breaks], {**FAST, "log.every": 2})


def test_every_recipe_is_one_of_frozen_values() -> None:
    """Equal recipes compare equal, so that what is compiled once serves all layers."""
    assert recipes.scaled("rowwise", kernel=False) == recipes.scaled("rowwise", kernel=False)
    assert dataclasses.replace(recipes.mx(), kernel=True) != recipes.mx()
    assert isinstance(hash(recipes.deepseek()), int)
    assert Recipe((recipes.ROWS, recipes.ROWS), None, None).block == 0


def test_a_kernel_that_lacks_scales_of_rows_is_told(run_forge: RunForge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "rows_on_cpu", lambda: False)
    with pytest.raises(ConfigError, match="'off' needs a float8 kernel, but the CPU's takes one scale for each tensor"):
        run_forge(["fp8"], {**FAST, "fp8.emulate": "off", "fp8.recipe": "rowwise"})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_layer_has_the_same_gradients(name: Any) -> None:
    operands = low.operands(tokens=64)
    layer = low.linear(recipes.scaled(name, kernel=False))
    plain = low.passes(layer, *operands)
    torch._dynamo.reset()
    compiled = low.passes(torch.compile(layer, backend="aot_eager"), *operands)
    assert all(one.equal(other) for one, other in zip(plain, compiled, strict=True))
    assert all(one.any() for one in compiled)
