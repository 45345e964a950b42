"""The fingerprint of a plugin's code, which tells a resumed run that it has changed."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

from forge_train.base.names import PluginRef

_INSTALLED = ("site-packages", "dist-packages")


@cache
def fingerprint(ref: PluginRef) -> str:
    """sha256 of the Python files that a plugin is made of, read without importing any of them; empty where there are
    none. It stays what it was when this process first asked: what runs is what was imported then."""
    digest = hashlib.sha256()
    files = source_files(ref)
    for name in sorted(files):
        content = files[name].read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest() if files else ""


def source_files(ref: PluginRef) -> dict[str, Path]:
    """Module → file, of a plugin's module and of all that it imports, directly or not. What counts is in its package,
    or lies beside a module that is in none."""
    module, home = ref.module, ref.file
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
            package = name if file.name == "__init__.py" else name.rpartition(".")[0]
            waiting += _imports(file.read_bytes(), package)
    return found


_IMPORT = re.compile(rb"(?:^|[;:])[ \t\f]*((?:from|import)\b(?:[^\n(;\\#]|\\\r?\n)*(?:\([^)]*\))?)", re.MULTILINE)
"""Text that may be an import, or only looks like one. To parse nothing else takes a tenth of the time."""


@cache
def _imports(source: bytes, package: str) -> tuple[str, ...]:
    """Dotted names that a file may import, wherever in it the statement stands. Plugins share most files."""
    try:
        statements = [ast.parse(found.strip()).body[0] for found in _IMPORT.findall(source)]
    except (SyntaxError, ValueError):  # a sentence, or a bracket in a comment
        try:
            statements = list(ast.walk(ast.parse(source)))
        except (SyntaxError, ValueError):
            return ()
    return tuple(_names(statements, package))


def _names(statements: Iterable[ast.AST], package: str) -> Iterator[str]:
    for node in statements:
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
