"""What `torch_optimizer` refuses, each in one sentence, and that options arrive."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fakes
from forge_train import ConfigError
from forge_train_kit.sections import StateDtypes
from forge_train_plugins.optimizers.torch_optimizer import TorchOptimizer

pytestmark = [pytest.mark.unit]


def optimizer(name: str, **values: Any) -> torch.optim.Optimizer:
    part = fakes.decoder()
    made: torch.optim.Optimizer = fakes.make(TorchOptimizer, name=name, **values).optimizer(
        fakes.part_model(part), fakes.job()
    )
    return made


def test_it_is_the_class_with_its_options() -> None:
    made = optimizer("torch.optim:Adam", lr=0.02, weight_decay=0.3, options={"betas": [0.7, 0.8], "amsgrad": True})
    assert type(made) is torch.optim.Adam
    assert {group["weight_decay"] for group in made.param_groups} == {0.0, 0.3}
    for group in made.param_groups:
        assert (group["lr"], group["betas"], group["amsgrad"]) == (0.02, (0.7, 0.8), True)


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("torch.optim.SGD", {}, "expected module:Class, found 'torch.optim.SGD'"),
        ("no_such_module:SGD", {}, "'no_such_module' can't be imported"),
        ("torch.optim:SDG", {}, "torch.optim has no such name: 'SDG'"),
        ("torch.optim:Optimizer.step", {}, "torch.optim has no such name"),
        ("torch:Tensor", {}, "expected a subclass of torch.optim.Optimizer; torch has .* Tensor"),
        ("torch.optim:LBFGS", {}, "needs a closure"),
        ("torch.optim:Optimizer", {}, "name: torch.optim:Optimizer is what optimizers are made from"),
        ("torch.optim:Adam", {"options": {"betas": [0.9]}}, "options: torch.optim:Adam refuses them: tuple index"),
        ("torch.optim:SparseAdam", {}, "takes sparse gradients only"),
        ("schedulefree:AdamWScheduleFree", {}, "use the plugin schedule_free"),
        ("torch.optim:SGD", {"options": {"momentun": 0.9}}, "takes no 'momentun'; it takes momentum, dampening"),
        ("torch.optim:SGD", {"options": {"momentum": -1}}, "refuses them: Invalid momentum value"),
        ("torch.optim:SGD", {"options": {"momentum": "much"}}, "torch.optim:SGD refuses them: "),
        (
            "torch.optim:Adagrad",
            {"state": StateDtypes(second="8bit")},
            "state is for .* moments of torch.optim:Adagrad",
        ),
        ("torch.optim:SGD", {"state": StateDtypes(first="8bit")}, "state.first: this optimizer has no first moment"),
        ("torch.optim:Rprop", {"weight_decay": 0.1}, "weight_decay: torch.optim:Rprop has no weight decay"),
    ],
)
def test_what_can_not_be_is_refused(name: str, values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        optimizer(name, **values)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"momentum": float("nan")}, "momentum"),
        ({"betas": [0.9, float("inf")]}, "betas"),
        ({"lr": 1.0}, "lr"),
        ({"differentiable": True}, "differentiable"),
    ],
)
def test_numbers_that_are_none_are_refused_before_anything_is_built(options: dict[str, Any], key: str) -> None:
    problems = list(fakes.make(TorchOptimizer, name="torch.optim:SGD", options=options).check_config())
    assert [problem.key for problem in problems] == [f"torch_optimizer.options.{key}"]
