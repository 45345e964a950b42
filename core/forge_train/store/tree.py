"""A tree of plain JSON in which tensors are named and stored apart: how a checkpoint holds any state."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence, Set
from typing import Any

from torch import Tensor

from ..base.errors import PluginError
from ..base.strict_json import DEEPEST

TENSOR, TUPLE = "$tensor", "$tuple"
MODEL = "model."
"""Prefix of the names of a model's tensors in a checkpoint."""


def split(tree: Any, name: str, tensors: dict[str, Tensor], level: int = 2) -> Any:
    """The JSON of a state; its tensors go into `tensors` under dotted names that begin with `name`.

    Args:
        tree: the state. Of a tensor of a class of its own, the values are what its method `plain` gives.
        name: of it.
        tensors: takes the tensors.
        level: how deep in `state.json` it will be.

    Raises:
        PluginError: for a value that is neither a tensor nor JSON, or is nested too deeply to be read again.
    """
    if level > DEEPEST - 2:
        raise PluginError(
            f"The state {name[:200]!r} is nested deeper than {DEEPEST} levels, which can't be read again."
        )
    if isinstance(tree, Tensor):
        if name in tensors:
            raise PluginError(f"The state {name!r} holds two tensors of that name; keys with dots must not clash.")
        tensors[name] = (tree.plain() if hasattr(tree, "plain") else tree).detach()
        if type(tensors[name]) is not Tensor and not hasattr(tree, "device_mesh"):
            raise PluginError(
                f"The state {name!r} holds a {type(tree).__name__}, a tensor of a class of its own, which can't be "
                "read again; save the tensors that it is made of, or give it a method `plain() -> Tensor`."
            )
        return {TENSOR: name}
    if isinstance(tree, Mapping):
        if bad := [key for key in tree if not isinstance(key, str) or key in (TENSOR, TUPLE)]:
            raise PluginError(
                f"The state {name!r} has the key {bad[0]!r}; keys must be strings, and not those of core."
            )
        return {key: split(value, f"{name}.{key}", tensors, level + 1) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [split(value, f"{name}.{index}", tensors, level + 2) for index, value in enumerate(tree)]
        return {TUPLE: items} if isinstance(tree, tuple) else items
    if tree is None or isinstance(tree, (str, int, float, bool)):
        return tree
    raise PluginError(f"The state {name!r} holds a {type(tree).__name__}; only tensors and JSON can be saved.")


def join(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild the tree that `split` took apart."""
    if isinstance(tree, dict):
        if tree.keys() == {TENSOR}:
            return tensors[tree[TENSOR]]
        if tree.keys() == {TUPLE}:
            return tuple(join(item, tensors) for item in tree[TUPLE])
        return {key: join(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list):
        return [join(item, tensors) for item in tree]
    return tree


def merged(trees: Sequence[Any]) -> Any:
    """One tree of what the stages of a pipeline hold: every key of a mapping; of anything else the first stage's."""
    first = trees[0]
    if not isinstance(first, dict):
        return first
    keys = dict.fromkeys(key for tree in trees if isinstance(tree, dict) for key in tree)
    return {key: merged([tree[key] for tree in trees if isinstance(tree, dict) and key in tree]) for key in keys}


def without(tree: Any, names: Set[str]) -> Any:
    """A tree without what lies under some names, at any depth."""
    if isinstance(tree, dict):
        return {key: without(value, names) for key, value in tree.items() if key not in names}
    return tree


def named(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors in a tree that `split` gave: the name that is right at each place, and the one that is there."""
    if isinstance(tree, dict):
        if tree.keys() == {TENSOR}:
            yield name, tree[TENSOR]
        else:
            for key, value in tree.items():
                yield from named(value, name if key == TUPLE else f"{name}.{key}" if name else key)
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from named(value, f"{name}.{index}")


def naming_problem(tree: Any, known: Container[str]) -> str:
    """A phrase, if a tree that `split` gave does not name each of its tensors by its place; empty if it does.

    Args:
        tree: the tree.
        known: the tensors that there are.
    """
    for place, found in named(tree):
        if not isinstance(found, str) or found not in known:
            return f"names the tensor {str(found)[:100]!r}, which is not in it"
        if found != place:
            return f"names the tensor {found[:100]!r} at the place of {place[:100]!r}"
    return ""


def has_odd_tuple(tree: Any) -> bool:
    """Return True if something in a tree is marked as a tuple, and is none."""
    if isinstance(tree, dict):
        if tree.keys() == {TUPLE} and not isinstance(tree[TUPLE], list):
            return True
        return any(map(has_odd_tuple, tree.values()))
    return isinstance(tree, list) and any(map(has_odd_tuple, tree))
