"""Who may import whom, read from the source: packages first, then the rooms of the kernel.

Imports count wherever they stand, in functions and under `TYPE_CHECKING` too: a type is a dependency as well.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from forge_train.mesh import axes
from forge_train.plugin import hookspecs

ROOT = Path(__file__).parents[1]
KERNEL, KIT, TOOLS, PLUGINS = "forge_train", "forge_train_kit", "forge_train_tools", "forge_train_plugins"
CLI, CONTRIB, TESTING = "forge_train_cli", "forge_train_contrib", "forge_train_tools.testing"
FOLDERS = {KERNEL: "core", KIT: "core", TOOLS: "core", PLUGINS: "plugins", CLI: "cli", CONTRIB: "contrib"}
MAY_IMPORT = {
    KERNEL: set[str](),
    KIT: {KERNEL},
    TOOLS: {KERNEL, KIT},
    TESTING: {KERNEL, KIT, TOOLS},  # is a tool, and built on the others
    PLUGINS: {KERNEL, KIT, TOOLS},
    CLI: {KERNEL, KIT, TOOLS, TESTING},
    CONTRIB: {KERNEL, KIT, TOOLS},
}
ROOMS = (
    "base",
    "mesh",
    "config",
    "run",
    "contract",
    "plugin",
    "registry",
    "compose",
    "store",
    "checkpoint",
    "step",
    "loop",
    "engine",
)
"""The rooms of the kernel. Each imports only those before it."""


def imports_of(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that a module in `package` imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, [above, node.module]))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


@cache
def forge_imports() -> list[tuple[str, str, str]]:
    """`file:line`, the importing module, and the name that it imports, for all imports within forge."""
    found = []
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder / package).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            home = ".".join(parts[:-1])
            module = home if parts[-1] == "__init__" else ".".join(parts)
            for line, name in imports_of(path.read_text(encoding="utf-8"), home):
                if name.split(".")[0] in FOLDERS:
                    found.append((f"{path.relative_to(ROOT)}:{line}", module, name))
    return found


def package_of(module: str) -> str:
    """The package that a module is judged as part of."""
    return TESTING if module.startswith(TESTING) else module.split(".", maxsplit=1)[0]


def room(module: str) -> str:
    """The file or folder directly in its package that a dotted name belongs to, or the empty string."""
    return [*module.split("."), ""][1]


def unit(module: str) -> str:
    """The plugin, or the part of one, that a dotted name belongs to: below its room, if the package has rooms."""
    first, *below = [*module.split(".")[1:], ""]
    return below[0] if module.startswith(PLUGINS) and (ROOT / "plugins" / PLUGINS / first).is_dir() else first


def room_faults(imports: Iterable[tuple[str, str, str]]) -> list[str]:
    """Imports of the kernel that lead to a later room, or out of the rooms."""
    wrong = []
    for where, module, name in imports:
        here, there = room(module), room(name)
        if not (module.startswith(f"{KERNEL}.") and name.startswith(f"{KERNEL}.")):
            continue
        if there not in (here, *ROOMS[: ROOMS.index(here)], "__version__"):
            wrong.append(f"{where}: {module} imports {name}")
    return wrong


def test_reads_every_form_of_import() -> None:
    source = "import a.b\nfrom c import d\nfrom . import e\nfrom ..f import g\ndef h():\n    from .i import j"
    assert [name for _, name in imports_of(source, "p.q")] == ["a.b", "c.d", "p.q.e", "p.f.g", "p.q.i.j"]


def package_faults(imports: Iterable[tuple[str, str, str]]) -> list[str]:
    """Imports of a package that does not lie below."""
    return [
        f"{where}: {module} imports {name}"
        for where, module, name in imports
        if package_of(name) not in MAY_IMPORT[package_of(module)] | {package_of(module)}
    ]


def test_a_package_imports_only_what_lies_below_it() -> None:
    assert package_faults(forge_imports()) == []


def test_sees_the_kernel_importing_tools() -> None:
    fault = ("engine.py:1", f"{KERNEL}.engine", f"{TOOLS}.planning.plan")
    tests = ("testing/agreement.py:1", f"{TESTING}.agreement", f"{TOOLS}.verification")
    back = ("verification/record.py:1", f"{TOOLS}.verification.record", f"{KERNEL}.step.step")
    assert package_faults([fault, tests, back]) == [f"engine.py:1: {KERNEL}.engine imports {TOOLS}.planning.plan"]


def test_no_file_of_the_core_is_longer_than_a_sitting() -> None:
    files = sorted((ROOT / "core").rglob("*.py"))
    sizes = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {name: size for name, size in sizes.items() if size > 300} == {}


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
    """A module or folder whose name begins with `_` is part of the one plugin that imports it. Hook specs are there for
    all plugins."""
    inside = [
        line for line in forge_imports() if line[1].startswith(f"{package}.") and line[2].startswith(f"{package}.")
    ]
    inside = [line for line in inside if not line[2].startswith(spec_modules())]
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


def test_the_rooms_of_the_kernel_form_no_circle() -> None:
    assert room_faults(forge_imports()) == []


def circles(edges: Iterable[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Modules that reach themselves by their imports, each circle sorted by name."""
    after: dict[str, set[str]] = {}
    for module, name in edges:
        after.setdefault(module, set()).add(name)

    def reached(module: str) -> set[str]:
        found, ahead = set[str](), [module]
        while ahead:
            new = after.get(ahead.pop(), set()) - found
            found |= new
            ahead += new
        return found

    reach = {module: reached(module) for module in after}
    return sorted({tuple(sorted(b for b in reach[a] if a in reach.get(b, ()))) for a in reach if a in reach[a]})


