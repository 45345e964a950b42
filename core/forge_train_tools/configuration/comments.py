"""Comments in configurations: the documentation, type and range of each key."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from forge_train.config import Config
from forge_train.config.schema import annotation_of, table_type
from forge_train.config.sections import CORE_SECTIONS
from forge_train.config.tree import Key
from forge_train.loop.describe import to_toml
from forge_train.plugin.job import Hooks
from forge_train_kit.source import Source

from .toml import index_lines


def commented(config: Config, hooks: Hooks) -> str:
    """The resolved configuration as TOML, with each key's documentation above it and its type and range beside it."""
    text = to_toml(config, hooks)
    above: dict[Key, str] = {}
    beside: dict[Key, str] = {}
    for name, section in config.everything().items():
        words = CORE_SECTIONS[name].__doc__ if name in CORE_SECTIONS else Source(hooks.enabled[name].ref).summary
        beside[(name,)] = (words or "").strip().splitlines()[0]
        _describe((name,), type(section), above, beside)
    return _annotated(text, beside, above)


def noted(config: Config, hooks: Hooks, notes: Mapping[Key, str]) -> str:
    """The resolved configuration as TOML, with comments beside some keys."""
    return _annotated(to_toml(config, hooks), notes)


def _describe(table: Key, section: type, above: dict[Key, str], beside: dict[Key, str]) -> None:
    docs = field_docs(section)
    for field in dataclasses.fields(section):
        key = (*table, field.name)
        annotation = annotation_of(section, (field.name,))
        if inner := table_type(annotation):
            beside[key] = docs.get(field.name, "")
            _describe(key, inner, above, beside)
        elif _words(annotation) == "table":
            beside[key] = docs.get(field.name, "")
        else:
            above[key], beside[key] = docs.get(field.name, ""), _words(annotation)


def _annotated(text: str, beside: Mapping[Key, str], above: Mapping[Key, str] = types.MappingProxyType({})) -> str:
    """TOML whose values take a line each, with comments beside and above some of its keys."""
    lines = text.split("\n")
    found = index_lines(text)
    for key, at in sorted(found.items(), key=lambda item: -item[1]):
        if lines[at - 1].startswith("[["):
            continue
        if comment := beside.get(key):
            lines[at - 1] += f" # {comment}"
        lines[at - 1 : at - 1] = [f"# {line}" for line in textwrap.wrap(above.get(key, ""), 100)]
    return "\n".join(lines)


def field_docs(section: type) -> dict[str, str]:
    """Field → the string literal that stands below it in the source, of the class and its bases."""
    return {name: text for cls in reversed(section.__mro__) for name, text in _own_docs(cls).items()}


@functools.lru_cache(maxsize=512)  # finding a class in its source takes twenty milliseconds
def _own_docs(section: type) -> dict[str, str]:
    if "__field_docs__" in vars(section):  # a class made at run time has no source
        docs: dict[str, str] = vars(section)["__field_docs__"]
        return docs
    try:
        source = textwrap.dedent(inspect.getsource(section))
    except (OSError, TypeError):
        return {}
    body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
    docs = {}
    for node, below in itertools.pairwise(body):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            docs[node.target.id] = " ".join(str(below.value.value).split())
    return docs


def describe_type(section: type, key: str) -> str:
    """A field's type and range in a few words: `number > 0`, `fp32 | bf16`, `list of text`."""
    return _words(annotation_of(section, (key,)))


def _words(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return " ".join([_words(inner[0]), *_bounds(inner[1:])])
    if origin is typing.Literal:
        return " | ".join(str(option) for option in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(member) for member in inner if member is not type(None))
    if origin in (tuple, list):
        members = list(dict.fromkeys(_words(member) for member in inner if member is not ...))
        size = f"{len(inner)}: " if origin is tuple and ... not in inner else ""
        return f"list of {size}{', '.join(members)}"
    if dataclasses.is_dataclass(hint) or origin in (dict, Mapping):
        return "table"
    names = {int: "integer", float: "number", bool: "true | false", str: "text"}
    return names.get(hint) or str(hint).replace("typing.", "")


def _bounds(marks: Iterable[Any]) -> list[str]:
    return [
        f"{sign} {getattr(mark, name)}"
        for mark in marks
        for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
        if hasattr(mark, name)
    ]
