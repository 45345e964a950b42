"""The learning rates of a run, without running it."""

from __future__ import annotations

from pathlib import Path

import torch

from forge_train.registry.setup import Setup

from .opening import lone_job


def learning_rates(setup: Setup) -> list[float]:
    """The learning rates at every step of the run, for a parameter group whose own learning rate is 1."""
    job = lone_job(setup, Path(), "cpu")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = setup.hooks.lr_schedule(optimizer)
    rates = []
    for _ in range(job.steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()  # torch's schedulers warn if it comes after theirs
        schedule.step()
    return rates
