"""`muon` on one process: against torch.optim.Muon and AdamW, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import fakes
from forge_train import ConfigError
from forge_train_kit.optim import MatrixOptimizer, fused_rows
from forge_train_kit.sections import ParameterGroup
from forge_train_plugins.optimizers._muon.newton_schulz import orthogonalise
from forge_train_plugins.optimizers._muon.rule import Orthogonal
from forge_train_plugins.optimizers.muon import ForTheRest, Muon

pytestmark = [pytest.mark.unit]


def optimizer(part: nn.Module, **values: Any) -> Any:
    return fakes.make(Muon, **values).optimizer(fakes.part_model(part), fakes.job())


def rule(dtype: torch.dtype = torch.float32, **values: Any) -> Orthogonal:
    settings: Any = {"coefficients": "quintic", "steps": 5, "eps": 1e-7, "scale": "rms", **values}
    return Orthogonal(dtype=dtype, **settings)


def group(*parameters: nn.Parameter, **values: Any) -> dict[str, Any]:
    return {"params": list(parameters), "lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True, **values}


def drawn(*shape: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


def give(parameters: list[nn.Parameter], seed: int) -> None:
    for index, parameter in enumerate(parameters):
        parameter.grad = drawn(*parameter.shape, seed=100 * seed + index).detach()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("scale", "theirs"), [("rms", "match_rms_adamw"), ("spectral", "original")])
def test_is_torchs_muon(nesterov: bool, scale: str, theirs: str) -> None:
    shapes = [(8, 24), (24, 8), (16, 16), (8, 24)]
    mine, expected = ([drawn(*shape, seed=i) for i, shape in enumerate(shapes)] for _ in range(2))
    made = MatrixOptimizer([group(*mine, nesterov=nesterov)], rule(torch.bfloat16, scale=scale))
    reference = torch.optim.Muon(
        expected, lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=nesterov, adjust_lr_fn=theirs
    )
    start = [p.detach().clone() for p in mine]
    for step in range(4):
        for parameters, one in ((mine, made), (expected, reference)):
            give(parameters, step)
            one.step()
    for own, other, begun in zip(mine, expected, start, strict=True):
        moved = (other - begun).norm()
        assert (own - other).norm() <= 4e-3 * moved, "bf16 rounds sums of other orders alike, mostly"


def test_in_fp32_it_is_the_formula_in_double_precision() -> None:
    weight = drawn(8, 24)
    made = MatrixOptimizer([group(weight)], rule())
    theta, m = weight.detach().double(), 0.0
    for step in range(3):
        give([weight], step)
        g = weight.grad.double()  # type: ignore[union-attr]
        m = 0.9 * m + 0.1 * g
        x = 0.1 * g + 0.9 * m
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        theta = theta - 0.02 * 0.1 * theta - 0.02 * 0.2 * math.sqrt(24) * x
        made.step()
    torch.testing.assert_close(weight.detach().double(), theta, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("coefficients", "steps", "worst"), [("quintic", 5, 0.35), ("polar_express", 10, 0.02)])
@pytest.mark.parametrize("shape", [(6, 20), (20, 6)])
def test_singular_values_end_near_one(coefficients: Any, steps: int, worst: float, shape: tuple[int, int]) -> None:
    x = torch.stack([drawn(*shape, seed=seed).detach() for seed in range(3)])
    found = orthogonalise(x.clone(), coefficients=coefficients, steps=steps, dtype=torch.float32, eps=1e-7)
    assert (torch.linalg.svdvals(found) - 1).abs().max() < worst
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    assert (found - u @ v).norm() / (u @ v).norm() < worst


def test_polar_express_converges_in_fewer_steps() -> None:
    x = drawn(32, 64).detach()[None]
    x = x * torch.logspace(0, -2, 32)[:, None]
    errors = {
        name: (
            torch.linalg.svdvals(orthogonalise(x.clone(), coefficients=name, steps=6, dtype=torch.float32, eps=1e-7))
            - 1
        )
        .abs()
        .max()
        for name in ("quintic", "polar_express")
    }
    assert errors["polar_express"] < errors["quintic"] / 2


def test_a_stack_is_as_many_matrices() -> None:
    stack = drawn(3, 8, 24)
    apart = [nn.Parameter(one.detach().clone()) for one in stack]
    made, reference = MatrixOptimizer([group(stack)], rule()), MatrixOptimizer([group(*apart)], rule())
    for step in range(3):
        give([stack], step)
        for one, gradient in zip(apart, stack.grad, strict=True):  # type: ignore[arg-type]
            one.grad = gradient.clone()
        made.step()
        reference.step()
    torch.testing.assert_close(stack.detach(), torch.stack([one.detach() for one in apart]), rtol=1e-5, atol=1e-5)


class Fused(nn.Module):
    """Queries, keys and values in one weight."""

    def __init__(self, rows: tuple[int, ...]) -> None:
        super().__init__()
        self.qkv, self.rows = drawn(sum(rows), 12), rows

    def fused_rows(self) -> dict[str, tuple[int, ...]]:
        return {"qkv": self.rows}


def test_a_fused_weight_is_split_by_its_declared_rows() -> None:
    module = Fused((8, 4, 4))
    apart = [nn.Parameter(one.detach().clone()) for one in module.qkv.split(module.rows)]
    fused = fused_rows(fakes.part_model(module))
    made = MatrixOptimizer([group(module.qkv)], rule(scale="spectral"), fused=fused)
    reference = MatrixOptimizer([group(*apart)], rule(scale="spectral"))
    for step in range(3):
        give([module.qkv], step)
        for one, gradient in zip(apart, module.qkv.grad.split(module.rows), strict=True):  # type: ignore[union-attr]
            one.grad = gradient.clone()
        made.step()
        reference.step()
    torch.testing.assert_close(module.qkv.detach(), torch.cat([one.detach() for one in apart]), rtol=1e-5, atol=1e-5)


def test_rows_that_are_not_the_parameters_are_refused() -> None:
    module = Fused((8, 4))
    module.rows = (8, 5)
    with pytest.raises(Exception, match=r"fused_rows\(\) gives \(8, 5\) for 'qkv', which has 12 rows"):
        fused_rows(fakes.part_model(module))


def test_hidden_matrices_are_muons_and_the_rest_is_adamws() -> None:
    part, twin = (fakes.decoder(tied=False, qk_norm=True, bias=True) for _ in range(2))
    made = optimizer(part, lr=0.01, adamw=ForTheRest(lr=0.003, betas=(0.8, 0.9), weight_decay=0.2))
    kinds = {id(p): "momentum" in g for g in made.param_groups for p in g["params"]}
    for name, parameter in part.named_parameters():
        assert kinds[id(parameter)] == (parameter.ndim == 2 and name not in ("embedding.weight", "head.weight")), name
    assert "momentum" in made.param_groups[0], "whose learning rate is logged"
    names = [name for name, p in part.named_parameters() if not kinds[id(p)]]
    ours, theirs = (dict(one.named_parameters()) for one in (part, twin))
    reference = torch.optim.AdamW(
        [{"params": [theirs[name]], "weight_decay": 0.2 if name == "head.weight" else 0.0} for name in names],
        lr=0.003,
        betas=(0.8, 0.9),
        fused=True,
    )
    for step in range(3):
        give(list(ours.values()), step)
        for name, parameter in ours.items():
            theirs[name].grad = parameter.grad
        made.step()
        reference.step()
    for name in names:
        assert torch.equal(ours[name], theirs[name]), name


def test_patterns_move_matrices_to_adamw_and_change_rates() -> None:
    part = fakes.decoder()
    rest = ForTheRest(lr=0.003, match=("layers.*.attention.q.weight",))
    made = optimizer(part, lr=0.01, adamw=rest, groups=(ParameterGroup(match="layers.1.*", lr=0.5),))
    settings = {id(p): g for g in made.param_groups for p in g["params"]}
    first, second = (part.get_submodule(f"layers.{index}.attention") for index in (0, 1))
    assert settings[id(first.q.weight)]["lr"] == 0.003
    assert "betas" in settings[id(first.q.weight)]
    assert settings[id(second.q.weight)]["lr"] == 0.0015
    assert settings[id(second.k.weight)]["lr"] == 0.005
    with pytest.raises(ConfigError, match=r"muon\.adamw\.match: 'layers\.\*\.attn\.\*' matches no hidden matrix\."):
        optimizer(part, adamw=ForTheRest(match=("layers.*.attn.*",)))


def test_uninitialised_memory_does_not_reach_the_weights() -> None:
    part, twin = fakes.decoder(), fakes.decoder()
    results = []
    for one, poisoned in ((part, False), (twin, True)):
        made = optimizer(one, lr=0.01)
        try:
            torch.use_deterministic_algorithms(poisoned)
            for step in range(2):
                give(list(one.parameters()), step)
                made.step()
        finally:
            torch.use_deterministic_algorithms(False)
        results.append([p.detach() for p in one.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all(bool(p.isfinite().all()) for p in results[1])


def test_what_has_no_gradient_stays() -> None:
    moved, still = drawn(4, 8), drawn(4, 8)
    before = still.detach().clone()
    made = MatrixOptimizer([group(moved, still)], rule())
    give([moved], 0)
    made.step()
    assert torch.equal(still, before)
    assert not made.state[still]


def test_a_gradient_of_zeros_moves_nothing_but_by_decay() -> None:
    weight = drawn(4, 8)
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    MatrixOptimizer([group(weight)], rule(torch.bfloat16)).step()
    torch.testing.assert_close(weight.detach(), before * (1 - 0.02 * 0.1))


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("muon.lr=nan", "muon.lr: expected a finite number"),
        ("muon.lr=-0.1", "muon.lr: expected a number greater than 0"),
        ("muon.momentum=1.0", "muon.momentum: expected a number less than 1"),
        ("muon.weight_decay=-1", "muon.weight_decay: expected a number at least 0"),
        ("muon.steps=0", "muon.steps: expected a number at least 1"),
        ("muon.coefficients=quintc", "muon.coefficients: expected 'quintic' or 'polar_express'"),
        ("muon.adamw.eps=0", "muon.adamw.eps: expected a number greater than 0"),
        ("muon.adamw.lr=inf", "muon.adamw.lr: expected a finite number"),
        ('muon.groups=[{match="*", lr=0}]', "muon.groups.0.lr: expected a number greater than 0"),
    ],
)
def test_bad_hyper_parameters_are_refused(setting: str, says: str) -> None:
    from forge_train_tools.configuration.request import Request
    from forge_train_tools.configuration.setup import resolve

    with pytest.raises(ConfigError) as error:
        resolve(Request(plugins=("muon",), set=(setting,)), data=False)
    assert says in str(error.value)
