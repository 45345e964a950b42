"""A plugin that could be enabled, and the fingerprint of its code. Nothing of it has been imported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.names import file_module, is_file, locate, split

if TYPE_CHECKING:
    import ast

    from .attention import KernelCapabilities

_NO_SUMMARY = "–"
_INSTALLED = ("site-packages", "dist-packages")
_SUMMARY = re.compile(r"\A\s*\n\s+r?(?:\"\"\"|''')(.+?)(?:\"\"\"|'''|\n)")
_HEAD = re.compile(r"^class (\w+)\(([^)]*)\):", re.MULTILINE)
_END = re.compile(r"^\S", re.MULTILINE)


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
    def summary(self) -> str:
        """The first line of the class's docstring, read as text; `–` where there is none to be found."""
        match = _SUMMARY.search(self._text)
        return match.group(1).strip() if match else _NO_SUMMARY

    def fact(self, name: str) -> Any:
        """A literal of the class's `Plugin.facts`, read from its source; None if it is not stated there."""
        from ..base.places import literals  # a listing does without

        return dict(literals(self._assigned("facts", name))).get(name)

    @property
    def kernel_capabilities(self) -> KernelCapabilities | None:
        """The class's `Plugin.kernel_capabilities`, read from its source; None where it says nothing that can be
        read."""
        call = self._assigned("kernel_capabilities")
        if call is None:
            return None
        import ast  # a listing does without

        from .attention import KernelCapabilities

        try:
            given = {one.arg: ast.literal_eval(one.value) for one in getattr(call, "keywords", ())}
            return KernelCapabilities(**given)
        except (ValueError, TypeError):
            return None

    def _assigned(self, attribute: str, word: str = "") -> ast.expr | None:
        from ..base.places import assigned  # a listing does without

        return assigned(self.file, split(self.object)[1], attribute, word)

    @property
    def hooks(self) -> tuple[str, ...]:
        """The hooks that the class implements itself, read as text."""
        return tuple(re.findall(r"^    @hookimpl\b.*\n(?:    @.*\n)*    def (\w+)", self._text, re.MULTILINE))

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases of its transforms, as far as the class writes `Phase.NAME` out: read as text."""
        return tuple(re.findall(r"\bPhase\.([A-Z0-9]+)\b", self._text))

    @property
    def covers(self) -> frozenset[str]:
        """Return what the class's transforms cover, read from literals such as `covers=("tp",)` in its source text."""
        found = re.findall(r"\bcovers ?= ?\(([^)]*)\)", self._text)
        return frozenset(re.findall(r"\w+", " ".join(found)))

    @property
    def _text(self) -> str:
        """The class's source below its head."""
        file = self.file
        return _body(file, split(self.object)[1]) if file and file.is_file() else ""

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


def _body(file: Path, class_name: str) -> str:
    """Return the body of a plugin's class. Uses regular expressions: `ast` is 70 times slower."""
    text = file.read_text(encoding="utf-8", errors="replace")
    for head in _HEAD.finditer(text):
        if head[1] == class_name if class_name else "Plugin" in head[2] or "Tracker" in head[2]:
            end = _END.search(text, head.end())
            return text[head.end() : end.start() if end else len(text)]
    return ""


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
