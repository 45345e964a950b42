"""Names of plugins, and where a module lies, known without importing it; importing one that is a file."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


def canonical(name: str) -> str:
    """The one spelling of a plugin's name: `-` and `_` are equal."""
    return name.strip().replace("-", "_")


def locate(module: str) -> Path | None:
    """A module's file (a package's folder gives its `__init__.py`), found without importing its parents."""
    spec, rest = _top(module)
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin else None
    for root in spec.submodule_search_locations or ():
        path = Path(root, *rest)
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def _top(module: str) -> tuple[ModuleSpec | None, list[str]]:
    """The spec of the first part of a dotted name, and the other parts."""
    top, *rest = module.split(".")
    try:
        return _found(top, tuple(sys.path)), rest
    except (ImportError, ValueError):
        return None, rest


@lru_cache(maxsize=64)
def _found(top: str, path: tuple[str, ...]) -> ModuleSpec:
    """The spec of a module; what is not there may come, and is looked for again."""
    if (spec := importlib.util.find_spec(top)) is None:
        raise ModuleNotFoundError(top)
    return spec


def folder(package: str) -> Path | None:
    """A package's folder, found without importing anything."""
    spec, rest = _top(package)
    roots = (spec.submodule_search_locations if spec else None) or ()
    return next((path for root in roots if (path := Path(root, *rest)).is_dir()), None)


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def split(spec: str) -> tuple[str, str]:
    """A module, or the path of a file, and the class: of `package.module:Class`, `folder/file.py` and
    `folder/file.py:Class`. The class is empty where none is named."""
    found = re.fullmatch(r"(.*\.py)(?::(\w*))?", spec)
    module, _, name = spec.partition(":")
    return (found[1], found[2] or "") if found else (module, name)


def is_file(spec: str) -> bool:
    """Return True if a plugin is named by its file's path."""
    return split(spec)[0].endswith(".py")


def file_module(path: str) -> str:
    """The name of the module that a file becomes: no other file's, and no installed module's."""
    import hashlib  # a listing does without

    return f"forge_train_file_{hashlib.sha256(path.encode()).hexdigest()[:8]}_{Path(path).stem}"


def import_module(spec: str) -> ModuleType:
    """Import the module of `package.module:Class`, or the file of `/folder/file.py:Class`.

    What lies beside the file can be imported by it, unless an installed module has the same name.
    """
    where = split(spec)[0]
    if not is_file(spec):
        return importlib.import_module(where)
    name = file_module(where)
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, where)
    if found is None or found.loader is None:
        raise ImportError(f"{where} can't be imported")
    if (beside := str(Path(where).parent)) not in sys.path:
        sys.path.append(beside)  # last, so that it hides nothing
    module = sys.modules[name] = importlib.util.module_from_spec(found)  # dataclasses look their module up
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[dict[str, str], Callable[[str], Any], Callable[[], list[str]]]:
    """Prepare a package whose public names are imported on first use.

    Args:
        package: its `__name__`.
        homes: module inside the package → the names defined there, separated by spaces.

    Returns:
        name → module, and the package's `__getattr__` and `__dir__`.
    """
    where = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{where[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    return where, get, lambda: sorted({*vars(sys.modules[package]), *where})


# -- plugins that could be enabled, and places of hooks --------------------------------------------------------------


@dataclass(frozen=True)
class PluginRef:
    """A plugin that could be enabled. Nothing of it has been imported."""

    name: str
    """Canonical: `-` is written `_`."""
    distribution: str
    version: str
    object: str
    """`package.module:Class` or `/folder/file.py:Class`; without the class where the only plugin there is meant."""

    @property
    def module(self) -> str:
        """The module's name, once it is imported."""
        module = split(self.object)[0]
        return file_module(module) if is_file(self.object) else module

    @property
    def label(self) -> str:
        """`'fp8' (forge-train 0.1.0)`, for messages."""
        return f"{self.name!r} ({self.distribution} {self.version})".replace(" )", ")")

    @property
    def file(self) -> Path | None:
        """The module's source file, found without importing anything of it."""
        return Path(split(self.object)[0]) if is_file(self.object) else locate(self.module)


class HookOrigin(str):
    """A plugin, its hook and the place of its implementation in words; it also knows the names of both."""

    plugin: str
    hook: str

    def __new__(cls, text: str, plugin: str = "", hook: str = "") -> HookOrigin:  # copies are made of the text alone
        made = super().__new__(cls, text)
        made.plugin, made.hook = plugin, hook
        return made