def kernel_modules() -> Iterator[tuple[str, str]]:
    """Importing and imported module, for all imports within the kernel."""
    home = ROOT / "core"
    files = [path.relative_to(home).with_suffix("").parts for path in (home / KERNEL).rglob("*.py")]
    modules = {".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in files} - {KERNEL}
    for _, module, name in forge_imports():
        target = name if name in modules else name.rpartition(".")[0]
        if module in modules and target in modules and target != module:
            yield module, target


def test_no_module_of_the_kernel_imports_itself_by_way_of_others() -> None:
    assert circles(kernel_modules()) == []


def test_sees_a_circle_of_modules() -> None:
    edges = [("a", "b"), ("b", "c"), ("c", "b"), ("d", "e"), ("e", "f"), ("f", "d"), ("f", "a")]
    assert circles(edges) == [("b", "c"), ("d", "e", "f")]


def test_every_file_of_the_kernel_lies_in_a_room() -> None:
    found = {path.stem for path in (ROOT / "core" / KERNEL).iterdir() if path.name != "__pycache__"}
    assert found - {"__init__", "py"} == set(ROOMS)


MOST_FILES = 12
"""Files that a room of the kernel may have, with its `__init__.py`."""


def test_no_room_of_the_kernel_has_more_than_twelve_files() -> None:
    sizes = {name: len([*(ROOT / "core" / KERNEL / name).rglob("*.py")]) for name in ROOMS}
    assert {name: size for name, size in sizes.items() if size > MOST_FILES} == {}


def test_sees_a_circle() -> None:
    fault = ("base/errors.py:1", f"{KERNEL}.base.errors", f"{KERNEL}.step.step")
    fine = ("engine.py:1", f"{KERNEL}.engine", f"{KERNEL}.loop.training.Training")
    assert room_faults([fault, fine]) == [f"base/errors.py:1: {KERNEL}.base.errors imports {KERNEL}.step.step"]


KERNEL_FILES, KERNEL_LINES = 78, 7_000
"""Files of the kernel, and their lines of code. Both may only fall."""
MOST_HOOKS, MOST_LINES = 18, 75
"""Hooks that the kernel may declare, and the lines of code in which it does. Both may only fall."""


def code_lines(source: str) -> int:
    """Lines without blanks, comments and docstrings."""
    prose = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(source.splitlines(), 1)
    return sum(
        number not in prose and not line.strip().startswith("#") and bool(line.strip()) for number, line in lines
    )


def test_the_kernel_declares_few_hooks_in_few_lines() -> None:
    source = (ROOT / "core" / KERNEL / "plugin" / "hookspecs.py").read_text(encoding="utf-8")
    assert len(hookspecs.SPECS) <= MOST_HOOKS
    assert code_lines(source) <= MOST_LINES


def test_the_kernel_only_shrinks() -> None:
    files = [*(ROOT / "core" / KERNEL).rglob("*.py")]
    assert len(files) <= KERNEL_FILES
    assert sum(code_lines(file.read_text(encoding="utf-8")) for file in files) <= KERNEL_LINES


def test_counts_lines_of_code() -> None:
    assert code_lines('"""A\nB."""\n\n# c\nx = 1  # d\n\n\ndef f():\n    """E."""\n    return """g\nh"""\n') == 4


@pytest.mark.parametrize("package", [PLUGINS, CONTRIB])
def test_a_plugin_uses_of_the_core_what_anyone_may(package: str) -> None:
    """What begins with `_` is out of a third party's reach, so it is out of a built-in plugin's too."""
    wrong = [
        f"{where}: {module} imports {name}"
        for where, module, name in forge_imports()
        if module.split(".")[0] == package and name.startswith((f"{KERNEL}.", f"{KIT}.", f"{TOOLS}."))
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


AXES = {"tp", "cp", "ep", "pp"}
"""Mesh axes are the kernel's; the plugins that cover some of them bear their names."""
WORDS = {
    "anomaly",
    "auto",
    "capture",
    "compile",
    "console",
    "constant",
    "copies",
    "eager",
    "freeze",
    "hf",
    "image",
    "linear",
    "mfu",
    "mixture",
    "multimodal",
    "precision",
    "prefix",
    "pretrained",
    "resources",
    "sample",
    "sequential",
    "signals",
    "statistics",
    "tensorboard",
    "text",
    "tokenizer",
    "tokens",
    "video",
}
"""Names of plugins that are ordinary words, or libraries, too."""


def entry_points(group: str) -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: dict[str, str] = project["project"]["entry-points"][group]
    return found


def plugin_names() -> set[str]:
    return set(entry_points("forge_train.plugins"))


def spec_modules() -> tuple[str, ...]:
    return tuple(entry_points("forge_train.hookspecs").values())


def named_in(source: str, names: set[str]) -> list[tuple[int, str]]:
    """Line and name of every string (docstrings left out) and identifier that has a plugin's name as a word."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            text = node.value
        elif isinstance(node, (ast.Name, ast.Attribute, ast.FunctionDef, ast.ClassDef, ast.arg)):
            text = next(str(getattr(node, key)) for key in ("id", "attr", "name", "arg") if hasattr(node, key))
        found += [(getattr(node, "lineno", 0), word) for word in re.findall(r"\w+", text.lower()) if word in names]
    return found


def test_kernel_and_tools_name_no_technique() -> None:
    """What they must know of one, its plugin states (the fact `verify.rounds`), or a file of data holds."""
    names = plugin_names() - AXES - WORDS
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "core").rglob("*.py"))
        for line, name in named_in(path.read_text(encoding="utf-8"), names)
    ]
    assert wrong == []


def test_sees_a_technique() -> None:
    source = 'def f(fp8):\n    """About moe."""\n    return f"try --plugins {fp8}, moe"'
    assert {name for _, name in named_in(source, {"fp8", "moe"})} == {"fp8", "moe"}


def axis_lists(source: str) -> list[int]:
    """Lines of tuples, lists and sets that spell out three or more mesh axes."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Tuple, ast.List, ast.Set))
        if sum(isinstance(one, ast.Constant) and one.value in axes.AXES for one in node.elts) > 2
    ]


def test_only_the_table_lists_the_mesh_axes() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for package, folder in FOLDERS.items()
        for path in sorted((ROOT / folder / package).rglob("*.py"))
        for line in axis_lists(path.read_text(encoding="utf-8"))
    ]
    assert wrong == []
    assert axis_lists('A = ("tp", "cp", "pp")') == [1]


