"""`adamw` and `lion` against their papers' formulas."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import schedulefree
import torch
from torch import nn

import fakes
from forge_train_kit.sections import ParameterGroup
from forge_train_plugins.optimizers._lion import SignMomentum
from forge_train_plugins.optimizers._schedule_free import ScheduleFreeAdamW, averaged
from forge_train_plugins.optimizers.adamw import AdamW
from forge_train_plugins.optimizers.lion import Lion
from forge_train_plugins.optimizers.schedule_free import ScheduleFree

pytestmark = pytest.mark.unit


def optimizer(plugin: type[Any], part: nn.Module, **values: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = fakes.make(plugin, **values).optimizer(fakes.part_model(part), fakes.job())
    return made


@pytest.mark.parametrize("plugin", [AdamW, Lion, ScheduleFree])
@pytest.mark.parametrize(("tied", "decay_embeddings"), [(False, False), (False, True), (True, False)])
def test_what_decays(plugin: type[Any], tied: bool, decay_embeddings: bool) -> None:
    part = fakes.decoder(tied=tied, qk_norm=True, bias=True, qkv_bias=True, o_bias=True)
    made = optimizer(plugin, part, weight_decay=0.3, decay_embeddings=decay_embeddings)
    decays = {id(p): group["weight_decay"] for group in made.param_groups for p in group["params"]}
    for name, parameter in part.named_parameters():
        exempt = parameter.ndim == 1 or (name == "embedding.weight" and not decay_embeddings)
        assert decays.pop(id(parameter)) == (0.0 if exempt else 0.3), name
    assert not decays


def test_adamw_is_the_papers_algorithm() -> None:
    part = fakes.decoder()
    made = optimizer(AdamW, part, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    weight = part.layers["0"].attention.q.weight
    theta, m, v = weight.detach().double(), 0.0, 0.0
    for t in range(1, 4):
        made.zero_grad()
        part.head(part(torch.arange(5)[None] + t)).square().mean().backward()
        g = weight.grad.double()
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        theta = theta - 0.01 * (m / (1 - 0.8**t) / ((v / (1 - 0.9**t)).sqrt() + 1e-6) + 0.1 * theta)
        made.step()
        torch.testing.assert_close(weight.detach().double(), theta, rtol=1e-5, atol=1e-5)
        theta = weight.detach().double()


def test_adamw_is_fused() -> None:
    assert all(group["fused"] for group in optimizer(AdamW, fakes.decoder()).param_groups)


def test_lion_is_the_papers_algorithm() -> None:
    weights = [nn.Parameter(torch.randn(4, 3, dtype=torch.float64)) for _ in range(2)]
    made = SignMomentum(weights, lr=0.05, betas=(0.9, 0.99), weight_decay=0.2)
    expected = [(w.detach().clone(), torch.zeros_like(w)) for w in weights]
    for seed in range(5):
        torch.manual_seed(seed)
        for index, weight in enumerate(weights):
            g = weight.grad = torch.randn_like(weight)
            theta, m = expected[index]
            update = (0.9 * m + 0.1 * g).sign()
            expected[index] = (theta - 0.05 * (update + 0.2 * theta), 0.99 * m + 0.01 * g)
        made.step()
        for weight, (theta, m) in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight.detach(), theta, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(made.state[weight]["momentum"], m, rtol=1e-12, atol=1e-12)


def test_lion_leaves_what_has_no_gradient() -> None:
    moved, still = (nn.Parameter(torch.ones(2)) for _ in range(2))
    moved.grad = torch.ones(2)
    SignMomentum([moved, still], lr=0.1, betas=(0.9, 0.99)).step()
    assert moved.tolist() == pytest.approx([0.9, 0.9])
    assert still.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("plugin", [AdamW, Lion, ScheduleFree])
def test_an_optimizer_continues_where_it_was_saved(plugin: type[Any]) -> None:
    def step(part: nn.Module, made: torch.optim.Optimizer, seed: int) -> None:
        made.zero_grad()
        part.head(part(torch.full((1, 4), seed))).square().mean().backward()  # type: ignore[operator]
        made.step()

    part = fakes.decoder()
    made = optimizer(plugin, part, lr=0.01)
    step(part, made, 1)
    resumed = fakes.decoder(seed=1)
    resumed.load_state_dict(part.state_dict())
    again = optimizer(plugin, resumed, lr=0.01)
    again.load_state_dict(copy.deepcopy(made.state_dict()))  # it takes the tensors over
    step(part, made, 2)
    step(resumed, again, 2)
    assert all(torch.equal(a, b) for a, b in zip(part.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("match", ["embedding.*", "head.weight"])
def test_a_tied_parameter_counts_once_and_matches_by_each_of_its_names(match: str) -> None:
    part = fakes.decoder(tied=True)
    made = optimizer(Lion, part, groups=(ParameterGroup(match=match, lr=2.0),))
    (group,) = (group for group in made.param_groups if "match" in group)
    assert len(group["params"]) == 1
    assert sum(len(group["params"]) for group in made.param_groups) == len(list(part.parameters()))


@pytest.mark.parametrize("warmup", [0, 3])
def test_schedule_free_is_the_papers_algorithm(warmup: int) -> None:
    """Its three sequences as the paper writes them, in double precision; ours keeps y and z alone."""
    weights = [nn.Parameter(torch.randn(4, 3, dtype=torch.float64)) for _ in range(2)]
    made = ScheduleFreeAdamW(weights, lr=0.05, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.2)
    schedule = fakes.make(ScheduleFree, warmup=warmup).lr_schedule(made)
    expected = [(w.detach().clone(), w.detach().clone(), 0.0) for w in weights]
    rates = []
    for t in range(1, 7):
        torch.manual_seed(t)
        rates.append(0.05 * min(1.0, t / max(warmup, 1)))
        share = rates[-1] ** 2 / sum(rate**2 for rate in rates)
        for index, weight in enumerate(weights):
            g = weight.grad = torch.randn_like(weight)
            x, z, v = expected[index]
            y = 0.1 * z + 0.9 * x
            v = 0.99 * v + 0.01 * g * g
            z = z - rates[-1] * (g / ((v / (1 - 0.99**t)).sqrt() + 1e-6) + 0.2 * y)
            expected[index] = ((1 - share) * x + share * z, z, v)
        made.step()
        schedule.step()
        for weight, (x, z, v) in zip(weights, expected, strict=True):
            torch.testing.assert_close(made.state[weight]["z"], z, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(made.state[weight]["exp_avg_sq"], v, rtol=1e-10, atol=1e-10)
            y = weight.detach().clone()
            torch.testing.assert_close(y, 0.1 * z + 0.9 * x, rtol=1e-10, atol=1e-10)
            with averaged(made, 0.9):
                torch.testing.assert_close(weight.detach(), x, rtol=1e-10, atol=1e-10)
            assert torch.equal(weight, y), "and it goes on where it was"


def test_schedule_free_is_the_authors_own() -> None:
    start = torch.randn(5, 3)
    mine, other = (nn.Parameter(start.clone()) for _ in range(2))
    settings: Any = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1}
    made, reference = (
        ScheduleFreeAdamW([mine], **settings),
        schedulefree.AdamWScheduleFree([other], warmup_steps=3, **settings),
    )
    schedule = fakes.make(ScheduleFree, warmup=3).lr_schedule(made)
    reference.train()
    for seed in range(8):
        torch.manual_seed(seed)
        mine.grad = torch.randn_like(mine)
        other.grad = mine.grad.clone()
        for one in (made, reference, schedule):
            one.step()
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    reference.eval()
    with averaged(made, 0.9):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_schedule_free_leaves_what_has_no_gradient_and_counts_its_steps_apart() -> None:
    late, still = (nn.Parameter(torch.ones(2)) for _ in range(2))
    early = nn.Parameter(torch.ones(2))
    made = ScheduleFreeAdamW([early, late, still], lr=0.1, betas=(0.9, 0.99))
    for step in range(3):
        early.grad = torch.ones(2)
        late.grad = torch.ones(2) if step else None
        made.step()
    assert still.tolist() == [1.0, 1.0]
    assert [made.state[p].get("step") for p in (early, late, still)] == [3, 2, None]
    with averaged(made, 0.9):
        assert still.tolist() == [1.0, 1.0]
