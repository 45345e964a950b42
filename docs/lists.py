"""What pages take from the code: lists of hooks, sections, plugins and laws, and a page for each built-in plugin."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import typing
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import forge_train_kit.metrics
from forge_train import Plugin
from forge_train.base.names import PluginRef
from forge_train.config.sections import CORE_SECTIONS
from forge_train.plugin.plugin import PROJECT
from forge_train.registry.declared import Specs
from forge_train.registry.discovery import DISTRIBUTION, discover, load
from forge_train_kit.facts import Fact, stated
from forge_train_kit.source import Source
from forge_train_kit.tracking import Tracker
from forge_train_tools.configuration.comments import describe_type, field_docs
from forge_train_tools.configuration.known_facts import GROUP

ROOT = Path(__file__).parents[1]
HOOKS = Specs([])
"""Those that Forge's own packages declare."""
ELSEWHERE = {2: "tests/dist/test_compositions.py", 7: "tests/tools/test_conformance.py"}
"""Laws whose tests need several ranks, or every plugin."""


def builtin() -> list[PluginRef]:
    return [found for found in discover() if found.distribution == DISTRIBUTION]


def plugin_page(found: PluginRef, plugin: type[Plugin]) -> str:
    summary, _, rest = inspect.cleandoc(plugin.__doc__ or "").partition("\n")
    hooks = [name for name in HOOKS if hasattr(getattr(plugin, name, None), f"{PROJECT}_impl")]
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


def hooks() -> str:
    rows = ["| hook | kind | declared by | what it is |", "|---|---|---|---|"]
    for name, spec in HOOKS.items():
        kind = f"{spec.kind}, may stay empty" if spec.optional and spec.kind == "slot" else spec.kind
        rows.append(f"| [`{name}`]({name}.md) | {kind} | `{spec.function.__module__}` | {first_line(spec.function)} |")
    return "\n".join(rows)


def facts() -> str:
    """Every fact that Forge's tools declare, who reads it, and the built-in plugins that state it."""
    readers: dict[str, list[str]] = defaultdict(list)
    for package in ("core", "cli"):
        for file in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            module = ".".join(file.relative_to(ROOT / package).with_suffix("").parts).removesuffix(".__init__")
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[-1] == "facts":
                    for alias in node.names:
                        readers[alias.name].append(f"`{module}`")
    rows = ["| fact | type | meaning | read by | stated by |", "|---|---|---|---|---|"]
    plugins = {found.name: stated(load(found)) for found in builtin()}
    points = [one for one in entry_points(group=GROUP) if one.dist and one.dist.name == DISTRIBUTION]
    homes = sorted({point.value for point in points})
    for name, (constant, fact) in sorted(
        (fact.name, (constant, fact))
        for module in map(importlib.import_module, homes)
        for constant, fact in vars(module).items()
        if isinstance(fact, Fact)
    ):
        who = ", ".join(f"[`{one}`](plugins/{one}.md)" for one, facts in plugins.items() if facts.get(name))
        read_by = ", ".join(readers[constant])
        rows.append(f"| `{name}` | `{fact.described}` | {fact.meaning} | {read_by} | {who or '–'} |")
    return "\n".join(rows)


def plugins() -> str:
    rows = ["| plugin | what it is |", "|---|---|"]
    rows += [f"| [`{found.name}`]({found.name}.md) | {Source(found).summary} |" for found in builtin()]
    return "\n".join(rows)


def metrics() -> str:
    """Every metric that comes with Forge, and what `update` takes."""
    rows = ["| metric | `update` | what it is |", "|---|---|---|"]
    for name in forge_train_kit.metrics.__all__:
        cls = getattr(forge_train_kit.metrics, name)
        takes = [one for one in inspect.signature(cls.update).parameters.values() if one.name != "self"]
        shown = ", ".join(one.name if one.default is one.empty else f"{one.name}={one.default}" for one in takes)
        rows.append(f"| [`{name}`](../api/forge_train_kit.md#{name.lower()}) | `{shown}` | {first_line(cls)} |")
    return "\n".join(rows)


def trackers() -> str:
    """The built-in trackers, and how to install what they need."""
    rows = ["| plugin | what it does | install |", "|---|---|---|"]
    for found in builtin():
        if issubclass(plugin := load(found), Tracker):
            needs = ", ".join(f"`{command}`" for command in dict.fromkeys(plugin.needs.values()))
            row = f"[`{found.name}`](../plugins/{found.name}.md)", Source(found).summary, needs or "comes with Forge"
            rows.append(f"| {' | '.join(row)} |")
    return "\n".join(rows)


def sections() -> str:
    return "\n\n".join(
        f"### `[{name}]`\n\n{first_line(section)}\n\n{table(section)}" for name, section in CORE_SECTIONS.items()
    )


def laws() -> str:
    rows = ["| law | test | its docstring |", "|---|---|---|"]
    files = {int(file.stem.split("_")[2]): file for file in (ROOT / "tests" / "laws").glob("test_law_*.py")}
    for number, file in sorted((files | {law: ROOT / file for law, file in ELSEWHERE.items()}).items()):
        says = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]
        rows.append(f"| {number} | `{file.relative_to(ROOT)}` | {' '.join(says.split())} |")
    return "\n".join(rows)


def rooms() -> str:
    """The rooms of the kernel in the order of their imports, with one sentence each."""
    top = ROOT / "core" / "forge_train"
    layers = (ROOT / "tests" / "test_layers.py").read_text(encoding="utf-8")
    order = re.search(r"^ROOMS = (\(.*?\))$", layers, re.MULTILINE | re.DOTALL)
    names = ast.literal_eval(order[1]) if order else ()
    rows = [(room, top / room / "__init__.py" if (top / room).is_dir() else top / f"{room}.py") for room in names]
    return "\n".join(["| room | |", "|---|---|", *(f"| `{room}` | {_sentence(file)} |" for room, file in rows)])


def modules() -> str:
    """A table of modules for each room of the packages that plugins build on."""
    out: list[str] = []
    for package in ("forge_train", "forge_train_kit", "forge_train_tools"):
        top = ROOT / "core" / package
        folders = sorted({file.parent for file in top.rglob("*.py")})
        for folder in folders:
            files = [file for file in sorted(folder.glob("*.py")) if file.stem != "__init__"]
            if files:
                room = ".".join((package, *folder.relative_to(top).parts))
                out += [f"## `{room}`", "", *_about(folder), "| module | |", "|---|---|"]
                out += [f"| `{file.stem}` | {_sentence(file)} |" for file in files] + [""]
    return "\n".join(out).rstrip()


def _about(folder: Path) -> list[str]:
    sentence = _sentence(folder / "__init__.py")
    return [sentence, ""] if sentence else []


def _sentence(file: Path) -> str:
    """The first sentence of a module's docstring, with `|` escaped for a table."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=[.:]) (?=[A-Z])", " ".join(text.split("\n\n")[0].split()))[0].replace("|", "\\|")


def first_line(thing: object) -> str:
    return inspect.cleandoc(getattr(thing, "__doc__", None) or "").partition("\n")[0]


# -- options ----------------------------------------------------------------------------------------------------------


def table(section: type) -> str:
    """The options of a section as a table, those of a list's tables (`groups[].lr`) among them, or the empty string."""
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
            for item in filter(dataclasses.is_dataclass, typing.get_args(inner)):
                yield from rows(typing.cast(type, item), f"{name}[].")


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
