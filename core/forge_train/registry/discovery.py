"""Finding plugins without importing them.

A plugin is an entry point of the group `forge_train.plugins`, a module of `forge_train_contrib`, or a dotted
`package.module:Class`. Its module is imported by `load`, and by nothing else.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, ForgeError, describe, nearest

if TYPE_CHECKING:
    from ..plugin import Plugin

GROUP = "forge_train.plugins"
CONTRIB = "forge_train_contrib"
DISTRIBUTION = "forge-train"
RESERVED = frozenset({"run", "train", "parallel", "checkpoint", "log", "defaults", "plugins", "preset"})

_NO_SUMMARY = "–"


@dataclass(frozen=True)
class Found:
    """A plugin that could be enabled. Nothing of it has been imported."""

    name: str
    """Canonical: `-` is written `_`."""
    distribution: str
    version: str
    object: str
    """`package.module:Class`, or `package.module` where the module's only plugin is meant."""

    @property
    def module(self) -> str:
        return self.object.partition(":")[0]

    @property
    def label(self) -> str:
        """`'fp8' (forge-train 0.1.0)`, for messages."""
        return f"{self.name!r} ({self.distribution} {self.version})".replace(" )", ")")

    @property
    def file(self) -> Path | None:
        """The module's source file, found without importing anything of it."""
        return locate(self.module)

    @property
    def summary(self) -> str:
        """The first line of the class's docstring, read as text; `–` where there is none to be found."""
        match = re.search(r"\A\s*\n\s+r?(?:\"\"\"|''')(.+?)(?:\"\"\"|'''|\n)", self._text)
        return match.group(1).strip() if match else _NO_SUMMARY

    @property
    def saves(self) -> tuple[str, ...]:
        """The class's `Plugin.saves`, read as text; empty where it says nothing."""
        return self._written("saves")

    @property
    def architectures(self) -> tuple[str, ...]:
        """The class's `Plugin.architectures`, read as text."""
        return self._written("architectures")

    def _written(self, name: str) -> tuple[str, ...]:
        match = re.search(rf"^    {name}\b[^=\n]*= \(([^)]*)\)", self._text, re.MULTILINE)
        return tuple(re.findall(r"\w+", match.group(1))) if match else ()

    @property
    def covers(self) -> frozenset[str]:
        """What the class's transforms cover, as far as it writes `covers=("tp",)` out: read as text."""
        found = re.findall(r"\bcovers ?= ?\(([^)]*)\)", self._text)
        return frozenset(re.findall(r"\w+", " ".join(found)))

    @property
    def _text(self) -> str:
        """The class's source below its head."""
        return _body(self.file, self.object.partition(":")[2]) if self.file else ""

    def hash(self) -> str:
        """sha256 of the plugin's code: see `forge_train.registry.fingerprint`."""
        from .fingerprint import fingerprint

        return fingerprint(self.module)


def canonical(name: str) -> str:
    """The one spelling of a plugin's name: `-` and `_` are equal."""
    return name.strip().replace("-", "_")


def plugin_name(spec: str) -> str:
    """The name of the plugin that a name, or a dotted `package.module:Class`, stands for."""
    return snake(spec.partition(":")[2]) if ":" in spec else canonical(spec)


def discover() -> list[Found]:
    """Every installed and contributed plugin, sorted by name, then distribution. Imports none of them."""
    everything = {found for source in SOURCES for found in source()}
    return sorted(everything, key=lambda found: (found.name, found.distribution))


