"""Writing configurations as TOML with comments."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..base.names import canonical
from ..config.layers import CONDITIONAL, Request, lay
from ..config.sections import CORE_SECTIONS
from ..config.toml import Key
from ..config.validate import plain

if TYPE_CHECKING:
    from ..config import Config
    from ..plugin.job import Hooks


def to_toml(config: Config, hooks: Hooks, *, comments: bool = False, notes: Mapping[Key, str] | None = None) -> str:
    """The resolved configuration, complete: `forge train` on it repeats the run. `run.name` is left out.

    Args:
        config: what to write.
        hooks: the enabled plugins, for their summaries.
        comments: whether to write each key's documentation and range above it.
        notes: comments to write beside keys.
    """
    import tomlkit

    document = tomlkit.document()
    document["plugins"] = list(config.plugins)
    if without := _still_brought(config.without):
        document["without"] = without
    if slots := dict(sorted({**_emptied(hooks), **config.defaults}.items())):
        document["defaults"] = _in_tables(slots, hooks)
    for name, section in config.everything().items():
        written = {**plain(section), **config.as_written.get(name, {})}
        values = {key: value for key, value in written.items() if (name, key) != ("run", "name")}
        if not values:
            continue
        table = tomlkit.table()
        if comments:
            summary = CORE_SECTIONS[name].__doc__ if name in CORE_SECTIONS else hooks.enabled[name].ref.summary
            table.comment((summary or "").strip().splitlines()[0])
        _fill(table, type(section), values, comments=comments)
        for key, note in (notes or {}).items():
            if key[0] == name and key[-1] in table:
                table[key[-1]].comment(note)
        document[name] = table
    return tomlkit.dumps(document)


def _in_tables(slots: Mapping[str, str], hooks: Hooks) -> dict[str, Any]:
    """Defaults as they stand in a file: those with a condition in its table."""
    tables = {key[1]: key[0] for key in lay(Request()).tree.below(("defaults",)) if key[0] in CONDITIONAL}
    written: dict[str, Any] = {}
    for slot, name in slots.items():
        table = tables.get(slot, "" if slot in hooks.specs else "distributed")
        (written.setdefault(table, {}) if table else written)[slot] = name
    return dict(sorted(written.items(), key=lambda item: isinstance(item[1], dict)))


def _still_brought(without: Iterable[str]) -> list[str]:
    """Those that would be enabled again: what a preset brought is not asked for by the file that is written."""
    tree = lay(Request()).tree
    asked = tree.values.get(("plugins",))
    names = {*(asked.value if asked else ()), *(value.value for value in tree.below(("defaults",)).values())}
    return [name for name in without if name in {canonical(one) for one in names}]


def _emptied(hooks: Hooks) -> dict[str, str]:
    """Slots that nobody fills although they have a default: it would come back."""
    brought = lay(Request()).tree.below(("defaults",))
    return {key[0]: "" for key in brought if key[0] in hooks.specs and not hooks.implementers(key[0])}


def _fill(table: Any, section: type, values: Mapping[str, Any], *, comments: bool) -> None:
    """Write a section's keys, and below them its tables, which would else take the keys that follow."""
    import tomlkit

    docs = field_docs(section) if comments else {}
    for key, value in sorted(values.items(), key=lambda pair: isinstance(pair[1], Mapping) or _are_tables(pair[1])):
        if value is None:
            continue
        if _are_tables(value):
            table.add(key, _tables(_item_type(section, key) or section, value))
            continue
        item = tomlkit.table() if isinstance(value, Mapping) else tomlkit.item(value)
        if isinstance(value, Mapping):
            inner = _table_type(section, key)
            _fill(item, inner or section, value, comments=comments and inner is not None)
        if comments and isinstance(value, Mapping):
            item.comment(docs.get(key, ""))
        elif comments:
            for line in textwrap.wrap(docs.get(key, ""), 100):
                table.add(tomlkit.comment(line))
            item.comment(describe_type(section, key))
        table.add(key, item)


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _tables(section: type, items: Iterable[Mapping[str, Any]]) -> Any:
    """A list of tables, `[[section.key]]`."""
    import tomlkit

    written = tomlkit.aot()
    for values in items:
        table = tomlkit.table()
        _fill(table, section, values, comments=False)
        written.append(table)
    return written


def _item_type(section: type, key: str) -> type | None:
    """The dataclass of the items of a list."""
    items = typing.get_args(typing.get_type_hints(section).get(key))
    return next((item for item in items if dataclasses.is_dataclass(item) and isinstance(item, type)), None)


def _table_type(section: type, key: str) -> type | None:
    """The dataclass of a field that is a table, or None for one that is a mapping."""
    hint = typing.get_type_hints(section).get(key)  # None for a key of a mapping in a mapping
    members = [hint, *typing.get_args(hint)]
    return next((member for member in members if dataclasses.is_dataclass(member) and isinstance(member, type)), None)


def field_docs(section: type) -> dict[str, str]:
    """Field → the string literal that stands below it in the source, or, in a class made at run time, its `docs`."""
    if "docs" in vars(section):
        return {**field_docs(section.__bases__[0]), **vars(section)["docs"]}
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
    return _words(typing.get_type_hints(section, include_extras=True)[key])


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
