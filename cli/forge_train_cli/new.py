"""`forge plugins new`."""

from __future__ import annotations

import keyword
from collections.abc import Sequence
from pathlib import Path

import click

from forge_train import __version__
from forge_train.base.errors import ConfigError
from forge_train.base.names import canonical, folder
from forge_train.plugin.plugin import API
from forge_train.registry.discovery import CONTRIB, RESERVED, discover

from .package_files import AGENTS, PYPROJECT, README, TEST, WORKFLOW
from .snippets import KIT, SNIPPETS, Snippet

OWN = ("plugins", "cli", "contrib", "testing")
"""Suffixes of forge's own packages."""
WIDTH = 88
"""The longest line to write."""
PLACEHOLDER = "Say here in one line what it does"
"""The beginning of a new plugin's docstring, which `forge plugins check` rejects."""


@click.command(short_help="Write a new plugin, ready to be installed.")
@click.argument("name")
@click.option("--contrib", is_flag=True, help="Write it into the installed checkout of forge.")
@click.option(
    "--hook",
    "hooks",
    multiple=True,
    type=click.Choice(sorted(SNIPPETS)),
    help="Start with this hook (may be repeated).",
)
@click.option("--dir", "home", default=".", metavar="DIR", help="Where to make the package's folder.")
def new(name: str, contrib: bool, hooks: tuple[str, ...], home: str) -> None:
    """Write the files of a plugin NAME: a section, a working hook, and a test of both.

    They form a package of its own (pyproject.toml, test, CI with the oldest and the newest Forge, a README with the
    steps before publishing, AGENTS.md), or with --contrib a file in forge's contrib folder. Existing files are never
    overwritten.
    """
    name = _valid(name)
    snippets = [SNIPPETS[hook] for hook in hooks or ("on_step",)]
    files = _contributed(name, snippets) if contrib else _package(name, snippets, Path(home))
    taken = [str(path) for path in files if path.exists()]
    if taken:
        raise ConfigError(f"Nothing was written, because these exist already: {', '.join(taken)}")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        click.echo(path)
    click.echo(click.style(f"\n{_next(name, contrib, Path(home))}", dim=True))


def _valid(name: str) -> str:
    """A plugin's name in its canonical spelling.

    Raises:
        ConfigError: for an invalid name, or one that is taken.
    """
    name = canonical(name)
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name) or name != name.lower():
        raise ConfigError(f"{name!r}: a plugin's name is lower-case letters, digits and -, like 'my-plugin'.")
    if name in RESERVED or name in OWN:
        raise ConfigError(f"{name!r} is reserved; choose another name.")
    for found in discover():
        if found.name == name:
            raise ConfigError(f"There is a plugin {found.label} already; choose another name.")
    return name


def _class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def source(name: str, snippets: Sequence[Snippet]) -> str:
    """The plugin's module."""
    hooked = sorted({"Plugin", "hookimpl", *(one for snippet in snippets for one in snippet.imports)})
    fields = "".join(snippet.fields for snippet in snippets)
    types = sorted({one for snippet in snippets for one in snippet.types})
    bodies = "\n".join(snippet.body for snippet in snippets)
    lines = ['"""Say here what the plugin is about."""', "", "from __future__ import annotations", ""]
    if "logging." in bodies:
        lines += ["import logging"]
    if "replace(" in bodies:
        lines += ["from dataclasses import replace"]
    typing = [
        "TYPE_CHECKING",
        *(["Annotated"] if "Annotated" in fields else []),
        *(["Any"] if "Any]" in bodies else []),
    ]
    lines += [f"from typing import {', '.join(typing)}", ""]
    names = sorted({*hooked, "section"}, key=lambda one: (one.upper() != one, not one[0].isupper(), one))
    lines += [*_import(names), "", "if TYPE_CHECKING:"]
    lines += ["    import torch", ""] if any(snippet.torch for snippet in snippets) else []
    lines += [*_import(types, "    "), "", ""]
    lines += [f"class {_class_name(name)}(Plugin):"]
    lines += [f'    """{PLACEHOLDER}: `forge plugins list` shows it."""', ""]
    lines += [f"    api = {API}", "", "    @section", "    class Config:"]
    lines += [fields.rstrip() or '        """No options yet."""', "", "    config: Config", ""]
    return "\n".join(lines) + f"\n{bodies}"


def _import(names: Sequence[str], indent: str = "") -> list[str]:
    """The imports of names of the kernel, and then of the kit."""
    homes: dict[str, list[str]] = {}
    for name in names:
        homes.setdefault(f"forge_train_kit.{KIT[name]}" if name in KIT else "forge_train", []).append(name)
    lines = []
    for home, own in sorted(homes.items()):
        line = f"{indent}from {home} import {', '.join(own)}"
        several = [f"{indent}from {home} import (", *(f"{indent}    {name}," for name in own), f"{indent})"]
        lines += [line] if len(line) <= WIDTH else several
    return lines


def _test(name: str, module: str) -> str:
    ours = "from forge_train_tools.testing import RunForge, assert_conforms\n"
    gap = "" if module.startswith(CONTRIB) else "\n"  # linters sort the one as third-party and the other as first-party
    return TEST.format(imports=f"{ours}{gap}from {module} import {_class_name(name)}\n", cls=_class_name(name))


def _package(name: str, snippets: Sequence[Snippet], home: Path) -> dict[Path, str]:
    dashed, module = name.replace("_", "-"), f"forge_train_{name}"
    root = home / f"forge-train-{dashed}"
    major, minor, _ = __version__.split(".", maxsplit=2)
    values = {
        "name": name,
        "dashed": dashed,
        "module": module,
        "cls": _class_name(name),
        "version": __version__,
        "next": f"{major}.{int(minor) + 1}" if major == "0" else f"{int(major) + 1}",
    }
    return {
        root / "pyproject.toml": PYPROJECT.format(**values),
        root / f"{module}.py": source(name, snippets),
        root / "tests" / f"test_{name}.py": _test(name, module),
        root / ".github" / "workflows" / "test.yml": WORKFLOW.format(**values),
        root / "README.md": README.format(**values),
        root / "AGENTS.md": AGENTS.format(**values),
        root / ".gitignore": "__pycache__/\ndist/\n.venv/\nruns/\n",
    }


def _contributed(name: str, snippets: Sequence[Snippet]) -> dict[Path, str]:
    """The files of a contributed plugin.

    Raises:
        ConfigError: if forge is not installed from a checkout.
    """
    package = folder(CONTRIB)
    root = package.parents[1] if package else None
    if package is None or root is None or package.parent.name != "contrib" or not (root / "tests").is_dir():
        raise ConfigError(
            f"--contrib writes into a checkout of forge, and this forge is installed in {package}: "
            "clone forge, `pip install -e .` there, or leave --contrib out."
        )
    return {
        package / f"{name}.py": source(name, snippets),
        root / "tests" / "contrib" / f"test_{name}.py": _test(name, f"{CONTRIB}.{name}"),
    }


def _next(name: str, contrib: bool, home: Path) -> str:
    if contrib:
        return f"Next: forge plugins check {name}; forge train --plugins {name}"
    where = home / f"forge-train-{name.replace('_', '-')}"
    return f"Next: forge plugins install -e {where}; forge plugins check {name}; forge train --plugins {name}"
