"""The name under which a module is being called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from forge_train.contract.model import Model

from .modules import named_modules


class Called:
    """Knows by which of its names a module is called that several layers share: by the layer that was called last.

    Args:
        model: composed.
        names: of the modules that will be asked about.
    """

    def __init__(self, model: Model, names: Iterable[str]) -> None:
        modules = named_modules(model)
        self._names: dict[int, str] = {}
        aliases: dict[int, list[str]] = {}
        for name, module in modules.items():
            self._names.setdefault(id(module), name)
            aliases.setdefault(id(module), []).append(name)
        asked = {id(modules[name]) for name in names}
        self._handles: list[Any] = []
        for number, several in aliases.items():
            for name in several if number in asked and len(several) > 1 else ():
                if (parent := modules.get(name.rpartition(".")[0])) is not None:
                    self._handles.append(parent.register_forward_pre_hook(_Enter(self._names, number, name)))

    def name(self, module: nn.Module) -> str:
        """Its name now."""
        return self._names[id(module)]

    def close(self) -> None:
        """Take the hooks off the modules."""
        for handle in self._handles:
            handle.remove()


class _Enter:
    """A layer is called, and with it the module that it shares."""

    def __init__(self, names: dict[int, str], module: int, name: str) -> None:
        self._names, self._module, self._name = names, module, name

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._names[self._module] = self._name
