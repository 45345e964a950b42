"""A model without the updates that an adapter adds to its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch
from torch import nn

if TYPE_CHECKING:
    from forge_train import Model


class Updated(Protocol):
    """A module with updates, of a plugin that has the fact `hf.switches`."""

    updates_on: bool
    """Its forward adds the updates. `without_updates` makes it False for a while."""

    def is_update(self, name: str) -> bool:
        """Return True for a parameter of the module's own that belongs to an update."""

    def updates_are_zero(self) -> bool:
        """Return True if the updates, as far as this rank has them, change nothing so far."""


@contextmanager
def without_updates(part: nn.Module) -> Iterator[None]:
    """Have a model compute what it did before it was adapted: without updates, in evaluation mode, without a graph."""
    modules = [*part.modules()]
    updated = [one for one in modules if _is_updated(one)]
    training = [one for one in modules if one.training]
    for one in updated:
        one.updates_on = False
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for one in updated:
            one.updates_on = True
        for module in training:
            module.training = True


def updated_already(model: Model) -> list[str]:
    """Names of the modules whose updates change something: before the first step, those of a tuned model."""
    return [name for name, one in model.named_modules() if _is_updated(one) and not one.updates_are_zero()]


def trained_beside(model: Model) -> list[str]:
    """Names of the trained parameters that belong to no update: without updates, the model changes with them."""
    return [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, one in module.named_parameters(recurse=False)
        if one.requires_grad and not (_is_updated(module) and module.is_update(name))
    ]


def _is_updated(module: object) -> TypeGuard[Updated]:
    return getattr(module, "updates_on", False)
