"""Optimizer state that is kept between steps in fewer bits than the optimizer computes in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_train.base.errors import ConfigError
from forge_train.mesh.tensors import local

from ..sections import StateDtype, StateDtypes
from .matrices import Box, full_box, stacked
from .quantised import Codes, Rows, fits
from .stochastic import places_of, rounded, rounded_at, shards

if TYPE_CHECKING:
    from forge_train.contract.model import Model
    from forge_train.plugin.job import Job

AT_REST = "parameter_dtype"
"""The slot for transforms that narrow parameters."""
MASTER, TIMES = "master", "roundings"
"""Keys of the state: the fp32 copy of a parameter; how often the parameter or its state was rounded."""
BITS: Mapping[StateDtype, int] = {"fp32": 32, "bf16": 16, "8bit": 8, "4bit": 4}


def at_rest(
    model: Model, job: Job, dtypes: StateDtypes, *, first: Sequence[str] = (), second: Sequence[str] = ()
) -> AtRest:
    """Return an `AtRest` that stores an optimizer's state in these dtypes; see `AtRest.idle`.

    Args:
        model: the model that it updates; parameters in bf16 are still updated in fp32.
        job: its run, whose seed determines the rounding.
        dtypes: from the user's section.
        first: keys of its state for the running mean of gradients.
        second: the same for their squares.

    Raises:
        ConfigError: for an option that has no effect, or one that makes updates explode.
    """
    key = f"{job.hooks.provider('optimizer')}.state"
    for moment, dtype, keys in (("first", dtypes.first, first), ("second", dtypes.second, second)):
        if dtype != "fp32" and not keys:
            raise ConfigError(f"{key}.{moment}: this optimizer has no {moment} moment.", key=f"{key}.{moment}")
    if second and BITS[dtypes.first] <= 8 and BITS[dtypes.second] > BITS[dtypes.first]:
        raise ConfigError(
            f"{key}.first: {dtypes.first!r} rounds some small means up, and a second moment in {dtypes.second!r} would "
            f"make large steps of them. Set {key}.second to {dtypes.first!r} as well.",
            key=f"{key}.first",
        )
    parameters_narrow = any(AT_REST in enabled.cls.provides for enabled in job.hooks.enabled.values())
    if not dtypes.masters and not parameters_narrow:
        text = f"has no effect: all parameters are fp32, since no enabled plugin provides {AT_REST!r}."
        raise ConfigError(f"{key}.masters: {text}", key=f"{key}.masters")
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    narrow = any(parameter.requires_grad and parameter.dtype is torch.bfloat16 for parameter in names)
    formats = {**dict.fromkeys(first, (dtypes.first, True)), **dict.fromkeys(second, (dtypes.second, False))}
    idle = dtypes.first == dtypes.second == "fp32" and not narrow
    return AtRest(names, formats, masters=dtypes.masters, seed=job.seed, idle=idle)


class AtRest:
    """Widens the state of a parameter for a step, and narrows it again.

    Random bits are a function of the seed, the parameter's name, the step's number and the element's place, so layouts
    and resumed runs round alike. For a state `exp_avg` in 8 bits, codes are stored under its own key and scales as
    `exp_avg_8bit`.

    Args:
        names: of the parameters.
        formats: key of the state → its dtype, and whether it is signed.
        masters: whether fp32 copies of bf16 parameters are kept.
        seed: the run's.
        idle: whether nothing is narrow; an optimizer then needs this only to continue from a narrow state.
    """

    def __init__(
        self,
        names: Mapping[Tensor, str],
        formats: Mapping[str, tuple[StateDtype, bool]],
        *,
        masters: bool,
        seed: int,
        idle: bool = False,
    ) -> None:
        self._names, self._formats, self.masters, self._seed, self.idle = names, formats, masters, seed, idle
        self._codes = {(bits, signed): Codes(bits, signed=signed) for bits in (8, 4) for signed in (True, False)}

    def widen(self, state: dict[str, Any], parameter: Tensor) -> None:
        """Make a parameter's state fp32, whatever dtype it was saved in."""
        for key, (_, signed) in self._formats.items():
            if key not in state:
                continue
            for bits in (8, 4):
                if (scales := state.pop(f"{key}_{bits}bit", None)) is not None:
                    state[key] = self._codes[bits, signed].widened(state[key], scales, parameter)
            state[key] = state[key].float()

    def widen_once(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer that keeps everything in fp32 continue from a checkpoint with a narrow state."""

        first = True

        def widen(*_: object) -> None:
            # The hook is not removed here: torch is walking over the dictionary of hooks.
            nonlocal first
            if not first:
                return
            first = False
            for parameter in self._names:
                if (state := optimizer.state.get(parameter)) and TIMES in state:
                    self.widen(state, parameter)
                    del state[TIMES]
                    if MASTER in state:
                        parameter.data.copy_(state.pop(MASTER))

        optimizer.register_step_pre_hook(widen)

    def narrow(self, state: dict[str, Any], parameter: Tensor) -> tuple[object, ...]:
        """Round a parameter's state; returns the key of this step's random bits."""
        random = (self._seed, self._names[parameter], state.setdefault(TIMES, 0))
        state[TIMES] += 1
        for key, (dtype, signed) in self._formats.items():
            if dtype == "fp32" or key not in state:
                continue
            if dtype == "bf16":
                state[key] = rounded(state[key], *random, key)
            elif fits(parameter.shape):
                codes = self._codes[BITS[dtype], signed]
                state[key], state[f"{key}_{dtype}"] = codes.quantised(state[key], *random, key)
        return random

    def weight(self, state: dict[str, Any], parameter: Tensor) -> Tensor:
        """The tensor that a step changes: a bf16 parameter's master, if there are masters, or the parameter itself."""
        if parameter.dtype is not torch.bfloat16 or not self.masters:
            return parameter
        if MASTER not in state:
            state[MASTER] = parameter.detach().float()
        master: Tensor = state[MASTER]
        return master

    def part(self, state: Mapping[str, Any], key: str, parameter: Tensor, box: Box, origin: Box) -> Tensor:
        """An fp32 copy of some rows `[stack, rows, columns]` of a state.

        Args:
            state: of the parameter, narrow.
            key: selects the tensor in it.
            parameter: the one that the state belongs to.
            box: the rows; all columns on this rank.
            origin: this rank's part of the parameter.
        """

        def rows_of(tensor: Any) -> Tensor:
            held = stacked(local(tensor))
            columns = (0, held.shape[-1])
            return Box(box.stack, box.rows, columns).of(held, Box(origin.stack, origin.rows, columns))

        found = [bits for bits in (8, 4) if f"{key}_{bits}bit" in state]
        if not found:
            return rows_of(state[key]).to(torch.float32, copy=True)
        codes, rows, size = self._codes[found[0], self._formats[key][1]], Rows.of(parameter), box.shape[-1]
        scales = rows.wide(rows_of(state[f"{key}_{codes.bits}bit"]), rows.start, size)
        return codes.values(codes.unpacked(rows_of(state[key]), size), scales)

    def rounded_part(self, wide: Tensor, parameter: Tensor, box: Box, random: tuple[object, ...]) -> Tensor:
        """fp32 → bf16, rounded like this part of the parameter in a step."""
        first = [start for start, _ in box.spans]
        places = places_of(box.shape, first, full_box(parameter.shape).shape, wide.device)
        return rounded_at(wide, places, *random)

    def opened(self, saved: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A `state_dict` for checkpoints: codes are stored one per byte, so that they are sharded like their parameter.

        Args:
            saved: as returned by torch.
            groups: of the optimizer.
        """
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        parameters = [parameter for group in groups for parameter in group["params"]]
        state = dict(saved["state"])
        for number, parameter in zip(numbers, parameters, strict=True):
            narrow = [key for key in self._formats if f"{key}_4bit" in state.get(number, ())]
            if narrow:
                state[number] = {
                    **state[number],
                    **{key: self._opened(state[number][key], parameter) for key in narrow},
                }
        return {**saved, "state": state}

    def _opened(self, codes: Any, parameter: Tensor) -> Tensor:
        return shards(self._codes[4, True].unpacked(local(codes), local(parameter).shape[-1]), parameter)
