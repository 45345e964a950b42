"""Updates in the backward pass are those of a step after it, and hold hardly any gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_train import ConfigError, Plugin, Update, hookimpl
from forge_train_plugins.optimizers.optimizer_in_backward import OptimizerInBackward
from forge_train_tools.testing import RunForge

pytestmark = [pytest.mark.unit]

FREE = {"train.clip_norm": 0, "train.micro_batch": 0}


class Held(Plugin):
    """The most elements of gradients that there are at once, of all elements."""

    api = (1, 0)

    @hookimpl
    def on_start(self, model: Any) -> None:
        self.most, self.parameters = 0, list(model.parameters())
        for parameter in self.parameters:
            parameter.register_hook(self.look)  # before this one's gradient is there

    def look(self, gradient: Tensor) -> None:
        held = sum(p.grad.numel() for p in self.parameters if p.grad is not None)
        self.most = max(self.most, held + gradient.numel())


OPTIMIZERS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "adamw": ([], {}),
    "groups": ([], {"adamw.groups": [{"match": "layers.0.*", "lr": 0.5}]}),
    "adamw in bf16": ([], {"adamw.state": {"first": "bf16", "second": "bf16"}}),
    "bf16 parameters": (["bf16_parameters"], {"train.precision": "bf16"}),
    "lion": (["lion"], {}),
    "schedule_free": (["schedule_free"], {}),
    "muon": (["muon"], {}),
    "sgd": (["torch_optimizer"], {"torch_optimizer.name": "torch.optim:SGD"}),
    "tied": ([], {"decoder.tied": True, "cross_entropy.chunk": 8}),
    "recomputed": (["ac"], {"ac.mode": "full"}),
    "experts": (["moe"], {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("plugins", "settings"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_is_the_step_after_it(run_forge: RunForge, plugins: list[str], settings: dict[str, Any]) -> None:
    plain = run_forge(plugins, {**FREE, **settings}, steps=4)
    fused = run_forge([*plugins, OptimizerInBackward], {**FREE, **settings}, steps=4)
    assert fused.losses == plain.losses
    for (name, mine), other in zip(fused.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, other), name
    mine, other = ([line["grad_norm"] for line in run.metrics] for run in (fused, plain))
    assert mine == pytest.approx(other, rel=1e-5)


def test_of_all_gradients_there_is_about_one(run_forge: RunForge) -> None:
    plain = run_forge([Held], FREE, steps=2).plugin("held")
    fused = run_forge([Held, OptimizerInBackward], FREE, steps=2).plugin("held")
    sizes = sorted(parameter.numel() for parameter in plain.parameters)
    assert plain.most == sum(sizes)
    assert fused.most <= sizes[-1] + sizes[-2]


def test_resumes_bit_for_bit(run_forge: RunForge, tmp_path: Path) -> None:
    whole = run_forge([OptimizerInBackward], FREE, steps=4, folder=tmp_path / "whole")
    run_forge([OptimizerInBackward], FREE, steps=4, folder=tmp_path / "parts", name="r", stop_at=2)
    resumed = run_forge([OptimizerInBackward], FREE, steps=4, folder=tmp_path / "parts", name="r")
    for mine, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other)


class Counting(torch.optim.SGD):
    """Counts its steps for all parameters together."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
        return super().step(closure)


class Looks(Plugin):
    """Wants to see gradients."""

    api = (1, 0)

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        pass


@pytest.mark.parametrize(
    ("plugins", "settings", "says"),
    [
        ([], {"train.clip_norm": 1.0}, "train.clip_norm: optimizer_in_backward knows no global norm"),
        (["pp"], {"parallel.pp": 2}, "parallel.pp: optimizer_in_backward is for one process; set this to 1."),
        ([], {"train.micro_batch": 1}, "train.micro_batch: optimizer_in_backward takes one micro-batch a step, on one"),
        ([], {"train.batch_warmup": [{"steps": 1, "global_batch": 1}]}, "train.batch_warmup: optimizer_in_backward"),
        (["skip_step"], {}, "skip_step has to see a step's gradients, and optimizer_in_backward keeps none."),
        ([Looks], {}, "looks has to see a step's gradients"),
        ([], {"train.precision": "fp16"}, "optimizer_in_backward can't leave a step out, as loss_scaler may have to."),
        (
            ["torch_optimizer"],
            {"torch_optimizer.name": f"{__name__}:Counting"},
            "Counting keeps 'taken' for all its parameters together",
        ),
    ],
)
def test_what_it_can_not_do_is_refused(
    run_forge: RunForge, plugins: list[Any], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        run_forge([*plugins, OptimizerInBackward], {**FREE, **settings}, steps=2)
    assert says in str(refused.value)
