"""Every hook: who declares it, calls it and implements it, read from metadata and source. Nothing is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from forge_train.base.names import PluginRef, folder, is_file, locate, split
from forge_train.registry.declared import SpecModule, spec_modules
from forge_train.registry.discovery import discover

KERNEL = "forge_train"


@dataclass(frozen=True)
class Declaration:
    """A hook as the text of its module declares it."""

    name: str
    kind: str
    optional: bool
    summary: str


def declarations(module: SpecModule) -> dict[str, Declaration]:
    """The hooks of a module by name, read from its source."""
    found = {}
    for node in _Source(module.file, module.module).nodes:
        if not isinstance(node, ast.FunctionDef) or node.name not in module.declares:
            continue
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("hookspec"):
                options = {one.arg: ast.unparse(one.value) for one in call.keywords}
                kind = ast.unparse(call.args[0]) if call.args else options.get("kind", "")
                summary = (ast.get_docstring(node) or "").partition("\n")[0]
                optional = options.get("optional") == "True"
                found[node.name] = Declaration(node.name, kind.strip("'"), optional, summary)
    return found


@dataclass(frozen=True)
class Hook:
    """One row of the table."""

    spec: Declaration
    module: SpecModule
    callers: tuple[str, ...]
    """Plugins, and packages for code that is no plugin's."""
    plugins: tuple[str, ...]
    """Plugins that implement it."""


class _Source:
    """A source file, parsed when somebody looks into it."""

    def __init__(self, path: Path | None, module: str) -> None:
        self.module = module
        self.package = module if path and path.name == "__init__.py" else module.rpartition(".")[0]
        """The package that names in relative imports start from."""
        self.text = path.read_text(encoding="utf-8", errors="replace") if path and path.is_file() else ""

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of its syntax, from the outside inwards; nothing for a file with a mistake."""
        try:
            return list(ast.walk(ast.parse(self.text)))
        except (SyntaxError, ValueError):
            return []

    @cached_property
    def imported(self) -> list[tuple[str, str, str]]:
        """Module, name in it and name here of everything that is imported by name."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom):
                above = self.package.rsplit(".", node.level - 1)[0] if node.level else ""
                home = ".".join(filter(None, [above, node.module]))
                found += [(home, alias.name, alias.asname or alias.name) for alias in node.names]
        return found


def hooks() -> list[Hook]:
    """Every declared hook, the kernel's first."""
    modules, refs = spec_modules(), discover()
    implemented = {ref.name: implements(ref) for ref in refs}
    homes = [one.module for one in refs] + [one.module for one in modules]
    sources = list(_files({one.split(".")[0] for one in homes if not is_file(one)} | {"forge_train_cli"}))
    calls = {module: _callers(module, refs, sources) for module in modules}
    return [
        Hook(
            spec,
            module,
            tuple(sorted(calls[module].get(name, ()))),
            tuple(sorted(plugin for plugin, hooks in implemented.items() if name in hooks)),
        )
        for module in modules
        for name, spec in declarations(module).items()
    ]


def implements(ref: PluginRef) -> frozenset[str]:
    """The hooks that a plugin's class implements or inherits, as far as its source and its bases' show."""
    return frozenset(
        node.name
        for cls in lineage(ref)
        for node in cls.body
        if isinstance(node, ast.FunctionDef) and any("hookimpl" in ast.unparse(one) for one in node.decorator_list)
    )


def lineage(ref: PluginRef) -> Iterator[ast.ClassDef]:
    """The syntax of a plugin's class and then of its bases, as far as sources show; the kernel's own is left out."""
    return _lineage(_source(ref.file, ref.module), split(ref.object)[1])


def _lineage(source: _Source, name: str) -> Iterator[ast.ClassDef]:
    """A class and its bases; the first class of the file, without a name."""
    classes = {node.name: node for node in source.nodes if isinstance(node, ast.ClassDef)}
    name = name or next(iter(classes), "")
    if name not in classes:
        return
    yield classes[name]
    for base in map(ast.unparse, classes[name].bases):
        if base in classes:
            yield from _lineage(source, base)
        for home, given, own in source.imported:
            if own == base and home != KERNEL:
                yield from _lineage(_source(locate(home), home), given)


def _callers(module: SpecModule, refs: list[PluginRef], sources: list[_Source]) -> dict[str, set[str]]:
    """Hook of a module → who calls it. The kernel calls its own."""
    kernel = module.module.split(".")[0] == KERNEL
    found = {name: {KERNEL} if kernel else set[str]() for name in module.declares}
    for source in sources:
        if not (kernel and source.module.split(".")[0] == KERNEL):
            for name in _called(source, module, kernel=kernel):
                found[name] |= _owners(source.module, refs)
    return found


def _called(source: _Source, module: SpecModule, *, kernel: bool) -> set[str]:
    """The hooks of a module that a source file imports or, of its own, calls; the kernel's, as `job.hooks.name(…)`."""
    parent, _, last = module.module.rpartition(".")
    if kernel:
        return set(re.findall(r"\bhooks\.(\w+)\(", source.text)) & module.declares
    if source.module == module.module:
        calls = [node.func for node in source.nodes if isinstance(node, ast.Call)]
        return {node.id for node in calls if isinstance(node, ast.Name)} & module.declares
    if last not in source.text:
        return set()
    names = {given for home, given, _ in source.imported if home == module.module}
    aliases = {own for home, given, own in source.imported if (home, given) == (parent, last)} | {module.module}
    plain = [alias for node in source.nodes if isinstance(node, ast.Import) for alias in node.names]
    aliases |= {alias.asname for alias in plain if alias.asname and alias.name == module.module}
    attributes = [node for node in source.nodes if isinstance(node, ast.Attribute)]
    return (names | {node.attr for node in attributes if ast.unparse(node.value) in aliases}) & module.declares


def _files(names: Iterable[str]) -> Iterator[_Source]:
    """The source files of packages."""
    for top in sorted(names):
        root = folder(top)
        if root is None:  # a package of one module
            yield _source(locate(top), top)
            continue
        for path in sorted(root.rglob("*.py")):
            parts = (top, *path.relative_to(root).with_suffix("").parts)
            yield _source(path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts))


def _owners(dotted: str, refs: list[PluginRef]) -> set[str]:
    """The plugins that a module is part of, or its top package."""
    parts = dotted.split(".")
    for end in range(len(parts) - 1, -1, -1):
        home, stem = parts[:end], parts[end]
        names = {".".join([*home, one]) for one in (stem, stem.removeprefix("_"))}
        if owners := {ref.name for ref in refs if ref.module in names}:
            return owners
    return {parts[0]}


_source = cache(_Source)
