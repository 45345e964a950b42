"""Finding plugins without importing them.

A plugin is an entry point of the group `forge_train.plugins`, a module of `forge_train_contrib`, a dotted
`package.module:Class`, or a file. Its module is imported by `load`, and by nothing else.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError, ForgeError, describe, nearest
from ..base.names import PluginRef, canonical, folder, import_module, is_file, snake, split

if TYPE_CHECKING:
    from ..plugin.plugin import Plugin

GROUP = "forge_train.plugins"
CONTRIB = "forge_train_contrib"
DISTRIBUTION = "forge-train"
NO_DISTRIBUTION = "no distribution"
RESERVED = frozenset({"run", "train", "parallel", "checkpoint", "log", "defaults", "plugins", "preset"})


def plugin_name(spec: str) -> str:
    """The name of the plugin that a name, a dotted `package.module:Class` or a file stands for.

    A class gives its name in snake case; a file without one its stem, as in contrib.
    """
    where, name = split(spec)
    if not is_name(spec) and name:
        return snake(name)
    return canonical(Path(where).stem if is_file(spec) else spec)


def is_name(spec: str) -> bool:
    """Return True for an installed plugin's name, as opposed to a dotted name or a file."""
    return ":" not in spec and not is_file(spec)


def discover() -> list[PluginRef]:
    """Every installed and contributed plugin, sorted by name, then distribution. Imports none of them."""
    everything = {found for source in SOURCES for found in source()}
    return sorted(everything, key=lambda found: (found.name, found.distribution))


def dotted(spec: str) -> PluginRef:
    """The plugin `package.module:Class`, named after the class; a module in the current folder is found too."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last, so that it hides nothing
    return PluginRef(snake(spec.partition(":")[2]), *_owner(re.split("[.:]", spec)[0]), spec)


def in_file(spec: str, folder: Path | None = None) -> PluginRef:
    """The plugin in a file: `./file.py`, or `./file.py:Class` where it has several.

    Args:
        spec: a path, and maybe a class.
        folder: where a relative path starts; the current folder, if none is given.

    Raises:
        ConfigError: if there is no such file, or its name can't be a plugin's.
    """
    path, name = split(spec)
    file = os.path.abspath((folder or Path()) / path)
    if not Path(file).is_file():
        raise ConfigError(f"there is no file {file}.")
    if not name and not plugin_name(file).isidentifier():
        raise ConfigError(f"{spec!r}: the plugin is named after the file: rename it, or name the class: {spec}:Class.")
    return PluginRef(plugin_name(spec), NO_DISTRIBUTION, "", f"{file}:{name}" if name else file)


def instead(name: str, known: Iterable[str]) -> str:
    """Suggest what to do about a name that no installed plugin has."""
    if hint := nearest(canonical(name), known):
        return hint
    if "." in name:
        return " A class that is not installed is named package.module:Class, or by its file: ./file.py."
    return " `forge plugins list` shows those that are installed; `forge plugins install PACKAGE` adds others."


def load(found: PluginRef) -> type[Plugin]:
    """Import a plugin's module and give its class.

    Raises:
        ConfigError: if it can't be imported, is not a `Plugin`, or was written for another plugin API.
    """
    from ..plugin.plugin import Plugin  # a listing does without

    where, attribute = split(found.object)
    try:
        module = import_module(found.object)
    except (Exception, SystemExit) as error:  # whatever a stranger's module does while it is imported
        reason = str(error) if isinstance(error, ForgeError) else describe(error)
        raise ConfigError(
            f"Plugin {found.label} failed to import: {reason.rstrip('.')}{_line(found, error)}. "
            f"`forge plugins check {found.name if found in discover() else found.object}` shows the traceback."
        ) from error
    if attribute:
        plugin = getattr(module, attribute, None)
        if plugin is None:
            raise ConfigError(f"Plugin {found.label}: {_place(where)} has no {attribute!r}.")
    else:
        plugin = _only_plugin(found, vars(module))
    if not (isinstance(plugin, type) and issubclass(plugin, Plugin)):
        raise ConfigError(f"Plugin {found.label}: {found.object!r} is not a class derived from forge_train.Plugin.")
    _check_api(found, plugin)
    return plugin


def _place(where: str) -> str:
    return where if is_file(where) else f"module {where!r}"


def _line(found: PluginRef, error: BaseException) -> str:
    """The line of the plugin's own file at which its import failed."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}:{error.lineno})"
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(found.file)]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def entry_points(group: str) -> importlib.metadata.EntryPoints:
    """Return the entry points of a group. All groups are read at once, and again when a folder of the path changes."""
    # A Path takes five times as long, and each resolved configuration asks several times.
    times = (os.stat(one or ".").st_mtime_ns if os.path.exists(one or ".") else 0 for one in sys.path)  # noqa: PTH110, PTH116
    return _read(tuple(zip(sys.path, times, strict=True)))(group)


