"""Trials of optimizers, schedules and loss scales."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from forge_train.base.format import format_list
from forge_train.checkpoint.state import load_optimizer_state, optimizer_state
from forge_train.contract.model import Model
from forge_train.plugin import hookspecs
from forge_train.store.tree import join, split

from ..bench import Bench, Trials, draw_gradients, same
from ..conformance import DoubtError, require


def optimizer_updates(bench: Bench) -> str:
    model = bench.model()
    optimizer = bench.answer("optimizer", model=model)
    require(isinstance(optimizer, torch.optim.Optimizer), f"expected an Optimizer, found {type(optimizer).__name__}")
    require(all(group.get("lr", 0) > 0 for group in optimizer.param_groups), "every group needs a positive `lr`")
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    require(len(held) == len(set(held)), "it holds a parameter twice")
    strangers = set(held) - {id(parameter) for parameter in model.parameters()}
    require(not strangers, f"it holds {len(strangers)} parameters that are not the model's")
    before = _weights(model)
    draw_gradients(model, 1)
    optimizer.step()
    after = _weights(model)
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.grad is not None}
    still = sorted(names[one] for one in held if one in names and torch.equal(before[names[one]], after[names[one]]))
    require(not still, f"a step leaves {format_list(still)} as it was")
    require(all(bool(torch.isfinite(weight).all()) for weight in after.values()), "a step gives weights not finite")
    left = sorted(n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held)
    if left:
        raise DoubtError(f"it leaves out {format_list(left)}, which requires a gradient")
    return f"{len(held)} parameters in {len(optimizer.param_groups)} groups"


def optimizer_leaves_out_idle(bench: Bench) -> None:
    model = bench.model()
    optimizer = bench.answer("optimizer", model=model)
    before = _weights(model)
    draw_gradients(model, 1, every=2)
    optimizer.step()
    idle = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    moved = [name for name in idle if not torch.equal(before[name], _weights(model)[name])]
    require(not moved, f"{format_list(moved)} moved without a gradient")


def optimizer_state_goes_round(bench: Bench) -> None:
    model, other = bench.model(), bench.model()
    optimizer = bench.answer("optimizer", model=model)
    for seed in range(2):
        draw_gradients(model, seed)
        optimizer.step()
    state = _saved(optimizer_state(optimizer, model))
    weights = _weights(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(weights[name])
    fresh = bench.answer("optimizer", model=other)
    load_optimizer_state(fresh, other, state)
    require(same(_saved(optimizer_state(fresh, other)), state), "its state is another one after it was loaded")
    for one, steps in ((model, optimizer), (other, fresh)):
        draw_gradients(one, 3)
        steps.step()
    require(same(_weights(model), _weights(other)), "the step after its state was loaded is not the same")


def _weights(model: Model) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _saved(state: Any) -> Any:
    """A state as it comes back from a checkpoint."""
    tensors: dict[str, Tensor] = {}
    rest = split(state, "state", tensors)
    return join(rest, {name: tensor.clone() for name, tensor in tensors.items()})


def schedule_runs_to_the_end(bench: Bench) -> str:
    optimizer = hookspecs.optimizer(bench.model(), bench.job)
    schedule = bench.answer("lr_schedule", optimizer=optimizer)
    rates = []
    for _ in range(bench.job.steps):
        rates.append(_rate(optimizer))
        optimizer.step()
        schedule.step()
    wrong = [rate for rate in rates if not math.isfinite(rate) or rate < 0]
    require(not wrong, f"it sets a learning rate of {wrong[:1]}")
    require(any(rates), "the learning rate is 0 at every step")
    return " → ".join(f"{rate:.3g}" for rate in rates)


def schedule_state_goes_round(bench: Bench) -> None:
    model = bench.model()
    optimizer = hookspecs.optimizer(model, bench.job)
    schedule = bench.answer("lr_schedule", optimizer=optimizer)
    optimizer.step()
    schedule.step()
    state, settings = _saved(schedule.state_dict()), _saved(optimizer_state(optimizer, model))
    other_model = bench.model()
    other = hookspecs.optimizer(other_model, bench.job)
    fresh = bench.answer("lr_schedule", optimizer=other)
    load_optimizer_state(other, other_model, settings)
    fresh.load_state_dict(state)
    for _ in range(max(bench.job.steps - 1, 1)):
        require(
            _rate(other) == _rate(optimizer), f"after a resume it sets {_rate(other)} instead of {_rate(optimizer)}"
        )
        for steps, rates in ((optimizer, schedule), (other, fresh)):
            steps.step()
            rates.step()


def _rate(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def scale_adapts(bench: Bench) -> str:
    scale = bench.answer("loss_scale")
    seen = []
    for skipped in (False, True, False):
        value = float(scale.scale())
        require(math.isfinite(value) and value > 0, f"the scale is {value}")
        seen.append(value)
        scale.update(skipped)
    return " → ".join(f"{value:g}" for value in seen)


def scale_state_goes_round(bench: Bench) -> None:
    scale, fresh = bench.answer("loss_scale"), bench.answer("loss_scale")
    scale.update(True)
    scale.update(False)
    fresh.load_state_dict(_saved(scale.state_dict()))
    for skipped in (False, True, False):
        require(float(fresh.scale()) == float(scale.scale()), "after its state was loaded the scale is another one")
        scale.update(skipped)
        fresh.update(skipped)


TRIALS: Trials = {
    "optimizer": [
        ("updates the weights", optimizer_updates),
        ("leaves alone what has no gradient", optimizer_leaves_out_idle),
        ("its state goes round", optimizer_state_goes_round),
    ],
    "lr_schedule": [
        ("runs to the end", schedule_runs_to_the_end),
        ("its state goes round", schedule_state_goes_round),
    ],
    "loss_scale": [("adapts", scale_adapts), ("its state goes round", scale_state_goes_round)],
}
