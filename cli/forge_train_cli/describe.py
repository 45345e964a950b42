"""The description of a plugin in `forge plugins info`."""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from collections.abc import Iterator
from typing import Any

from forge_train.base.errors import ConfigError
from forge_train.config.validate import plain
from forge_train.plugin.calls import implemented
from forge_train.registry.declared import spec_modules
from forge_train.registry.discovery import load
from forge_train_kit.plugins import find
from forge_train_kit.source import Source
from forge_train_tools.configuration.comments import describe_type, field_docs
from forge_train_tools.configuration.inspection import section_problem
from forge_train_tools.hook_table import declarations

from . import screen
from .roles import role


def describe(name: str) -> dict[str, Any]:
    """Everything about a plugin, as JSON; imports the plugin."""
    found = find(name)
    plugin = load(found)
    if problem := section_problem(found, plugin):
        raise ConfigError(problem)
    kinds = {one.name: one.kind for module in spec_modules() for one in declarations(module).values()}
    return {
        "name": found.name,
        "distribution": found.distribution,
        "version": found.version,
        "object": found.object,
        "file": str(found.file) if found.file else None,
        "summary": Source(found).summary,
        "role": role(found),
        "description": inspect.cleandoc(plugin.__doc__ or "").partition("\n")[2].strip(),
        "api": list(plugin.api),
        "hooks": {hook: kinds.get(hook, "unknown") for hook in sorted(implemented(plugin))},
        "requires": list(plugin.requires),
        "conflicts": list(plugin.conflicts),
        "needs": dict(plugin.needs),
        "options": list(_options(plugin.Config, found.name)),
    }


def _options(section: type, prefix: str) -> Iterator[dict[str, Any]]:
    docs, hints = field_docs(section), typing.get_type_hints(section)
    for one in dataclasses.fields(section):
        inner, key = hints[one.name], f"{prefix}.{one.name}"
        if dataclasses.is_dataclass(inner):
            yield from _options(typing.cast(type, inner), key)
            continue
        yield {
            "key": key,
            "type": describe_type(section, one.name),
            "default": _default(section, one),
            "required": one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING,
            "description": docs.get(one.name, ""),
        }


def _default(section: type, one: dataclasses.Field[Any]) -> Any:
    if one.default_factory is not dataclasses.MISSING:
        value = one.default_factory()
    else:
        value = None if one.default is dataclasses.MISSING else one.default
    holder = dataclasses.make_dataclass("Holder", [("value", object)])
    return plain(holder(value))["value"]


def show(description: dict[str, Any]) -> None:
    """Print it."""
    from rich.text import Text

    screen.line(f"{description['name']} · {description['distribution']} {description['version']}", "bold")
    screen.line(description["summary"])
    if description["description"]:
        screen.line(f"\n{description['description']}")
    facts = [
        ("role", description["role"]),
        ("object", description["object"]),
        ("file", description["file"] or "–"),
        ("plugin API", ".".join(map(str, description["api"]))),
        ("hooks", ", ".join(f"{hook} ({kind})" for hook, kind in description["hooks"].items()) or "none"),
        ("requires", ", ".join(description["requires"])),
        ("conflicts", ", ".join(description["conflicts"])),
        *(("needs", f"{module}: {command}") for module, command in description["needs"].items()),
    ]
    screen.heading("About")
    screen.table(("", ""), [(Text(label, style="dim"), value) for label, value in facts if value])
    screen.heading("Options")
    if not description["options"]:
        screen.line("  none")
        return
    rows = [
        (
            Text(option["key"], style="bold"),
            option["type"],
            "required" if option["required"] else _words(option["default"]),
            option["description"],
        )
        for option in description["options"]
    ]
    screen.table(("key", "type", "default", ""), rows)


def _words(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
