"""Who may import whom, read from the source: cli → core, plugins → core, contrib → core, core → none of them.

Imports count wherever they stand, in functions and under `TYPE_CHECKING` too: a type is a dependency as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE, PLUGINS, CLI, CONTRIB = "forge_train", "forge_train_plugins", "forge_train_cli", "forge_train_contrib"
FOLDERS = {CORE: "core", PLUGINS: "plugins", CLI: "cli", CONTRIB: "contrib"}
MAY_IMPORT = {CORE: set[str](), PLUGINS: {CORE}, CLI: {CORE}, CONTRIB: {CORE}}


def imports_of(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that a module in `package` imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, [above, node.module]))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def forge_imports() -> Iterator[tuple[str, str, str]]:
    """`file:line`, the importing module, and the name that it imports, for all imports within forge."""
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder / package).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            home = ".".join(parts[:-1])
            module = home if parts[-1] == "__init__" else ".".join(parts)
            for line, name in imports_of(path.read_text(encoding="utf-8"), home):
                if name.split(".")[0] in FOLDERS:
                    yield f"{path.relative_to(ROOT)}:{line}", module, name


IMPORTS = list(forge_imports())


def unit(module: str) -> str:
    """The file or folder directly in the package that a dotted name belongs to, or the empty string."""
    return [*module.split("."), ""][1]


def test_reads_every_form_of_import() -> None:
    source = "import a.b\nfrom c import d\nfrom . import e\nfrom ..f import g\ndef h():\n    from .i import j"
    assert [name for _, name in imports_of(source, "p.q")] == ["a.b", "c.d", "p.q.e", "p.f.g", "p.q.i.j"]


@pytest.mark.parametrize("package", FOLDERS)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package}
    wrong = [
        f"{where}: {module} imports {name}"
        for where, module, name in IMPORTS
        if module.split(".")[0] == package and name.split(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def owners_of(edges: set[tuple[str, str]]) -> dict[str, set[str]]:
    """The plugins that each unit is part of: itself, or for one that begins with `_`, all that import it."""
    owners = {name: set() if name.startswith("_") else {name} for edge in edges for name in edge}
    for _ in owners:  # a part may be reached through other parts
        for importer, imported in edges:
            if imported.startswith("_"):
                owners[imported] |= owners[importer]
    return owners


@pytest.mark.parametrize("package", [PLUGINS, CONTRIB])
def test_a_plugin_imports_no_other_plugin(package: str) -> None:
    """A module or folder whose name begins with `_` is part of the one plugin that imports it."""
    inside = [line for line in IMPORTS if line[1].startswith(f"{package}.") and line[2].startswith(f"{package}.")]
    owners = owners_of({(unit(module), unit(name)) for _, module, name in inside})
    wrong = [f"{package}.{part} is part of {', '.join(sorted(of))}" for part, of in owners.items() if len(of) > 1]
    wrong += [
        f"{where}: {module} imports {name}"
        for where, module, name in inside
        if owners[unit(module)] != owners[unit(name)]
    ]
    assert not wrong, "\n".join(dict.fromkeys(wrong))


def test_tells_parts_from_plugins() -> None:
    assert owners_of({("a", "_x"), ("_x", "_y"), ("_y", "a"), ("b", "_y")}) == {
        "a": {"a"},
        "b": {"b"},
        "_x": {"a"},
        "_y": {"a", "b"},
    }


@pytest.mark.parametrize("package", [PLUGINS, CONTRIB])
def test_a_plugin_uses_of_the_core_what_anyone_may(package: str) -> None:
    """What begins with `_` is out of a third party's reach, so it is out of a built-in plugin's too."""
    wrong = [
        f"{where}: {module} imports {name}"
        for where, module, name in IMPORTS
        if module.split(".")[0] == package and name.startswith(f"{CORE}.")
        if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_core_names_no_plugin_package() -> None:
    """The core finds plugins through entry points; a dotted path in a string would be an import in disguise."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}"
        for path in sorted((ROOT / "core").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(PLUGINS)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_package_takes_a_general_name() -> None:
    assert [folder for folder in FOLDERS.values() if (ROOT / folder / "__init__.py").exists()] == []
