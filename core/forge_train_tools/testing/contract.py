"""Checks of a plugin that need no training: of its module, its class, its section."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import inspect
import json
import subprocess
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

from forge_train.base.errors import ConfigError
from forge_train.base.names import PluginRef, split
from forge_train.plugin.calls import EnabledPlugin, implemented
from forge_train.plugin.plugin import API, Plugin
from forge_train.registry.declared import Specs
from forge_train.registry.discovery import load

from ..configuration.inspection import halved, malformed, misfits, undecorated, unknown
from ..configuration.known_facts import Facts
from .conformance import BrokenError, DoubtError, SkippedError, Trial, require
from .environment import LOCAL

SLOW = ("torch",)
"""Modules that importing a plugin must not load."""
HEAVY = ("numpy", "pydantic", "rich", "tensorboard", "tokenizers", "torchao", "transformers")
"""Modules that it had better not load."""


def imports(found: PluginRef) -> None:
    """Check that the module can be imported and defines a plugin class."""
    try:
        load(found)
    except ConfigError as error:
        if error.__cause__ is None:
            raise
        raise BrokenError("\n" + "".join(traceback.format_exception(error.__cause__)).rstrip()) from error


def imports_lazily(found: PluginRef) -> str | None:
    """Check that importing it in a fresh process does not load slow modules."""
    module = split(found.object)[0]
    if module.startswith(LOCAL) or found.module.rpartition(".")[2].startswith(("test_", "conftest", "__main__")):
        raise SkippedError("it is defined in a test")
    code = (
        "import json, sys; path, module, slow = json.loads(sys.argv[1]); sys.path[:] = path\n"
        "from forge_train.base.names import import_module; import_module(module)\n"
        "print('\\n' + json.dumps([name for name in slow if name in sys.modules]))"
    )
    argument = json.dumps([sys.path, module, [*SLOW, *HEAVY]])
    done = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True, check=False)
    require(done.returncode == 0, f"it fails in a fresh process: {done.stderr.strip().splitlines()[-1:]}")
    loaded = json.loads(done.stdout.splitlines()[-1])
    slow = [name for name in loaded if name in SLOW]
    require(not slow, f"importing {module} imports {', '.join(slow)}; import it inside the hook that uses it")
    if loaded:
        raise DoubtError(f"importing {module} imports {', '.join(loaded)}; import it inside the hook that uses it")
    return None


def trials(enabled: EnabledPlugin) -> Iterator[tuple[str, Trial]]:
    """The checks of the class."""
    cls, mistakes = enabled.cls, list[str]()
    specs = Specs(mistakes)
    specs.admit(enabled)
    yield "says what it is", lambda: _summary(cls)
    yield "says its plugin API", lambda: _api(enabled)
    yield "hooks exist", lambda: _hooks(enabled, specs, mistakes)
    yield "no hook is left undecorated", lambda: _undecorated(enabled, specs)
    yield "arguments fit the hooks", lambda: _none(misfits(enabled, specs))
    yield "metadata has the right form", lambda: _none(malformed(enabled, specs))
    yield "facts are declared", lambda: _none([*Facts().problems(enabled)])
    yield "state is saved and loaded", lambda: _state(enabled)
    yield "the section is strict", lambda: _section(cls)


def needs(enabled: EnabledPlugin) -> None:
    """Check that the modules in its `needs` are installed, and that one of its `devices` is available."""
    missing = {
        module: command
        for module, command in enabled.cls.needs.items()
        if importlib.util.find_spec(module.partition(".")[0]) is None
    }
    if missing:
        raise SkippedError("; ".join(f"{module} is missing: {command}" for module, command in sorted(missing.items())))
    if enabled.cls.devices and not device_for(enabled):
        raise SkippedError(f"it runs on {', '.join(enabled.cls.devices)} only, and there is none here")


def device_for(enabled: EnabledPlugin) -> str:
    """The type of device to try it on; empty where it runs on none that is here."""
    if not enabled.cls.devices:
        return "cpu"
    import torch

    here = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return next((device for device in enabled.cls.devices if here.get(device)), "")


def _summary(cls: type[Plugin]) -> str:
    if "__doc__" not in vars(cls) or not (cls.__doc__ or "").strip():
        raise DoubtError("the class has no docstring, whose first line `forge plugins list` shows")
    return inspect.cleandoc(cls.__doc__ or "").splitlines()[0]


def _api(enabled: EnabledPlugin) -> str:
    api: Any = enabled.cls.api
    require(
        isinstance(api, tuple) and len(api) == 2 and all(isinstance(number, int) for number in api),
        f"`api` must be (major, minor), found {api!r}",
    )
    if not any("api" in vars(cls) for cls in enabled.cls.__mro__ if cls is not Plugin):
        raise DoubtError(f"it has no `api`; say which plugin API it was written for: api = {API}")
    return f"{api[0]}.{api[1]}"


def _hooks(enabled: EnabledPlugin, specs: Specs, mistakes: list[str]) -> str:
    _none([*mistakes, *unknown(enabled, specs)])
    return ", ".join(sorted(implemented(enabled.cls)))


def _none(mistakes: list[str]) -> None:
    require(not mistakes, "\n".join(mistakes))


def _undecorated(enabled: EnabledPlugin, specs: Specs) -> None:
    _none(undecorated(enabled, specs))
    cls = enabled.cls
    own = {
        name
        for base in cls.__mro__
        if base not in (Plugin, object)
        for name, value in vars(base).items()
        if isinstance(value, types.FunctionType) and not name.startswith("_")
    } - implemented(cls)
    near = {name: difflib.get_close_matches(name, specs, n=1, cutoff=0.85) for name in sorted(own)}
    if alike := [f"{name} (meant is {close[0]}?)" for name, close in near.items() if close]:
        raise DoubtError(f"not marked with @hookimpl, and named much like a hook: {', '.join(alike)}")


def _state(enabled: EnabledPlugin) -> str:
    _none(halved(enabled))
    return "" if hasattr(enabled.cls, "state_dict") else "it has none"


def _section(cls: type[Plugin]) -> str:
    """Check that an unknown key is rejected. Other mistakes, such as a missing required key, do not matter here."""
    from forge_train.config.tree import DEFAULT, Value
    from forge_train.config.validate import validate

    section: Any = cls.Config
    made: Any = getattr(section, "__dataclass_params__", None)
    require(made is not None and made.frozen, "its Config must be marked with @section")
    mistakes: list[str] = []
    validate("section", section, {("no_such_key",): Value(1, DEFAULT)}, mistakes)
    require(any("no such key" in mistake for mistake in mistakes), "its Config accepts unknown keys; use @section")
    return ", ".join(field.name for field in dataclasses.fields(section))
