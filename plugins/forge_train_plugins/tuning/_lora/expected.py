"""Checks that patterns and folders fit a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from forge_train import ConfigError
from forge_train.base.errors import nearest
from forge_train.base.format import format_list

from .folder import Folder
from .targets import Target

if TYPE_CHECKING:
    from ..lora import LoRA


def expect_matches(config: LoRA.Config, found: Iterable[str], adapted: Iterable[str], modules: Iterable[str]) -> None:
    """Raise ConfigError for a pattern that matches nothing.

    Args:
        config: the section.
        found: weights that can have an update, of all stages.
        adapted: those that have one.
        modules: all modules.
    """
    given: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
        "lora.modules": (config.modules, [*found]),
        "lora.groups": ([group.match for group in config.groups], [*adapted]),
        "lora.tune": (config.tune, [*modules]),
    }
    for key, (patterns, names) in given.items():
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                ends = sorted({f"*.{name.rpartition('.')[2]}" if "." in name else name for name in names})
                hint = nearest(pattern, [*ends, *_middles(names), *names]) or f" There are {format_list(ends)}."
                what = "no module" if key == "lora.tune" else "nothing that lora adapts"
                raise ConfigError(f"{key}: {pattern!r} matches {what}.{hint}", key=key)


def _middles(names: Iterable[str]) -> set[str]:
    """Patterns of the parts within names, such as `*.attention.*`."""
    return {f"*.{part}.*" for name in names for part in name.split(".")[1:-1] if not part.isdecimal()}


def expect_places(folders: Iterable[Folder], placed: Iterable[Mapping[str, set[str]]]) -> None:
    """Raise ConfigError for a module of a folder without a place.

    Args:
        folders: those that the run reads.
        placed: folder → its modules that have a place, of each stage.
    """
    stages = [*placed]
    for folder in folders:
        there = {key for one in stages for key in one.get(str(folder.path), ())}
        if lost := sorted({*folder.modules, *folder.full} - there):
            without = "which this model has no place for"
            if folder.key == "lora.beneath":
                without += ", or no update of the run's own (lora.modules)"
            raise ConfigError(f"{folder.key}: {folder.path} updates {format_list(lost)}, {without}.", key=folder.key)


def expect_untied(part: nn.Module, taken: Sequence[Target]) -> None:
    """Raise ConfigError for a weight that has another name too."""
    names: dict[int, list[str]] = {}
    for name, one in part.named_parameters(remove_duplicate=False):
        names.setdefault(id(one), []).append(name)
    for target in taken:
        own = f"{target.name}.weight"
        if other := next((one for one in names[id(target.weight)] if one != own and not target.is_stack), ""):
            raise ConfigError(
                f"lora.modules: {own!r} is tied to {other!r}, so an update of one can't be merged into it without "
                "changing the other. Leave it out, or untie them.",
                key="lora.modules",
            )
