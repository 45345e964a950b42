"""State taken apart into JSON and tensors, and put together again; optimizers and random numbers among it."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from forge_train import Model, PluginError
from forge_train.checkpoint.state import (
    keep_rates,
    load_optimizer_state,
    optimizer_state,
    random_state,
    seed_everything,
    set_random_state,
)
from forge_train.store.tree import join, split

pytestmark = pytest.mark.unit


def round_trip(tree: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(split(tree, "x", tensors))
    return join(json.loads(text), tensors)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        {"a": [1, 2.5, "x", True, None], "b": {}},
        (1, (2, [3, ()])),
        {"betas": (0.9, 0.95), "nested": [{"t": (1,)}]},
        1 / 3,
        2**80,
        -0.0,
        float("inf"),
        random.Random(0).getstate(),
    ],
)
def test_json_comes_back_as_it_was(tree: Any) -> None:
    assert round_trip(tree) == tree
    assert repr(round_trip(tree)) == repr(tree)


def test_nan_comes_back() -> None:
    assert math.isnan(round_trip({"loss": float("nan")})["loss"])


def test_tensors_are_named_by_their_place() -> None:
    tensors: dict[str, torch.Tensor] = {}
    parameter = nn.Parameter(torch.ones(2))
    tree = split({"a": [parameter, {"b.c": torch.zeros(())}], "d": (torch.arange(3),)}, "plugins.mine", tensors)
    assert sorted(tensors) == ["plugins.mine.a.0", "plugins.mine.a.1.b.c", "plugins.mine.d.0"]
    assert not tensors["plugins.mine.a.0"].requires_grad
    back = join(json.loads(json.dumps(tree)), tensors)
    assert isinstance(back["d"], tuple)
    assert torch.equal(back["a"][0], torch.ones(2))


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"a": {1, 2}}, "The state 'x.a' holds a set; only tensors and JSON can be saved."),
        ({"a": [object()]}, "The state 'x.a.0' holds a object"),
        ({"a": np.float32(1)}, "The state 'x.a' holds a float32"),
        ({3: 1}, "The state 'x' has the key 3; keys must be strings"),
        ({"$tensor": 1}, "The state 'x' has the key '$tensor'"),
        ({"a": {"$tuple": []}}, "The state 'x.a' has the key '$tuple'"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "The state 'x.a.b' holds two tensors of that name"),
    ],
)
def test_what_can_not_be_saved_is_refused_by_name(tree: Any, says: str) -> None:
    with pytest.raises(PluginError) as caught:
        round_trip(tree)
    assert says in str(caught.value)


# -- optimizers -----------------------------------------------------------------------------------


def trained(cls: Any, steps: int, *, order: int = 1, **options: Any) -> tuple[Model, torch.optim.Optimizer]:
    """A model after some steps; `order` -1 gives the optimizer its parameters the other way round."""
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model = Model([part])
    groups = [{"params": [p], "lr": 0.1 * i} for i, p in enumerate(list(part.parameters()), start=1)]
    optimizer = cls(groups[::order], **options)
    for step in range(steps):
        torch.manual_seed(step)
        part(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_an_optimizer_goes_on_bit_for_bit_even_where_its_parameters_are_in_another_order(
    cls: Any, options: Any
) -> None:
    through, _ = trained(cls, 4, **options)
    model, optimizer = trained(cls, 2, **options)
    saved = round_trip(optimizer_state(optimizer, model))
    assert {name for group in saved["param_groups"] for name in group["params"]} == {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    }
    other, fresh = trained(cls, 0, order=-1, **options)
    with torch.no_grad():
        for (_, mine), (_, theirs) in zip(other.named_parameters(), model.named_parameters(), strict=True):
            mine.copy_(theirs)
    load_optimizer_state(fresh, other, saved)
    assert [group["lr"] for group in fresh.param_groups] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    for step in (2, 3):
        torch.manual_seed(step)
        other.parts[0](torch.randn(5, 3)).square().sum().backward()
        fresh.step()
        fresh.zero_grad()
    for (name, mine), (_, theirs) in zip(other.named_parameters(), through.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_state_keeps_the_dtype_it_was_saved_with() -> None:
    model, optimizer = trained(torch.optim.AdamW, 1)
    saved = optimizer_state(optimizer, model)
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"].to(torch.float64)
    fresh_model, fresh = trained(torch.optim.AdamW, 0)
    load_optimizer_state(fresh, fresh_model, saved)
    assert {state["exp_avg"].dtype for state in fresh.state.values()} == {torch.float64}


def test_settings_that_were_changed_on_purpose_are_kept() -> None:
    model, optimizer = trained(torch.optim.SGD, 2, momentum=0.9)
    saved = optimizer_state(optimizer, model)
    other, fresh = trained(torch.optim.SGD, 0, momentum=0.5)
    for group in fresh.param_groups:
        group["lr"] = 7.0
    load_optimizer_state(fresh, other, saved, keep_settings=True)
    assert {(group["lr"], group["momentum"]) for group in fresh.param_groups} == {(7.0, 0.5)}
    assert fresh.state[fresh.param_groups[0]["params"][0]]["momentum_buffer"].abs().sum() > 0


def test_a_schedule_goes_on_from_its_place_with_rates_that_were_changed() -> None:
    def scheduled(lr: float) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))

    old, schedule = scheduled(1.0)
    for _ in range(3):
        old.step()
        schedule.step()
    saved = {"param_groups": [dict(group) for group in old.param_groups]}
    new, fresh = scheduled(8.0)
    fresh.load_state_dict(schedule.state_dict())
    keep_rates(new, fresh, saved)
    rates = []
    for _ in range(3):
        rates.append(new.param_groups[0]["lr"])
        new.step()
        fresh.step()
    assert rates == pytest.approx([8 / 4, 8 / 5, 8 / 6])


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    model, optimizer = trained(torch.optim.SGD, 0)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(1)))
    with pytest.raises(PluginError, match="holds a parameter twice, or one that is not the model's"):
        optimizer_state(optimizer, model)


# -- random numbers -------------------------------------------------------------------------------


def draw() -> tuple[float, float, float]:
    return random.random(), float(torch.rand(())), float(np.random.rand())


def test_every_generator_goes_on_where_it_was() -> None:
    seed_everything(3, 0)
    draw()
    random.gauss(0, 1)
    np.random.randn()
    saved = round_trip(random_state())
    expected = [draw(), draw()]
    seed_everything(4, 0)
    draw()
    set_random_state(saved)
    assert [draw(), draw()] == expected


def test_ranks_have_other_random_numbers_and_the_same_seed_the_same() -> None:
    drawn = []
    for rank in (0, 1, 0):
        seed_everything(2**63 - 2, rank)
        drawn.append(draw())
    assert drawn[0] == drawn[2]
    assert all(a != b for a, b in zip(drawn[0], drawn[1], strict=True))
