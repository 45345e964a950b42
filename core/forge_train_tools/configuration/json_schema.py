"""The JSON Schema of configurations, by which editors complete and validate TOML files."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Iterator
from typing import Any

from forge_train import __version__
from forge_train.base.errors import ConfigError
from forge_train.base.names import PluginRef, canonical
from forge_train.config.sections import CORE_SECTIONS
from forge_train.config.tree import CONDITIONAL, LISTS
from forge_train.plugin.plugin import Plugin
from forge_train.registry.declared import spec_modules
from forge_train.registry.discovery import RESERVED, discover, load
from forge_train_kit.axes import installed, section_of
from forge_train_kit.source import Source

from ..hook_table import declarations
from .comments import field_docs
from .inspection import section_problem
from .presets import base_preset, presets

DIALECT = "https://json-schema.org/draft/2020-12/schema"
ELSEWHERE = r"^[A-Za-z_]\w*(\.\w+)*:\w+$|\.py(:\w*)?$"
"""Pattern of a plugin that is not installed: `package.module:Class`, `folder/file.py` and `folder/file.py:Class`."""
DASHED = "[-_]"
"""Pattern of the two spellings of `_` in a plugin's name."""


def schema(more: Iterable[PluginRef] = ()) -> tuple[dict[str, Any], list[str]]:
    """Build the schema of every configuration that the installed plugins make possible; all of them are imported.

    A required key may come from a preset or the command line, so a schema demands one only in the tables of a list.

    Args:
        more: plugins that are not installed, such as those in files.

    Returns:
        The schema, and a sentence for each plugin whose section is unknown because it can't be imported.
    """
    refs = {ref.name: ref for ref in [*reversed(discover()), *more] if ref.name not in RESERVED}
    problems: list[str] = []
    defs: dict[str, Any] = {}
    sections = {name: _section(name, cls, cls.__doc__ or "", defs) for name, cls in _core(problems).items()}
    for name, ref in sorted(refs.items()):
        summary = f"{Source(ref).summary} ({ref.distribution} {ref.version})".replace(" )", ")")
        try:
            sections[name] = _section(name, checked(ref).Config, summary, defs)
        except ConfigError as error:
            problems.append(str(error))
            sections[name] = {"type": "object", "description": f"{summary}\n\nIts keys are unknown: {error}"}
    _add_aliases(sections)
    names = [*LISTS, "preset", "defaults", *sections]
    spellings = {f"^{name.replace('_', DASHED)}$": {"$ref": f"#/properties/{name}"} for name in refs if "_" in name}
    return {
        "$schema": DIALECT,
        "title": f"A configuration of Forge {__version__}",
        "type": "object",
        "properties": {**_top(refs), **sections},
        "patternProperties": spellings,
        "if": {
            "properties": {"plugins": {"type": "array", "contains": {"type": "string", "pattern": ELSEWHERE}}},
            "required": ["plugins"],
        },
        "else": {
            "properties": {name: {} for name in names},
            "patternProperties": {name: {} for name in spellings},
            "additionalProperties": False,
        },
        "$defs": defs,
    }, problems


def checked(ref: PluginRef) -> type[Plugin]:
    """Import a plugin whose `Config` is a section.

    Raises:
        ConfigError: if it can't be imported, or its `Config` is none.
    """
    plugin = load(ref)
    if problem := section_problem(ref, plugin):
        raise ConfigError(problem)
    return plugin


def _core(problems: list[str]) -> dict[str, type]:
    """The kernel's sections, with the axes of installed packages."""
    try:
        return CORE_SECTIONS | {"parallel": section_of(installed())}
    except ConfigError as error:
        problems.append(str(error))
        return CORE_SECTIONS


def _section(name: str, cls: type, summary: str, defs: dict[str, Any]) -> dict[str, Any]:
    """The schema of a section; those of the classes inside it are added to `defs`."""
    import pydantic

    try:
        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(cls)
        found = adapter.json_schema(ref_template=f"#/$defs/{name}.{{model}}", schema_generator=_generator())
    except pydantic.errors.PydanticUserError as error:
        raise ConfigError(f"Section [{name}] has no JSON Schema: {error}") from error
    inner = {f"{name}.{key}": value for key, value in found.pop("$defs", {}).items()}
    defs.update(inner)
    _open(found, inner)
    return {**found, "title": f"[{name}]", "description": summary.strip()}


def _open(table: dict[str, Any], defs: dict[str, Any]) -> None:
    """Make the keys of a table optional, and those of the tables in it, but not those of lists."""
    for key in table.pop("required", ()):
        option = table["properties"][key]
        option["description"] = f"{option.get('description', '')} Required.".strip()
    for option in table.get("properties", {}).values():
        for one in (option, *option.get("anyOf", ()), *option.get("allOf", ())):
            if (name := one.get("$ref", "").removeprefix("#/$defs/")) in defs:
                _open(defs[name], defs)


@functools.cache
def _generator() -> Any:
    """pydantic's generator, with the documentation below each field and without titles made of its name."""
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

        def tuple_schema(self, schema: Any) -> dict[str, Any]:
            found: dict[str, Any] = super().tuple_schema(schema)
            first, *others = found.get("prefixItems", [None])
            if first is not None and all(one == first for one in others):  # as validators of older dialects read it
                found["items"] = found.pop("prefixItems")[0]
            return found

        def dataclass_schema(self, schema: Any) -> dict[str, Any]:
            found: dict[str, Any] = super().dataclass_schema(schema)
            for key, text in field_docs(schema["cls"]).items():
                if key in found.get("properties", {}):
                    found["properties"][key]["description"] = text
            return found

    return Generator


def _add_aliases(sections: dict[str, Any]) -> None:
    """Add the keys that stand for others, each to the section that it seems to be of."""
    beneath = base_preset()
    written = tomllib.loads(beneath.read_text(encoding="utf-8")) if beneath else {}
    for alias, other in written.get("aliases", {}).items():
        (section, key), (home, name) = alias.split("."), other.split(".")
        if section in sections and name in sections.get(home, {}).get("properties", {}):
            sections[section].setdefault("properties", {})[key] = {
                "$ref": f"#/properties/{home}/properties/{name}",
                "description": f"Another name for {other}.",
            }


def _top(refs: dict[str, PluginRef]) -> dict[str, Any]:
    """The keys at the top."""
    spelled = sorted({spelling for name in refs for spelling in (name, name.replace("_", "-"))})
    listed = {"type": "array", "items": {"anyOf": [{"enum": spelled}, {"type": "string", "pattern": ELSEWHERE}]}}
    known = sorted(set(presets()) - {"base"})
    slots = {name: {"type": "string", "description": text} for name, text in _slots()}
    several = {name: {"type": "object", "additionalProperties": {"type": "string"}} for name in CONDITIONAL}
    return {
        "plugins": {**listed, "description": "Plugins to enable: names, package.module:Class, or files."},
        "without": {**listed, "description": "Plugins to disable."},
        "preset": {"enum": known, "description": "The preset that this file builds on."},
        "defaults": {
            "type": "object",
            "description": "Slot → the plugin that fills it if no other enabled plugin does.",
            "properties": {**slots, **several},
            "additionalProperties": False,
        },
    }


def _slots() -> Iterator[tuple[str, str]]:
    for module in spec_modules():
        for one in declarations(module).values():
            if one.kind in ("slot", "chain"):
                yield canonical(one.name), one.summary
