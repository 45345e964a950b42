"""Precision rules applied to one part of the model."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from forge_train import Applied, ConfigError
from forge_train.base.errors import nearest
from forge_train.base.format import format_list
from forge_train_kit.model import dtype_borders
from forge_train_kit.specialisation import Specialisation

if TYPE_CHECKING:
    from forge_train import Job

    from .precision import DtypeRule

KEY = "precision.rules"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Rules:
    """Modules that compute in another dtype than the run, and the casts around them."""

    def __init__(self, rules: Sequence[DtypeRule], job: Job) -> None:
        self.rules, self.job = rules, job
        self._exact = {rule.match: rule.dtype for rule in rules}
        for match, count in Counter(rule.match for rule in rules).items():
            if count > 1:
                raise ConfigError(f"{KEY}: {count} rules for {match!r}. Leave one.", key=KEY)
        self._names: list[str] = []

    def apply(self, part: nn.Module) -> Applied:
        """Declare `compute_dtype`, and cast what goes in and comes out.

        Raises:
            ConfigError: for a rule that matches no module, and for two patterns that match one.
        """
        modules = {name: module for name, module in part.named_modules() if name}
        self._names += modules
        if self.job.dist.layout.pp == 1:
            self._expect_matches(self._names)
        matched = []
        for name, module in modules.items():
            if (dtype := self._dtype(name)) is not None:
                module.compute_dtype = dtype
                matched.append(name)
        heads = {name.rpartition(".")[0] for name, role in getattr(part, "roles", {}).items() if role == "head"}
        borders = dtype_borders(part, self.job.precision.param)
        for name, (own, around) in borders.items():
            modules[name].register_forward_pre_hook(_casts_inputs(own), with_kwargs=True)
            if name not in heads:
                modules[name].register_forward_hook(_casts_output(around))
        kinds = ", ".join(dict.fromkeys(str(own).removeprefix("torch.") for own, _ in borders.values()))
        return Applied(
            part, tuple(matched), f"{len(borders)} with a dtype of their own: {kinds}" if borders else "nothing else"
        )

    def judge(self) -> None:
        """Rules are judged over all stages of a pipeline.

        Raises:
            ConfigError: for a rule that matches no module.
        """
        if self.job.dist.layout.pp > 1:
            self._expect_matches(list(itertools.chain(*self.job.dist.gather_objects(self._names))))

    def _expect_matches(self, names: Sequence[str]) -> None:
        for rule in self.rules:
            if not any(fnmatchcase(name, rule.match) for name in names):
                hint = nearest(rule.match, names) or f" There are {format_list(names)}."
                raise ConfigError(f"{KEY}: {rule.match!r} matches no module.{hint}", key=KEY)
        for name in names:
            self._dtype(name)
        for rule in self.rules:
            if DTYPES[rule.dtype] is self.job.precision.param and not self._exempts(rule, names):
                raise ConfigError(
                    f"{KEY}: {rule.match!r} changes nothing: the run computes in {rule.dtype} already.", key=KEY
                )

    def _exempts(self, rule: DtypeRule, names: Sequence[str]) -> bool:
        """Return True if a rule for the run's own dtype exempts a module from other rules."""
        others = Rules([one for one in self.rules if one is not rule], self.job)
        inside = [name for name in names if f"{name}.".startswith(f"{rule.match}.")]
        try:
            return any(others._dtype(name) not in (None, self.job.precision.param) for name in inside)
        except ConfigError:  # of two patterns, which this rule settles
            return True

    def _dtype(self, name: str) -> torch.dtype | None:
        """Of a module, by the rules for it and for those around it."""
        for path in _inwards(name)[::-1]:
            if path in self._exact:
                return DTYPES[self._exact[path]]
        found = {
            rule.dtype: rule.match
            for rule in self.rules
            if any(fnmatchcase(path, rule.match) for path in _inwards(name))
        }
        if len(found) > 1:
            patterns = " and ".join(f"{match!r} ({dtype})" for dtype, match in found.items())
            raise ConfigError(f"{KEY}: {patterns} both match {name!r}. Name it in a rule of its own.", key=KEY)
        return DTYPES[next(iter(found))] if found else None


def _inwards(name: str) -> list[str]:
    """The module's name, after those of all around it."""
    return list(itertools.accumulate(name.split("."), lambda path, own: f"{path}.{own}"))


def narrow(part: nn.Module, dtype: torch.dtype, master: torch.dtype) -> Applied:
    """Have every module of a part compute with copies of its weights in `dtype`, or in its `compute_dtype`.

    The copy is a property of the module's class, under the parameter's name: recompute, compile and a loss that calls
    the head all find it, and `named_parameters()` still gives the master weights. (torch's own parametrizations do the
    same, but rename the parameters.)
    """
    matched, narrowed = [], Specialisation(lambda _, names, own: {name: _copy(name, own) for name in names})
    for name, module in part.named_modules():
        names = tuple(
            key for key, value in module._parameters.items() if value is not None and value.is_floating_point()
        )
        own = getattr(module, "compute_dtype", dtype)
        if names:
            matched.append(name)
        if names and own is not master:
            narrowed(module, names, own)
    part.register_forward_pre_hook(_casts_inputs(dtype), with_kwargs=True)
    says = f"{str(dtype).removeprefix('torch.')} from fp32 weights" if dtype is not master else "where rules say so"
    return Applied(part, matched=tuple(matched), note=says)


def _casts_inputs(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(_cast(value, dtype) for value in args), {k: _cast(value, dtype) for k, value in kwargs.items()}

    return cast


def _casts_output(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map(lambda value: _cast(value, dtype), output)

    return cast


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _copy(name: str, dtype: torch.dtype) -> property:
    def weight(self: nn.Module) -> Tensor | None:
        parameter = self._parameters[name]
        return None if parameter is None else parameter.to(dtype)

    return property(weight)
