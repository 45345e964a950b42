"""Optimizers that hold their state, and the parameters, in fewer bits than they compute in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from ..contract.state_dtypes import StateDtypes
from ..ground.errors import ConfigError, PluginError
from ..ground.tensors import local
from .stochastic import rounded

if TYPE_CHECKING:
    from ..contract.job import Job
    from ..contract.model import Model

AT_REST = "parameter_dtype"
"""The slot of transforms that make parameters narrow."""
ROOM = 1 << 24
"""Elements of parameters that are widened at a time."""
MASTER, TIMES = "master", "roundings"
"""Keys of the state: the fp32 copy of a parameter; how often the parameter or its state was rounded."""


def narrowed(
    optimizer: torch.optim.Optimizer,
    model: Model,
    job: Job,
    dtypes: StateDtypes,
    *,
    first: Sequence[str] = (),
    second: Sequence[str] = (),
) -> torch.optim.Optimizer:
    """An optimizer with its state at rest in these dtypes; the optimizer itself where nothing is narrow.

    Args:
        optimizer: of fp32 parameters as far as it knows. It keeps its state by parameter, not by group.
        model: whose parameters it updates; those in bf16 are updated in fp32 all the same.
        job: its run, whose seed the rounding depends on.
        dtypes: as the user's section says.
        first: keys of its state for the running mean of gradients.
        second: the same for their squares.

    Raises:
        ConfigError: for an option that has no effect.
    """
    key = f"{job.hooks.provider('optimizer')}.state"
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    narrow = any(parameter.requires_grad and parameter.dtype is torch.bfloat16 for parameter in names)
    for moment, dtype, keys in (("first", dtypes.first, first), ("second", dtypes.second, second)):
        if dtype != "fp32" and not keys:
            raise ConfigError(f"{key}.{moment}: this optimizer has no {moment} moment.", key=f"{key}.{moment}")
    at_rest = any(AT_REST in enabled.cls.provides for enabled in job.hooks.enabled.values())
    if not dtypes.masters and not at_rest:
        text = f"has no effect: all parameters are fp32, since no enabled plugin provides {AT_REST!r}."
        raise ConfigError(f"{key}.masters: {text}", key=f"{key}.masters")
    keys = [*(first if dtypes.first == "bf16" else ()), *(second if dtypes.second == "bf16" else ())]
    if not keys and not narrow:
        return optimizer
    return NarrowState(optimizer, names, keys, masters=dtypes.masters, seed=job.seed)


class NarrowState(torch.optim.Optimizer):
    """Takes another optimizer's steps in fp32, for a few parameters at a time.

    What is kept between steps is narrow: tensors of the state are rounded stochastically to bf16, and bf16 parameters
    are updated through fp32 masters, or by stochastic rounding. Random bits are a function of the seed, the name of the
    parameter, the number of the step and the place of the element: layouts and resumed runs round alike.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        names: Mapping[Tensor, str],
        keys: Sequence[str],
        *,
        masters: bool,
        seed: int,
    ) -> None:
        super().__init__(inner.param_groups, {})
        self._inner, self._names, self._keys = inner, names, keys
        self._masters, self._seed = masters, seed

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters in _few([p for p in group["params"] if p.grad is not None]):
                self._step(parameters, group)
        return loss

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
        for key in self._keys:
            if key in state:
                state[key] = state[key].float()
        if parameter.dtype is torch.float32:
            return parameter
        assert parameter.grad is not None
        wide: Tensor = state.pop(MASTER) if MASTER in state else parameter.detach().float()
        wide.grad = parameter.grad.float()
        return wide

    def _narrow(self, parameter: Tensor, wide: Tensor) -> None:
        state = self.state[parameter]
        key = (self._seed, self._names[parameter], state.setdefault(TIMES, 0))
        state[TIMES] += 1
        for name in self._keys:
            if name in state:
                state[name] = rounded(state[name], *key, name)
        if wide is parameter:
            return
        wide.grad = None
        if self._masters:
            state[MASTER] = wide
        parameter.copy_(wide if self._masters else rounded(wide, *key))


def _few(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """As many at a time as there is room for."""
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
