"""Source locations for messages, and values that a class assigns, read from its source without importing it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BASES = ("Plugin", "Tracker")


def place(member: Any) -> str:
    """`file:line` of a method, of the function inside what wraps it, or of an object's class."""
    if isinstance(member, property):
        member = member.fget
    member = inspect.unwrap(getattr(member, "func", getattr(member, "__func__", member)))
    code = getattr(member, "__code__", None)
    if code is not None:
        return shown(code.co_filename, code.co_firstlineno)
    cls = member if isinstance(member, type) else type(member)
    try:
        return shown(inspect.getsourcefile(cls) or "?", inspect.getsourcelines(cls)[1])
    except (OSError, TypeError):
        return f"{cls.__module__}.{cls.__qualname__}"


def shown(file: str, line: int) -> str:
    """A place in the source, its file relative to the current folder where it lies in it."""
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"


def assigned(file: Path | None, class_name: str, attribute: str, word: str = "") -> ast.expr | None:
    """Return the expression that a class assigns to an attribute; None if the file has no such assignment.

    Args:
        file: the module's source.
        class_name: of the class; empty for the first plugin class of the file.
        attribute: to look for in the class's own body.
        word: a file without it is not parsed; the attribute if empty.
    """
    found = class_node(file, class_name, word or attribute)
    return _value(found, attribute) if found else None


def class_node(file: Path | None, class_name: str, word: str) -> ast.ClassDef | None:
    """Return the syntax of a class, or of the first plugin class; None in a file that does not contain a word."""
    text = file.read_text(encoding="utf-8", errors="replace") if file and file.is_file() else ""
    if word not in text:  # parsing all plugins takes long
        return None
    try:
        classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    except (SyntaxError, ValueError):
        return None
    return next((one for one in classes if (one.name == class_name if class_name else _is_plugin(one))), None)


def literals(value: ast.expr | None) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a dictionary whose key and value are literals."""
    if isinstance(value, ast.Dict):
        for key, item in zip(value.keys, value.values, strict=True):
            try:
                yield ast.literal_eval(key or item), ast.literal_eval(item)
            except ValueError:
                continue


def key_place(cls: type, key: str) -> str:
    """`file:line` of a string in the source of a class, or of the class where it is not written out."""
    try:
        lines, first = inspect.getsourcelines(cls)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        file = inspect.getsourcefile(cls) or "?"
    except (OSError, TypeError, SyntaxError):
        return place(cls)
    found = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value == key]
    return shown(file, first + found[0] - 1) if found else place(cls)


def _is_plugin(node: ast.ClassDef) -> bool:
    return any(name in ast.unparse(base) for base in node.bases for name in _BASES)


def _value(node: ast.ClassDef, attribute: str) -> ast.expr | None:
    for one in node.body:
        if not isinstance(one, (ast.Assign, ast.AnnAssign)):
            continue
        targets, value = one.targets if isinstance(one, ast.Assign) else [one.target], one.value
        if any(isinstance(target, ast.Name) and target.id == attribute for target in targets):
            return value
    return None