@lru_cache(maxsize=1)
def _read(path: tuple[tuple[str, int], ...]) -> Callable[[str], importlib.metadata.EntryPoints]:
    everything: Any = importlib.metadata.entry_points()  # another class in each Python
    return cache(lambda group: everything.select(group=group))


def _entry_points() -> Iterator[PluginRef]:
    for point in entry_points(GROUP):
        name, version = identity(point.dist)
        yield PluginRef(canonical(point.name), name, version, point.value.replace(" ", ""))


def contributed() -> Iterator[PluginRef]:
    """The plugins of contrib, one a file."""
    root = folder(CONTRIB)
    for file in sorted(root.glob("*.py")) if root else ():
        if not file.stem.startswith("_"):
            yield PluginRef(canonical(file.stem), DISTRIBUTION, own_version(), f"{CONTRIB}.{file.stem}")


SOURCES: list[Callable[[], Iterable[PluginRef]]] = [_entry_points, contributed]
"""Functions that find plugins. The test kit replaces them."""


def own_version() -> str:
    from .. import __version__

    return __version__


@cache
def identity(dist: importlib.metadata.Distribution | None) -> tuple[str, str]:
    """Name and version of a distribution."""
    if dist is None:
        return NO_DISTRIBUTION, ""
    text = dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""
    # `dist.metadata` reads all of it with email.parser, which takes as long as the rest of a listing.
    name, version = (re.search(rf"^{key}: *(.+?) *$", text, re.MULTILINE) for key in ("Name", "Version"))
    return (name.group(1), version.group(1)) if name and version else (dist.metadata["Name"], dist.version)


@cache
def _owner(package: str) -> tuple[str, str]:
    """Name and version of the distribution that has a top-level package or module."""
    # `packages_distributions` makes a Path of each file of each distribution: a second in every process of a run.
    listed = re.compile(rf"^{re.escape(package)}(\s*$|(/.*)?\.py,)", re.MULTILINE)
    everyone = importlib.metadata.distributions()
    owners = (one for one in everyone if listed.search(one.read_text("top_level.txt") or one.read_text("RECORD") or ""))
    return identity(next(owners, None))


def _only_plugin(found: PluginRef, members: dict[str, object]) -> type[Plugin]:
    from ..plugin.plugin import Plugin

    classes = [value for value in members.values() if isinstance(value, type) and issubclass(value, Plugin)]
    own = [cls for cls in classes if cls.__module__ == found.module]
    if len(own) != 1:
        names = ", ".join(sorted(cls.__name__ for cls in own)) or "none"
        raise ConfigError(
            f"Plugin {found.label}: {split(found.object)[0]!r} must define exactly one plugin class, found {names}."
            + (f" Name the one you mean: {found.object}:{own[0].__name__}." if own and is_file(found.object) else "")
        )
    return own[0]


def _check_api(found: PluginRef, plugin: type[Plugin]) -> None:
    from ..plugin.plugin import API

    api: Any = plugin.api  # whatever a stranger wrote there
    if not (isinstance(api, tuple) and len(api) == 2 and all(isinstance(number, int) for number in api)):
        raise ConfigError(f"Plugin {found.label}: expected api = (major, minor), found {api!r}.")
    if api[0] != API[0] or api[1] > API[1]:
        raise ConfigError(
            f"Plugin {found.label} was written for plugin API {api}, this is {API}. "
            f"Install a version of {found.distribution} for this forge, or another forge."
        )
