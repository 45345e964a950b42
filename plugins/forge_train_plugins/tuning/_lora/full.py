"""Modules that a folder holds in full (`modules_to_save`): trained copies, which stand in for the base's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_train import ConfigError, Init
from forge_train.mesh.tensors import local
from forge_train_kit.hf.start import exported, same_modules
from forge_train_kit.specialisation import Specialisation

from .layers import Adapted, standing_in
from .targets import FULL

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train_kit.state_map import View

    from .folder import Folder


class Full(Adapted):
    """A module that computes with copies of its parameters; without updates, with the base's."""

    lora_fixed, lora_scales, lr_factors = {}, {}, {}

    def updates_are_zero(self) -> bool:
        held = {name: local(one) for name, one in self._parameters.items() if one is not None}
        return all(torch.equal(one, held[name.removeprefix(FULL)]) for name, one in held.items() if name in self.copies)

    @property
    def copies(self) -> Mapping[str, Init]:
        """Name of each → its initial values."""
        return self.lora_initial

    def forward(self, *args: Any, **more: Any) -> Any:
        if not self.updates_on:
            return super().forward(*args, **more)
        held = {**self._parameters, **{name.removeprefix(FULL): getattr(self, name) for name in self.copies}}
        return super(Full, standing_in(self, held)).forward(*args, **more)


_full = Specialisation(lambda _: Full)
_with_roles = Specialisation(lambda own, more: {"roles": property(lambda self: {**own.roles.fget(self), **dict(more)})})


def in_full(folder: Folder, job: Job, stored: Mapping[str, View]) -> dict[str, str]:
    """Module → its name in a folder that holds it in full.

    Args:
        folder: of PEFT.
        job: the run's.
        stored: parameters of the model, without updates.

    Raises:
        ConfigError: for a module of the model that the folder names, and has no tensors of.
    """
    layout = exported(job) if folder.saved else None
    if layout is None:
        return {}
    there = same_modules(layout, stored)
    held = {name.rpartition(".")[0] for name in folder.full}
    if lost := next((theirs for theirs in there.values() if folder.saves(theirs) and theirs not in held), ""):
        raise ConfigError(
            f"{folder.key}: {folder.tensors} has no tensors of {lost!r}, which adapter_config.json names in "
            "modules_to_save.",
            key=folder.key,
        )
    return {own: theirs for own, theirs in there.items() if theirs in held}


def train_copies(part: nn.Module, names: Mapping[str, str], folder: Folder, updated: Collection[str]) -> dict[str, str]:
    """Train modules in full that begin as a folder has them, on the meta device; gives copy → its name in the folder.

    Args:
        part: of the model.
        names: module → its name in the folder.
        folder: of PEFT.
        updated: modules that have an update.

    Raises:
        ConfigError: for a tied module, for one that has an update, too, and for tensors of another shape.
    """
    same: dict[int, list[str]] = {}
    for name, one in part.named_parameters(remove_duplicate=False):
        same.setdefault(id(one), []).append(name)
    made: dict[str, str] = {}
    for name, theirs in names.items():
        module: Any = part.get_submodule(name)
        if name in updated:
            raise ConfigError(
                f"{folder.key}: {folder.path} has {theirs!r} in full, and an update of it.", key=folder.key
            )
        own = {key: one for key, one in module._parameters.items() if one is not None}
        if tied := next((same[id(one)] for one in own.values() if len(same[id(one)]) > 1), None):
            raise ConfigError(
                f"{folder.key}: {folder.path} has {theirs!r} in full, and {' and '.join(map(repr, tied))} are tied in "
                "this model. Untie them.",
                key=folder.key,
            )
        for key, one in own.items():
            copy = nn.Parameter(torch.empty_like(one, device="meta"))
            module.register_parameter(f"{FULL}{key}", copy)
        module.lora_initial = {
            f"{FULL}{key}": Init("given", values=partial(_read, folder, f"{theirs}.{key}", f"{name}.{key}", one.shape))
            for key, one in own.items()
        }
        _full(module)
        made |= {f"{name}.{FULL}{key}": f"{theirs}.{key}" for key in own}
    roles = getattr(part, "roles", {})
    if more := tuple((one, roles[first]) for one in made if (first := one.replace(FULL, "")) in roles):
        _with_roles(part, more)
    return made


def _read(folder: Folder, name: str, own: str, shape: torch.Size, _: int) -> Tensor:
    found = folder.read_full(name)
    if found.shape != shape:
        sizes = [" × ".join(map(str, one)) for one in (found.shape, shape)]
        raise ConfigError(
            f"{folder.key}: {folder.path} holds {name!r} of {sizes[0]}, but {own!r} has {sizes[1]}. If rows of added "
            "tokens are missing, name these tokens in tokenizer.add; else it is an adapter of another model.",
            key=folder.key,
        )
    return found
