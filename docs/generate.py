"""Writes what the documentation says about code, from the code; mkdocs runs it (`hooks:` in mkdocs.yml).

- `plugins/NAME.md` for every built-in plugin: its docstring, its hooks, its options;
- the lists of hooks, of plugins, of core's sections and of the laws' tests, where a page says `<!-- generate: … -->`.

Nothing is written into docs/.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import logging
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from forge_train import ForgeError, Plugin
from forge_train.config.sections import CORE_SECTIONS
from forge_train.contract import hookspecs
from forge_train.contract.plugin import PROJECT
from forge_train.contract.reference import PluginRef
from forge_train.registry.discovery import DISTRIBUTION, discover, load
from forge_train.registry.write import describe_type, field_docs

log = logging.getLogger("mkdocs.hooks.forge")

ROOT = Path(__file__).parents[1]


# -- what mkdocs calls ------------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    for entry in typing.cast(list[dict[str, Any]], config.nav):
        if "Hooks" in entry:
            entry["Hooks"] += [{name: f"hooks/{name}.md"} for name in hookspecs.KINDS]
        if "Plugins" in entry:
            entry["Plugins"] += [{found.name: f"plugins/{found.name}.md"} for found in builtin()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for found in builtin():
        try:
            text = plugin_page(found, load(found))
        except ForgeError as error:
            log.warning("no page for the plugin %r: %s", found.name, error)
            text = f"# {found.name}\n\nThis plugin could not be imported.\n"
        files.append(File.generated(config, f"plugins/{found.name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    for name, make in LISTS.items():
        marker = f"<!-- generate: {name} -->"
        if marker in markdown:
            markdown = markdown.replace(marker, make())
    return markdown


# -- pages and lists --------------------------------------------------------------------------------------------------


def builtin() -> list[PluginRef]:
    return [found for found in discover() if found.distribution == DISTRIBUTION]


def plugin_page(found: PluginRef, plugin: type[Plugin]) -> str:
    summary, _, rest = inspect.cleandoc(plugin.__doc__ or "").partition("\n")
    hooks = [name for name in hookspecs.KINDS if hasattr(getattr(plugin, name, None), f"{PROJECT}_impl")]
    facts = [
        f"Hooks: {', '.join(f'[`{name}`](../hooks/{name}.md)' for name in hooks)}.",
        f'Enable it with `--plugins {found.name}` or `plugins = ["{found.name}"]`.',
    ]
    facts += [f"Requires: {', '.join(f'`{name}`' for name in plugin.requires)}."] if plugin.requires else []
    facts += [f"Conflicts with: {', '.join(f'`{name}`' for name in plugin.conflicts)}."] if plugin.conflicts else []
    facts += [f"Needs `{module}`: `{command}`." for module, command in plugin.needs.items()]
    options = table(plugin.Config)
    parts = [
        f"# {found.name}",
        summary,
        rest.strip(),
        "\n".join(f"- {fact}" for fact in facts),
        f"## `[{found.name}]`",
        options or "No options.",
        f"Source: `{found.object}`",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def list_hooks() -> str:
    rows = ["| hook | kind | what it is |", "|---|---|---|"]
    for name, kind in hookspecs.KINDS.items():
        kind_text = f"{kind}, may stay empty" if name in hookspecs.OPTIONAL else kind
        rows.append(f"| [`{name}`]({name}.md) | {kind_text} | {first_line(getattr(hookspecs, name))} |")
    return "\n".join(rows)


def list_plugins() -> str:
    rows = ["| plugin | what it is |", "|---|---|"]
    rows += [f"| [`{found.name}`]({found.name}.md) | {found.summary} |" for found in builtin()]
    return "\n".join(rows)


def list_sections() -> str:
    return "\n\n".join(
        f"### `[{name}]`\n\n{first_line(section)}\n\n{table(section)}" for name, section in CORE_SECTIONS.items()
    )


def list_laws() -> str:
    rows = ["| law | test | what it says of itself |", "|---|---|---|"]
    for file in sorted((ROOT / "tests" / "laws").glob("test_law_*.py")):
        number = int(file.stem.split("_")[2])
        says = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        rows.append(f"| {number} | `{file.relative_to(ROOT)}` | {says} |")
    return "\n".join(rows)


LISTS = {"hooks": list_hooks, "laws": list_laws, "plugins": list_plugins, "sections": list_sections}


def first_line(thing: object) -> str:
    return inspect.cleandoc(getattr(thing, "__doc__", None) or "").partition("\n")[0]


# -- options ----------------------------------------------------------------------------------------------------------


def table(section: type) -> str:
    """The options of a section as a table, or the empty string where it has none."""
    head = ["| option | type | default | what it is |", "|---|---|---|---|"]
    body = [f"| {' | '.join(row)} |" for row in rows(section)]
    return "\n".join(head + body) if body else ""


def rows(section: type, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    docs = field_docs(section)
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        name, text = prefix + field.name, docs.get(field.name, "").replace("|", "\\|")
        if dataclasses.is_dataclass(inner := hints[field.name]):
            yield f"`{name}`", "table", "", text
            yield from rows(typing.cast(type, inner), f"{name}.")
        else:
            yield f"`{name}`", f"`{describe_type(section, field.name)}`", default(field), text


def default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{toml(field.default)}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{toml(field.default_factory())}`"
    return "required"


def toml(value: Any) -> str:
    """A value as one writes it in the configuration; None, which TOML lacks, is `none`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(toml, value))}]"
    return str(value)
