"""Plugins and keys of a run that belong to packages other than Forge."""

from __future__ import annotations

from collections.abc import Iterator, Set

from forge_train.config.tree import Key, Tree
from forge_train.mesh.axes import CONFIGURED
from forge_train.plugin.calls import implemented
from forge_train.registry.declared import spec_modules
from forge_train.registry.discovery import DISTRIBUTION, discover, load
from forge_train_kit.axes import installed


def answering_others(names: Set[str]) -> Iterator[str]:
    """Those that implement hooks of other packages, whose evaluations may need them though they change no number."""
    others = {name for module in spec_modules() if module.distribution != DISTRIBUTION for name in module.declares}
    known = {found.name: found for found in discover()} if others else {}
    return (name for name in names & known.keys() if implemented(load(known[name])) & others)


def of_gone_packages(tree: Tree, kept: Set[str]) -> Iterator[Key]:
    """Keys of axes, and of defaults of slots, that no installed package declares; not of defaults that are kept."""
    slots = {name for module in spec_modules() for name in module.declares}
    axes = {*CONFIGURED, *installed()}
    for key, value in tree.values.items():
        match key:
            case "defaults", name if name not in slots and str(value.value) not in kept:
                yield key
            case "parallel", name if name not in axes:
                yield key
