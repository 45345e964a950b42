"""Names with placeholders: `layers.{i}.mlp.{kind}` stands for every name of that form."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from forge_train.base.errors import ConfigError

_PLACEHOLDER = re.compile(r"\{(\w+)(\*?)\}")

Bindings = Mapping[str, str]
"""Placeholder → the text that replaces it."""


@dataclass(frozen=True)
class Template:
    """A name in which `{x}` stands for one part between dots, and `{x*}` for one or more parts."""

    text: str

    @cached_property
    def placeholders(self) -> frozenset[str]:
        return frozenset(found[1] for found in _PLACEHOLDER.finditer(self.text))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        pattern, seen, end = "", set[str](), 0
        for found in _PLACEHOLDER.finditer(self.text):
            name, several = found.groups()
            group = f"(?P={name})" if name in seen else f"(?P<{name}>{'.+' if several else '[^.]+'})"
            pattern += re.escape(self.text[end : found.start()]) + group
            seen.add(name)
            end = found.end()
        return re.compile(pattern + re.escape(self.text[end:]))

    def find(self, names: Iterable[str]) -> dict[str, Bindings]:
        """The names of this form, and the texts that replace the placeholders in each. A template without placeholders
        gives itself, whether it is among the names or not."""
        if not self.placeholders:
            return {self.text: {}}
        return {name: found.groupdict() for name in names if (found := self._pattern.fullmatch(name))}

    def fill(self, bindings: Bindings) -> str:
        return _PLACEHOLDER.sub(lambda found: bindings[found[1]], self.text)


@cache
def template(text: str) -> Template:
    return Template(text)


def same_placeholders(what: str, texts: Iterable[str]) -> None:
    """Raises ConfigError if the names have different placeholders: one could not be derived from the other."""
    first, *others = texts
    for other in others:
        if template(other).placeholders != template(first).placeholders:
            raise ConfigError(f"{what}: {first!r} and {other!r} have different placeholders.")
