"""A plugin that could be enabled, and the fingerprint of its code. Nothing of it has been imported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..base.names import file_module, is_file, locate, split

_INSTALLED = ("site-packages", "dist-packages")


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

    @property
    def covers(self) -> frozenset[str]:
        """Return what the class's transforms cover, read from literals such as `covers=("tp",)` in its source text."""
        name, text = split(self.object)[1], self._text
        own = text.partition(f"\nclass {name}(")[2].partition("\nclass ")[0] if name else text
        return frozenset(re.findall(r"\w+", " ".join(re.findall(r"\bcovers ?= ?\(([^)]*)\)", own))))

    @property
    def _text(self) -> str:
        return self.file.read_text(encoding="utf-8", errors="replace") if self.file and self.file.is_file() else ""

    def hash(self) -> str:
        """sha256 of the plugin's code; see `fingerprint`."""
        return fingerprint(self.module, self.file)


class HookOrigin(str):
    """A plugin, its hook and the place of its implementation in words; it also knows the names of both."""

    plugin: str
    hook: str

    def __new__(cls, text: str, plugin: str = "", hook: str = "") -> HookOrigin:  # copies are made of the text alone
        made = super().__new__(cls, text)
        made.plugin, made.hook = plugin, hook
        return made


@cache
def fingerprint(module: str, file: Path | None = None) -> str:
    """sha256 of the Python files that a plugin is made of, read without importing any of them; empty where there are
    none. It stays what it was when this process first asked: what runs is what was imported then.

    Args:
        module: the plugin's module.
        file: where it lies, if it can't be found by its name.
    """
    import hashlib  # a listing does without

    digest = hashlib.sha256()
    files = _files(module, file or locate(module))
    for name in sorted(files):
        content = files[name].read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest() if files else ""


def _files(module: str, home: Path | None) -> dict[str, Path]:
    """Module → file, of a module and of all that it imports, directly or not. What counts is in its package, or lies
    beside a module that is in none."""
    if home is None:
        return {}
    top, *below = module.split(".")
    root = home.parents[len(below) + (home.name == "__init__.py")]
    lone = home.parent == root and root.name not in _INSTALLED
    found: dict[str, Path] = {}
    waiting = [module if below or home.name == "__init__.py" else home.stem]
    while waiting:
        name = waiting.pop()
        if not name or name in found or not (lone or name.partition(".")[0] == top):
            continue
        path = root.joinpath(*name.split("."))
        file = next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)
        if file is not None:
            found[name] = file
            waiting += _imports(file, name)
    return found


def _imports(file: Path, module: str) -> Iterator[str]:
    """Dotted names that a file may import, wherever in it the statement stands."""
    import ast  # a listing does without
    from importlib.util import resolve_name

    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            try:
                base = (
                    resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
                )
            except ImportError:
                continue
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
