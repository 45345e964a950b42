"""A schedule put where its learning rate is highest, so that few steps show what the optimizer does."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor

from forge_train.contract.protocols import Schedule

PATIENCE = 1000
"""Steps without a higher learning rate after which the highest is taken for the peak."""


def to_peak(schedule: Schedule, optimizer: torch.optim.Optimizer, steps: int) -> int:
    """Advance a fresh schedule to its peak: to before the step, of a run of `steps`, that has the highest learning
    rate. Returns the number of steps that are skipped."""
    state = copy.deepcopy(schedule.state_dict())
    groups = [{key: _copied(value) for key, value in group.items() if key != "params"} for group in _groups(optimizer)]
    peak, highest = 0, _rate(optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        for step in range(1, steps):
            schedule.step()
            if (rate := _rate(optimizer)) > highest:
                peak, highest = step, rate
            elif step - peak > PATIENCE and highest > 0:
                break
        schedule.load_state_dict(state)
        for group, before in zip(_groups(optimizer), groups, strict=True):
            _put_back(group, before)
        for _ in range(peak):
            schedule.step()
    return peak


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return optimizer.param_groups


def _rate(optimizer: torch.optim.Optimizer) -> float:
    return max(float(group["lr"]) for group in _groups(optimizer))


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _put_back(group: dict[str, Any], before: dict[str, Any]) -> None:
    for key, value in before.items():
        if isinstance(value, Tensor):
            group[key].copy_(value)
        else:
            group[key] = value
