"""Optimizers that keep their state, and the parameters, in fewer bits than they compute in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_train.base.errors import PluginError
from forge_train.mesh.tensors import local

from ..sections import StateDtypes
from .at_rest import MASTER, AtRest, at_rest
from .stochastic import rounded
from .updating import UpdatingOptimizer

if TYPE_CHECKING:
    from forge_train.contract.model import Model
    from forge_train.plugin.job import Job

ROOM = 1 << 24
"""Number of parameter elements that are widened at a time."""


def narrowed(
    optimizer: torch.optim.Optimizer,
    model: Model,
    job: Job,
    dtypes: StateDtypes,
    *,
    first: Sequence[str] = (),
    second: Sequence[str] = (),
) -> torch.optim.Optimizer:
    """An optimizer that stores its state in these dtypes; the optimizer itself if none is narrow.

    Args:
        optimizer: treats all parameters as fp32. It must keep its state per parameter, not per group.
        model: whose parameters it updates; those in bf16 are updated in fp32 all the same.
        job: its run, whose seed the rounding depends on.
        dtypes: from the user's section.
        first: keys of its state for the running mean of gradients.
        second: the same for their squares.

    Raises:
        ConfigError: for an option that has no effect, or one that makes updates explode.
    """
    rest = at_rest(model, job, dtypes, first=first, second=second)
    if not rest.idle:
        return NarrowState(optimizer, rest)
    rest.widen_once(optimizer)
    return optimizer


class NarrowState(UpdatingOptimizer):
    """Takes another optimizer's steps in fp32, for a few parameters at a time.

    Between steps, everything is narrow (`AtRest`): tensors of the state are rounded stochastically, and bf16
    parameters are updated through fp32 masters, or by stochastic rounding.
    """

    def __init__(self, inner: torch.optim.Optimizer, at_rest: AtRest) -> None:
        super().__init__(inner.param_groups, {})
        self._inner, self.at_rest = inner, at_rest

    def state_dict(self) -> dict[str, Any]:
        return self.at_rest.opened(super().state_dict(), self.param_groups)

    def update(self) -> None:
        for group in self.param_groups:
            for parameters in _few([p for p in group["params"] if p.grad is not None]):
                self._step(parameters, group)

    def _step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        wide = {parameter: self._widened(parameter) for parameter in parameters}
        inner, settings = self._inner, {key: value for key, value in group.items() if key != "params"}
        inner.param_groups = [{**settings, "params": list(wide.values())}]
        inner.state = defaultdict(dict, {wide[p]: self.state[p] for p in parameters if self.state[p]})
        inner.step()
        changed = [
            key for key, value in inner.param_groups[0].items() if key != "params" and settings.get(key) is not value
        ]
        if changed:
            raise PluginError(
                f"{type(inner).__name__} keeps {changed[0]!r} in its groups; only state by parameter can be narrow."
            )
        for parameter in parameters:
            self.state[parameter] = inner.state[wide[parameter]]
            self._narrow(parameter, wide[parameter])
        inner.param_groups, inner.state = self.param_groups, self.state

    def _widened(self, parameter: Tensor) -> Tensor:
        """The parameter in fp32, with its gradient, and its state in fp32."""
        state = self.state[parameter]
        self.at_rest.widen(state, parameter)
        if parameter.dtype is torch.float32:
            return parameter
        assert parameter.grad is not None
        wide: Tensor = state.pop(MASTER) if MASTER in state else parameter.detach().float()
        wide.grad = parameter.grad.float()
        return wide

    def _narrow(self, parameter: Tensor, wide: Tensor) -> None:
        state = self.state[parameter]
        key = self.at_rest.narrow(state, parameter)
        if wide is parameter:
            return
        wide.grad = None
        if self.at_rest.masters:
            state[MASTER] = wide
        parameter.copy_(wide if self.at_rest.masters else rounded(wide, *key))


def _few(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of as many parameters as there is room for."""
    chunk: list[Tensor] = []
    room = ROOM
    for parameter in parameters:
        size = local(parameter).numel()
        if chunk and size > room:
            yield chunk
            chunk, room = [], ROOM
        chunk.append(parameter)
        room -= size
    if chunk:
        yield chunk
