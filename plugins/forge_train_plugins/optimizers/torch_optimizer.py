"""Any optimizer class, as an option."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any

from forge_train import ConfigError, Ge, Gt, Plugin, Problem, hookimpl, section
from forge_train_kit.sections import OptimizerSection, StateDtypes

if TYPE_CHECKING:
    import torch

    from forge_train import Job, Model

EXACT = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "SGD",
)
"""Classes of `torch.optim` that treat each weight by itself, and so give the same on any shard."""
OWN = {
    "lr": "set torch_optimizer.lr",
    "weight_decay": "set torch_optimizer.weight_decay",
    "params": "the parameters are the model's",
    "differentiable": "steps are not differentiated here",
    "capturable": "steps are not captured in graphs here",
}
"""Arguments that are not in `options`, and why."""


class TorchOptimizer(Plugin):
    """Any `torch.optim.Optimizer`, named as `module:Class`.

    Sharded parameters are for elementwise classes only: ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam,
    RMSprop and SGD of `torch.optim`.
    """

    api = (1, 0)
    facts = {"check.example": ("torch_optimizer.name=torch.optim:NAdam", "torch_optimizer.options.momentum_decay=0.01")}

    @section
    class Config(OptimizerSection):
        name: str
        """`module:Class`, such as `torch.optim:RAdam`."""
        lr: Annotated[float, Gt(0)] = 1e-3
        """Peak learning rate."""
        weight_decay: Annotated[float, Ge(0)] = 0.0
        """Of matrices, in the way of the class; norms and biases do not decay."""
        options: Mapping[str, Any] = field(default_factory=dict)
        """The other arguments of the class: `{ momentum = 0.9, nesterov = true }`."""
        state: StateDtypes = StateDtypes()
        """Dtypes of the state, and masters: of Adam, AdamW, Adamax, NAdam, RAdam, RMSprop and SGD of `torch.optim`."""

    config: Config

    @hookimpl
    def check_config(self) -> Iterator[Problem]:
        for name, value in self.config.options.items():
            key = f"torch_optimizer.options.{name}"
            if name in OWN:
                yield Problem(key, f"is not for options: {OWN[name]}.")
            elif not all(math.isfinite(one) for one in _numbers(value)):
                yield Problem(key, f"expected finite numbers, found {value!r}.")

    @hookimpl
    def optimizer(self, model: Model, job: Job) -> torch.optim.Optimizer:
        from forge_train_kit.optim import decay_groups, narrowed

        from ._torch_optimizer import MOMENTS, check_sharding, find, make, moments

        config = self.config
        cls = find(config.name)
        check_sharding(cls, config.name, model, EXACT)
        groups = decay_groups(model, job, config)
        made, known = make(cls, config.name, groups, config.options), moments(cls, config.options)
        if known is None:
            if config.state != StateDtypes():
                *most, last = MOMENTS
                text = f"is for {', '.join(most)} and {last} of torch.optim; moments of {config.name} are not known."
                raise ConfigError(f"torch_optimizer.state {text}", key="torch_optimizer.state")
            return made
        return narrowed(made, model, job, config.state, first=known[0], second=known[1])


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, (int, float)):
        yield value
