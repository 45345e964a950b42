"""The API reference, from the public exports: signatures, fields and docstrings as they stand in the code."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from forge_train_tools.configuration.comments import field_docs

GROUPS = {
    "Plugins and their options": "Plugin hookimpl hookspec HookSpec section Gt Ge Lt Le Volatile FilePath Problem",
    "The run": "Axis Job Metric Bins Finished LogRecord Evaluation CheckpointEvent StepResult Update",
    "The model and what changes it": "Model Phase Transform Applied Init",
    "Inside the model": "attach_loss",
    "Errors": "ForgeError ConfigError PluginError CommunicationError DivergedError Failure",
}
"""Heading → names; what no heading names comes under the last one."""
OF_A_JOB = {
    "Config": "forge_train.config",
    "Hooks": "forge_train.plugin.job",
    "Run": "forge_train.run.run",
    "DistributedContext": "forge_train.mesh.distributed",
    "Control": "forge_train.run.control",
}
"""Classes of `Job`'s attributes, which `forge_train` does not export → modules for annotations."""
REST = "Protocols of slots and chains"
KIT = (
    "contract layers modules capabilities heads losses modalities tokenizer sections facts specialisation model optim "
    "metrics pipeline tracking activations state_map hf weights stores.elsewhere"
)
"""Modules of `forge_train_kit` with names for plugin authors."""


def kernel() -> str:
    """Return everything that `forge_train` exports, grouped."""
    package = importlib.import_module("forge_train")
    grouped = {heading: names.split() for heading, names in GROUPS.items()}
    named = {name for names in grouped.values() for name in names}
    public = [name for name in package.__all__ if not name.startswith("__")]
    if unknown := named - set(public):
        raise ValueError(f"not exported: {', '.join(sorted(unknown))}")
    grouped[REST] = [name for name in public if name not in named]
    parts = []
    for heading, names in grouped.items():
        parts.append(f"## {heading}")
        parts += [entry(name, getattr(package, name)) for name in names]
    parts += ["## Attributes of a job", "A plugin gets these from `job`; import their classes for annotations only."]
    homes = {name: importlib.import_module(home) for name, home in OF_A_JOB.items()}
    parts += [entry(f"{home.__name__}.{name}", getattr(home, name)) for name, home in homes.items()]
    return "\n\n".join(parts)


def kit() -> str:
    """Return what the modules of `forge_train_kit` export, module by module."""
    return "\n\n".join(_module(f"forge_train_kit.{name}") for name in KIT.split())


def tools() -> str:
    """Return what `forge_train_tools` and its test kit export."""
    return "\n\n".join(map(_module, ("forge_train_tools", "forge_train_tools.testing")))


def _module(name: str) -> str:
    module = importlib.import_module(name)
    parts = [f"## `{name}`", first(module), *(entry(one, getattr(module, one)) for one in module.__all__)]
    return "\n\n".join(filter(None, parts))


def entry(name: str, thing: Any) -> str:
    """One export."""
    parts = [f"### `{name}`"]
    if inspect.isclass(thing):
        parts += [text(thing), *_members(thing)]
    elif inspect.isfunction(thing):
        parts += [f"`{name}{_signature(thing)}`", text(thing)]
    else:
        parts += [f"`{name} = {_plain(thing)}`"]
    return "\n\n".join(filter(None, parts))


def _members(cls: type) -> Iterator[str]:
    if issubclass(cls, enum.Enum):
        yield ", ".join(f"`{member.name}` = {member.value}" for member in cls)
        return
    docs = field_docs(cls)
    names = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    names = [name for name in dict.fromkeys([*names, *getattr(cls, "__annotations__", {})]) if name[0] != "_"]
    hints = {
        name: getattr(hint, "__forward_arg__", hint)  # as NamedTuple keeps them
        for base in reversed(cls.__mro__)
        for name, hint in getattr(base, "__annotations__", {}).items()
    }
    if names:
        rows = [f"| `{name}` | `{_cell(hints.get(name, ''))}` | {_cell(docs.get(name, ''))} |" for name in names]
        yield "\n".join(["| | type | |", "|---|---|---|", *rows])
    methods = [*_methods(cls)]
    if methods:
        yield "\n".join(methods)


def _methods(cls: type) -> Iterator[str]:
    for name, member in vars(cls).items():
        if name.startswith("_") and name != "__call__":
            continue
        if isinstance(member, property):
            kind = _signature(member.fget).partition("->")[2].strip() if member.fget else ""
            yield f"- `{name}`: `{kind}`. {_line(member)}".rstrip()
        elif inspect.isfunction(member) and (name != "__call__" or text(member)):
            yield f"- `{name}{_signature(member)}`: {_line(member)}".rstrip(": ")


def _line(thing: Any) -> str:
    """Return a docstring as one line: its sections follow each other."""
    return re.sub(r"\s*\n(- )?\s*", " ", text(thing))


def _signature(function: Any) -> str:
    """As it is written: annotations are strings, and the quotes would only be in the way."""
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))
    return signature.replace("(self, ", "(").replace("(self)", "()")


def text(thing: Any) -> str:
    """A docstring as Markdown: its sections as lists."""
    if dataclasses.is_dataclass(thing) and (thing.__doc__ or "").startswith(f"{getattr(thing, '__name__', '')}("):
        return ""  # what dataclasses write where there is none
    doc = inspect.cleandoc(thing.__doc__ or "")
    lines = []
    section = False
    for line in doc.splitlines():
        if found := re.fullmatch(r"(Args|Returns|Raises|Yields):", line):
            lines += [f"{found[1]}:", ""]
            section = True
        elif section and (item := re.match(r"    (\*{0,2}[\w.]+): (.*)", line)):
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif section and line.startswith("        "):
            lines.append(f"  {line.strip()}")
        else:
            section = section and (not line or line.startswith("    "))
            lines.append(line)
    return _reflowed("\n".join(lines).strip())


def _reflowed(markdown: str) -> str:
    """Join the lines of each paragraph and of each item of a list; code stays as it is."""
    found: list[str] = []
    code = False
    for line in markdown.splitlines():
        fence = line.lstrip().startswith("```")
        joins = found and found[-1] and line.strip() and not (code or fence or found[-1].endswith("```"))
        if joins and not re.match(r"\s*([-|#>]|\d+\.) ?|    \S", line) and not found[-1].startswith(("    ", "|")):
            found[-1] += f" {line.strip()}"
        else:
            found.append(line)
        code ^= fence
    return "\n".join(found)


def first(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "").partition("\n")[0]


def _plain(thing: Any) -> str:
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", str(thing))


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|")
