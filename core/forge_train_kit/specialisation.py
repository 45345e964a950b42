"""Changing how modules compute, in place."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from forge_train.base.errors import PluginError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Specialisation"]


class Specialisation:
    """Changes how modules compute by giving them a class of their own class's kind. The modules stay where they are,
    with their hooks, weights and names; those of one class get one new class, so that torch.compile compiles them once.

    Args:
        change: called with a module's class, and with what the call gives beside the module. Returns a class to put
            before the module's own, or attributes (`forward`, a property) that replace its own.
    """

    def __init__(self, change: Callable[..., type | Mapping[str, Any]]) -> None:
        self._change = change
        self._made: dict[tuple[Any, ...], type] = {}

    def __call__(self, module: nn.Module, *more: Hashable) -> None:
        """Change one module.

        Raises:
            PluginError: if the module has a `forward` of its own, which would hide the new class's.
        """
        own = type(module)
        if "forward" in vars(module):
            raise PluginError(
                f"A plugin has replaced the forward of one {own.__name__}; have it change its class, with "
                "forge_train_kit.specialisation."
            )
        if (own, *more) not in self._made:
            change = self._change(own, *more)
            bases, members = ((change, own), {}) if isinstance(change, type) else ((own,), change)
            named = {"__module__": own.__module__, "__doc__": own.__doc__}
            self._made[own, *more] = type(own.__name__, bases, {**named, **members})
        module.__class__ = self._made[own, *more]
