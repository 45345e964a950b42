"""Modules by patterns, and the tensors in what they give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from forge_train.base.errors import ConfigError, nearest
from forge_train.contract.model import Model
from forge_train.plugin.job import Job


def named_modules(model: Model) -> dict[str, nn.Module]:
    """Every module by global name; one that several layers share, such as a rotary table, under each of its names."""
    found = {name: module for name, module in model.named_modules() if name}
    for part in sorted(model.parts, key=_has_head):
        found |= {name: module for name, module in part.named_modules(remove_duplicate=False) if name}
    return found


def _has_head(part: nn.Module) -> bool:
    return getattr(part, "head", None) is not None


def _cut(model: Model, job: Job) -> set[str]:
    """Modules that several parts of a pipeline have some of, and whose output this rank's parts do not give: the last
    part gives it."""
    mine = [[name for name, _ in part.named_modules(remove_duplicate=False)] for part in model.parts]
    counts = Counter(name for some in job.dist.gather_stages(mine) for names in some for name in names)
    last = {name for part, names in zip(model.parts, mine, strict=True) if _has_head(part) for name in names}
    return {name for name, count in counts.items() if count > 1} - last


def matched_modules(model: Model, job: Job, patterns: Sequence[str], key: str) -> dict[str, nn.Module]:
    """The modules of this rank's parts that patterns name, by global name.

    Every rank must call it: a pattern has to match on some stage of a pipeline, not on all.

    Args:
        model: composed.
        job: its job.
        patterns: as `fnmatch` takes them: `layers.*.attention`, where `*` stands for dots too.
        key: the configuration's key, for messages.

    Raises:
        ConfigError: for a pattern that matches nothing, or a module inside of what `torch.compile` has taken.
    """
    modules = named_modules(model)
    everywhere = list(dict.fromkeys(name for names in job.dist.gather_stages([*modules]) for name in names))
    for pattern in patterns:
        if not any(_matches(name, [pattern]) for name in everywhere):
            raise ConfigError(f"{key}: {pattern!r} matches no module.{nearest(pattern, everywhere)}", key=key)
    here = modules.keys() - _cut(model, job)
    found = {name: modules[name] for name in modules if name in here and _matches(name, patterns)}
    compiled = [name for name, one in modules.items() if one._compiled_call_impl is not None]
    for name in found:
        if unit := next((one for one in compiled if f"{name}.".startswith(f"{one}.")), ""):
            raise ConfigError(
                f"{key}: {name!r} is part of {unit!r}, which torch.compile has taken, so that its activations can't be "
                "seen without changing what is computed. Leave compilation out.",
                key=key,
            )
    return found


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def tensors_in(value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors in what a module gave, each with its place: empty, `[0]`, `[name]`."""
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, Mapping):
        yield from ((f"[{key}]{place}", one) for key, inner in value.items() for place, one in tensors_in(inner))
    elif isinstance(value, (tuple, list)):
        yield from ((f"[{at}]{place}", one) for at, inner in enumerate(value) for place, one in tensors_in(inner))
    elif is_dataclass(value) and not isinstance(value, type):
        named = ((field.name, getattr(value, field.name)) for field in fields(value))
        yield from ((f"[{name}]{place}", one) for name, inner in named for place, one in tensors_in(inner))
