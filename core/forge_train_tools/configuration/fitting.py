"""Plugins that would fit where two do not, read from their source without importing them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from forge_train.registry.discovery import discover
from forge_train_kit.source import Source

_ASKED = "Enable another plugin for one of them"
_MISFIT = re.compile(rf"takes (.+) from the slot '(\w+)', but plugin '\w+' .* gives '(\w+)'\. {_ASKED}(?=\.)")
"""A sentence of `forge_train_kit.fitting.misfits`: what is taken, the slot, and what is given."""


def named(text: str) -> str:
    """Messages, those about plugins that do not fit with the names of others that do."""
    return _MISFIT.sub(lambda found: found[0] + _such_as(*found.groups()), text)


def _such_as(taken: str, slot: str, given: str) -> str:
    names = sorted({*_fitting(slot, set(re.findall(r"\w+", taken.replace(" or ", " "))), given)})
    return f", such as {' or '.join(filter(None, (', '.join(names[:-1]), names[-1])))}" if names else ""


def _fitting(slot: str, taken: set[str], given: str) -> Iterator[str]:
    """Plugins that give a slot what is taken, or take what is given."""
    for ref in discover():
        source = Source(ref)
        if _literal(source, "gives").get(slot) in taken or given in _literal(source, "takes").get(slot, ()):
            yield ref.name


def _literal(source: Source, attribute: str) -> dict[str, str]:
    """A table that a plugin's class writes out; empty if it has none."""
    found = source.assigned(attribute)
    try:
        return dict(ast.literal_eval(found)) if found is not None else {}
    except (ValueError, TypeError):
        return {}
