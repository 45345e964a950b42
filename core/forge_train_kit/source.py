"""Source of plugins, read without importing them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from forge_train.base.names import PluginRef, split
from forge_train_kit.capabilities import KernelCapabilities

if TYPE_CHECKING:
    import ast

_BASES = ("Plugin", "Tracker")
_NO_SUMMARY = "–"
_SUMMARY = re.compile(r"\A\s*\n\s+r?(?:\"\"\"|''')(.+?)(?:\"\"\"|'''|\n)")
_HEAD = re.compile(r"^class (\w+)\(([^)]*)\):", re.MULTILINE)
_END = re.compile(r"^\S", re.MULTILINE)


class Source:
    """Source of a plugin's class: of the first plugin class of a file, if the reference names none."""

    def __init__(self, ref: PluginRef) -> None:
        self._name = split(ref.object)[1]
        file = ref.file
        self._text = file.read_text(encoding="utf-8", errors="replace") if file and file.is_file() else ""

    @cached_property
    def _body(self) -> str:
        """The body of the class. Uses regular expressions: `ast` is 70 times slower."""
        for head in _HEAD.finditer(self._text):
            if head[1] == self._name if self._name else any(base in head[2] for base in _BASES):
                end = _END.search(self._text, head.end())
                return self._text[head.end() : end.start() if end else len(self._text)]
        return ""

    @property
    def summary(self) -> str:
        """The first line of the class's docstring; `–` where there is none to be found."""
        match = _SUMMARY.search(self._body)
        return match.group(1).strip() if match else _NO_SUMMARY

    @property
    def hooks(self) -> tuple[str, ...]:
        """The hooks that the class implements itself."""
        return tuple(re.findall(r"^    @hookimpl\b.*\n(?:    @.*\n)*    def (\w+)", self._body, re.MULTILINE))

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases of its transforms, as far as the class writes `Phase.NAME` out."""
        return tuple(re.findall(r"\bPhase\.([A-Z0-9]+)\b", self._body))

    def node(self, word: str) -> ast.ClassDef | None:
        """The syntax of the class; None if the file does not contain a word, or is not Python."""
        if word not in self._text:  # parsing all plugins takes long
            return None
        named = (one for one in _classes(self._text) if (one.name == self._name if self._name else _is_plugin(one)))
        return next(named, None)

    def assigned(self, attribute: str, word: str = "") -> ast.expr | None:
        """The expression that the class's own body assigns to an attribute.

        Args:
            attribute: to look for.
            word: a file without it is not parsed; the attribute if empty.
        """
        import ast

        node = self.node(word or attribute)
        for one in node.body if node else ():
            if not isinstance(one, (ast.Assign, ast.AnnAssign)):
                continue
            targets, value = one.targets if isinstance(one, ast.Assign) else [one.target], one.value
            if any(isinstance(target, ast.Name) and target.id == attribute for target in targets):
                return value
        return None

    @property
    def kernel_capabilities(self) -> KernelCapabilities | None:
        """The class's `kernel_capabilities`; None where they are not written as keywords with literals."""
        import ast

        call = self.assigned("kernel_capabilities")
        if not isinstance(call, ast.Call) or call.args:
            return None
        try:
            return KernelCapabilities(**{str(one.arg): ast.literal_eval(one.value) for one in call.keywords})
        except (TypeError, ValueError):  # an unknown capability, or a value that is no literal
            return None

    @property
    def devices(self) -> tuple[str, ...]:
        """The class's `devices`; empty where they are not written as literals."""
        import ast

        value = self.assigned("devices")
        try:
            return tuple(map(str, ast.literal_eval(value))) if value is not None else ()
        except (TypeError, ValueError):
            return ()

    def fact(self, name: str) -> Any:
        """A literal of the class's `facts`; None if it is not stated there."""
        return dict(_literals(self.assigned("facts", name))).get(name)


@lru_cache(maxsize=16)  # a process that resolves several configurations asks for the same few again
def _classes(text: str) -> tuple[ast.ClassDef, ...]:
    """The classes of a file; none if it is not Python."""
    import ast  # a listing does without

    try:
        return tuple(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    except (SyntaxError, ValueError):
        return ()


def _literals(value: ast.expr | None) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a dictionary whose key and value are literals."""
    import ast

    if isinstance(value, ast.Dict):
        for key, item in zip(value.keys, value.values, strict=True):
            if key is None:  # `**other`
                continue
            try:
                yield ast.literal_eval(key), ast.literal_eval(item)
            except ValueError:
                continue


def _is_plugin(node: ast.ClassDef) -> bool:
    import ast

    return any(name in ast.unparse(base) for base in node.bases for name in _BASES)