def dotted(spec: str) -> Found:
    """The plugin `package.module:Class`, named after the class; a module in the current folder is found too."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last, so that it hides nothing
    module, _, name = spec.partition(":")
    owners = _owners().get(module.split(".", maxsplit=1)[0], [])
    distribution = owners[0] if owners else "no distribution"
    return Found(snake(name), distribution, importlib.metadata.version(owners[0]) if owners else "", spec)


def find(name: str) -> Found:
    """The plugin of a name, or the dotted one. It is not imported.

    Raises:
        ConfigError: if there is none, or more than one.
    """
    if ":" in name:
        return dotted(name)
    everything = discover()
    found = [one for one in everything if one.name == canonical(name)]
    if not found:
        raise ConfigError(f"There is no plugin named {name!r}.{nearest(canonical(name), [o.name for o in everything])}")
    if len(found) > 1:
        owners = " and ".join(f"{one.distribution} {one.version}" for one in found)
        raise ConfigError(f"The name {name!r} is used by {owners}; uninstall one.")
    return found[0]


def load(found: Found) -> type[Plugin]:
    """Import a plugin's module and give its class.

    Raises:
        ConfigError: if it can't be imported, is not a `Plugin`, or was written for another plugin API.
    """
    from ..plugin import Plugin  # a listing does without pluggy

    module_name, _, attribute = found.object.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever a stranger's module does while it is imported
        reason = str(error) if isinstance(error, ForgeError) else describe(error)
        raise ConfigError(
            f"Plugin {found.label} failed to import: {reason.rstrip('.')}{_line(found, error)}. "
            f"`forge plugins check {found.name if found in discover() else found.object}` shows the traceback."
        ) from error
    if attribute:
        plugin = getattr(module, attribute, None)
        if plugin is None:
            raise ConfigError(f"Plugin {found.label}: module {module_name!r} has no {attribute!r}.")
    else:
        plugin = _only_plugin(found, vars(module))
    if not (isinstance(plugin, type) and issubclass(plugin, Plugin)):
        raise ConfigError(f"Plugin {found.label}: {found.object!r} is not a class derived from forge_train.Plugin.")
    _check_api(found, plugin)
    return plugin


def _line(found: Found, error: BaseException) -> str:
    """The line of the plugin's own file at which its import failed."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}:{error.lineno})"
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(found.file)]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def locate(module: str) -> Path | None:
    """A module's file (a package's folder gives its `__init__.py`), found without importing its parents."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
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


def folder(package: str) -> Path | None:
    """A package's folder, found without importing anything."""
    top, *rest = package.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    roots = (spec.submodule_search_locations if spec else None) or ()
    return next((path for root in roots if (path := Path(root, *rest)).is_dir()), None)


def _entry_points() -> Iterator[Found]:
    identities: dict[int, tuple[str, str]] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        if id(point.dist) not in identities:  # the points of one distribution share it
            identities[id(point.dist)] = identity(point.dist)
        name, version = identities[id(point.dist)]
        yield Found(canonical(point.name), name, version, point.value.replace(" ", ""))


def _contributed() -> Iterator[Found]:
    root = folder(CONTRIB)
    for file in sorted(root.glob("*.py")) if root else ():
        if not file.stem.startswith("_"):
            yield Found(canonical(file.stem), DISTRIBUTION, own_version(), f"{CONTRIB}.{file.stem}")


SOURCES: list[Callable[[], Iterable[Found]]] = [_entry_points, _contributed]
"""Where plugins are looked for. The test kit puts others in their place."""


def own_version() -> str:
    from .. import __version__

    return __version__


def identity(dist: importlib.metadata.Distribution | None) -> tuple[str, str]:
    """Name and version of a distribution."""
    if dist is None:
        return "no distribution", ""
    text = dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""
    # `dist.metadata` reads all of it with email.parser, which takes as long as the rest of a listing.
    name, version = (re.search(rf"^{key}: *(.+?) *$", text, re.MULTILINE) for key in ("Name", "Version"))
    return (name.group(1), version.group(1)) if name and version else (dist.metadata["Name"], dist.version)


@cache
def _owners() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def _body(file: Path, class_name: str) -> str:
    """What follows the head of a plugin's class. Regular expressions over the text: `ast` takes 70 times as long."""
    text = file.read_text(encoding="utf-8", errors="replace")
    name = re.escape(class_name) if class_name else r"\w+"
    head = re.search(rf"^class {name}\([^)]*Plugin[^)]*\):", text, re.MULTILINE)
    if head is None:
        return ""
    end = re.compile(r"^\S", re.MULTILINE).search(text, head.end())
    return text[head.end() : end.start() if end else len(text)]


def _only_plugin(found: Found, members: dict[str, object]) -> type[Plugin]:
    from ..plugin import Plugin

    classes = [value for value in members.values() if isinstance(value, type) and issubclass(value, Plugin)]
    own = [cls for cls in classes if cls.__module__ == found.module]
    if len(own) != 1:
        names = ", ".join(sorted(cls.__name__ for cls in own)) or "none"
        raise ConfigError(
            f"Plugin {found.label}: {found.module!r} must define exactly one plugin class, found {names}."
        )
    return own[0]


def _check_api(found: Found, plugin: type[Plugin]) -> None:
    from ..plugin import API

    api: Any = plugin.api  # whatever a stranger wrote there
    if not (isinstance(api, tuple) and len(api) == 2 and all(isinstance(number, int) for number in api)):
        raise ConfigError(f"Plugin {found.label}: expected api = (major, minor), found {api!r}.")
    if api[0] != API[0] or api[1] > API[1]:
        raise ConfigError(
            f"Plugin {found.label} was written for plugin API {api}, this is {API}. "
            f"Install a version of {found.distribution} for this forge, or another forge."
        )


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