def axes_named_in(source: str) -> list[tuple[int, str]]:
    """Line and name of every attribute, and every word of a string (docstrings left out), that names a mesh axis."""
    names = {*axes.CONFIGURED, *axes.FLATTENED_EXPERT, "efsdp", axes.EXPERT}
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        (node.lineno, word)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Attribute, ast.Constant)) and id(node) not in prose
        for word in re.findall(r"\w+", node.attr if isinstance(node, ast.Attribute) else str(node.value))
        if word in names
    ]


def test_the_kernel_asks_the_table_instead_of_naming_an_axis() -> None:
    """In `mesh` are the table, and the rules between Forge's axes."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "core" / KERNEL).rglob("*.py"))
        if path.parent.name != "mesh"
        for line, name in axes_named_in(path.read_text(encoding="utf-8"))
    ]
    assert wrong == []


def test_sees_the_name_of_an_axis() -> None:
    source = 'def f(layout):\n    """About tp."""\n    return layout.pp, "ep", f"parallel.cp = {layout.world}"'
    assert {name for _, name in axes_named_in(source)} == {"pp", "ep", "cp"}


def test_no_package_takes_a_general_name() -> None:
    assert [folder for folder in FOLDERS.values() if (ROOT / folder / "__init__.py").exists()] == []


def test_every_file_of_tests_has_a_name_of_its_own() -> None:
    """Without packages, pytest can't import two files of one name."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
