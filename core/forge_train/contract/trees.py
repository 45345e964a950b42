"""Trees of tensors (batches, states) cut into parts, and joined again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..ground.errors import PluginError
from .cuts import Leaf, Replicate, Span, Spec, Split, Stack

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


def shard_tree(tree: T, spec: Spec, parts: int) -> list[T]:
    """Cut a tree into parts; `unshard_tree` is the inverse.

    Args:
        tree: tensors in dicts, lists, tuples, NamedTuples and dataclasses, nested; None where there is no tensor. Other
            values have to be replicated.
        spec: how each of its leaves is cut. The spec of a NamedTuple or a dataclass is a dict by field.
        parts: their number, at least 1.

    Raises:
        PluginError: naming the leaf that does not fit its spec.
    """
    _check_parts("shard_tree", parts)
    return [shard_of_tree(tree, spec, parts, index) for index in range(parts)]


def shard_of_tree(tree: T, spec: Spec, parts: int, index: int) -> T:
    """One of the parts that `shard_tree` gives; the others are not made.

    Raises:
        PluginError: as `shard_tree`.
    """

    def cut(path: str, leaf: Leaf, values: Sequence[Any]) -> Any:
        (value,) = values
        if isinstance(leaf, Replicate):
            return value
        _check_tensor(path, leaf, value)
        dim = _dim(path, leaf, value.dim(), value)
        if isinstance(leaf, Stack):
            if value.shape[dim] != parts:
                raise PluginError(f"{path}: dimension {dim} of {list(value.shape)} has no entry for each of {parts}.")
            return value.select(dim, index)
        spans = _spans(path, leaf, value.shape[dim], parts)[index]
        pieces = [value.narrow(dim, start, stop - start) for start, stop in spans or ((0, 0),)]
        return pieces[0] if len(pieces) == 1 else _torch().cat(pieces, dim)

    _check_parts("shard_of_tree", parts)
    if not 0 <= index < parts:
        raise PluginError(f"There is no part {index} of {parts}.")
    made: T = combine_trees(cut, spec, [tree])
    return made


def unshard_tree(trees: Sequence[T], spec: Spec) -> T:
    """Join the parts of a tree, given in order; the inverse of `shard_tree`.

    Raises:
        PluginError: naming the leaf whose parts do not fit together, or of a replicated one the part that differs.
    """
    if not trees:
        raise PluginError("unshard_tree: there are no parts to join.")

    def join(path: str, leaf: Leaf, values: Sequence[Any]) -> Any:
        if isinstance(leaf, Replicate):
            _check_equal(path, values)
            return values[0]
        for value in values:
            _check_tensor(path, leaf, value)
        _check_alike(path, leaf, values)
        if isinstance(leaf, Stack):
            return _torch().stack(list(values), _dim(path, leaf, values[0].dim() + 1, values[0]))
        dim = _dim(path, leaf, values[0].dim(), values[0])
        sizes = [value.shape[dim] for value in values]
        joined = _torch().cat(list(values), dim)
        if leaf.sizes is None and leaf.spans is None:
            return joined
        spans = _spans(path, leaf, sum(sizes), len(values))
        expected = [sum(stop - start for start, stop in own) for own in spans]
        if sizes != expected:
            raise PluginError(f"{path}: its parts have {sizes} entries along dimension {dim}, expected {expected}.")
        if leaf.spans is None:
            return joined
        flat = [span for own in spans for span in own]
        pieces = zip(flat, joined.split([stop - start for start, stop in flat], dim), strict=True)
        return _torch().cat([piece for _, piece in sorted(pieces, key=lambda one: one[0])], dim) if flat else joined

    made: T = combine_trees(join, spec, trees)
    return made


def combine_trees(
    function: Callable[[str, Leaf, Sequence[Any]], Any], spec: Spec, trees: Sequence[Any], path: str = ""
) -> Any:
    """A tree whose every leaf is made from those of some trees: the function is given path, spec and leaves.

    Raises:
        PluginError: naming where the trees, or a tree and its spec, differ in structure.
    """
    first = trees[0]
    children = _children(first)
    if isinstance(spec, Replicate) or (children is None and isinstance(spec, (Split, Stack))):
        missing = [value is None for value in trees]
        if not isinstance(spec, Replicate) and any(missing):
            if not all(missing):
                raise PluginError(
                    f"{_at(path)}: part {missing.index(not missing[0])} differs from part 0 in being None."
                )
            return None
        return function(_at(path), spec, trees)
    if children is None:
        if all(value is None for value in trees):
            return None
        raise PluginError(f"{_at(path)}: is {_kind(first)}, and its spec is {_kind(spec)}.")
    others = [children, *(_alike(path, first, children, tree, at) for at, tree in enumerate(trees[1:], start=1))]
    specs = _specs(path, spec, children, first)
    made = {
        key: combine_trees(function, specs[key], [one[key] for one in others], f"{path}.{key}" if path else str(key))
        for key in children
    }
    return _rebuilt(first, made)


def _children(tree: Any) -> dict[Any, Any] | None:
    """Key → subtree; None for a leaf."""
    if isinstance(tree, Mapping):
        return dict(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return dict(zip(tree._fields, tree, strict=True))
    if isinstance(tree, (list, tuple)):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree) if field.init}
    return None


def _rebuilt(tree: Any, children: dict[Any, Any]) -> Any:
    """A container like another one, with other children."""
    if isinstance(tree, MutableMapping):
        made: Any = copy.copy(tree)  # an OrderedDict or a defaultdict stays one
        made.update(children)
        return made
    if isinstance(tree, Mapping):
        return children
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*children.values())
    if isinstance(tree, (list, tuple)):
        return type(tree)(children.values())
    return dataclasses.replace(tree, **children)


def _specs(path: str, spec: Spec, children: Mapping[Any, Any], tree: Any) -> dict[Any, Spec]:
    """Key → its spec."""
    if isinstance(spec, (Split, Stack)):
        return dict.fromkeys(children, spec)
    listed = isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields")
    if isinstance(spec, Mapping) == listed or not isinstance(spec, (Mapping, Sequence)):
        raise PluginError(f"{_at(path)}: is {_kind(tree)}, and its spec is {_kind(spec)}: {_wanted(tree)}.")
    given: dict[Any, Spec] = dict(spec) if isinstance(spec, Mapping) else dict(enumerate(spec))
    if missing := [key for key in children if key not in given]:
        raise PluginError(f"{_at(path)}: the spec does not say how {missing[0]!r} is cut; it has {list(given)}.")
    if unknown := [key for key in given if key not in children]:
        raise PluginError(f"{_at(path)}: the spec names {unknown[0]!r}, which is not there; there is {list(children)}.")
    return given


def _wanted(tree: Any) -> str:
    """Describe the spec that a container needs."""
    if isinstance(tree, Mapping):
        return "the spec of a dict is a dict by key"
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return "the spec of a list or a tuple is a list by item"
    return "the spec of a NamedTuple or a dataclass is a dict by field"


def _alike(path: str, first: Any, children: Mapping[Any, Any], tree: Any, at: int) -> dict[Any, Any]:
    """The children of another part, which must be the same."""
    found = _children(tree)
    if found is None or type(tree) is not type(first) or found.keys() != children.keys():
        told = "has other keys" if found is not None and type(tree) is type(first) else f"is {_kind(tree)}"
        raise PluginError(f"{_at(path)}: part {at} {told}, part 0 is {_kind(first)} of {list(children)}.")
    return found


def _spans(path: str, leaf: Split, length: int, parts: int) -> Sequence[Sequence[Span]]:
    """The entries of each part."""
    given = leaf.spans if leaf.spans is not None else leaf.sizes
    if given is not None and len(given) != parts:
        raise PluginError(f"{path}: its spec is for {len(given)} parts, and there are {parts}.")
    if leaf.spans is not None:
        flat = sorted(span for own in leaf.spans for span in own)
        edges = [0, *(edge for span in flat for edge in span), length]
        gapless = edges[::2] == edges[1::2]
        if not gapless or any(start > stop for start, stop in flat):
            raise PluginError(f"{path}: the spans do not cover each of its {length} entries once: {leaf.spans}.")
        return leaf.spans
    if leaf.sizes is None and length % parts:
        raise PluginError(f"{path}: {length} entries can't be cut into {parts} equal parts; say Split(sizes=…).")
    sizes = leaf.sizes if leaf.sizes is not None else [length // parts] * parts
    if sum(sizes) != length or min(sizes) < 0:
        raise PluginError(f"{path}: has {length} entries, and its spec cuts it into {list(sizes)}.")
    starts = [sum(sizes[:at]) for at in range(parts)]
    return [((start, start + size),) for start, size in zip(starts, sizes, strict=True)]


def _dim(path: str, leaf: Split | Stack, dims: int, value: Tensor) -> int:
    """The dimension, counted from the front."""
    if not -dims <= leaf.dim < dims:
        raise PluginError(f"{path}: is {list(value.shape)}, and its spec is {leaf}: it has no such dimension.")
    return leaf.dim % dims


def _check_parts(function: str, parts: object) -> None:
    if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1:
        raise PluginError(f"{function}: the number of parts must be an integer, 1 or more, found {parts!r}.")


def _check_tensor(path: str, leaf: Leaf, value: Any) -> None:
    if not isinstance(value, _torch().Tensor):
        raise PluginError(f"{path}: is {_kind(value)}, which can't be cut; its spec must be Replicate(), not {leaf}.")


def _check_alike(path: str, leaf: Split | Stack, values: Sequence[Tensor]) -> None:
    """Parts differ in size along the dimension only; `torch.cat` would also promote dtypes silently."""

    def rest(value: Tensor) -> tuple[Any, ...]:
        shape = list(value.shape)
        if isinstance(leaf, Split):
            del shape[_dim(path, leaf, value.dim(), value)]
        return value.dtype, value.device, shape

    if odd := next((at for at, value in enumerate(values) if rest(value) != rest(values[0])), 0):
        both = " and ".join(f"{list(one.shape)} {one.dtype} on {one.device}" for one in (values[0], values[odd]))
        raise PluginError(f"{path}: parts 0 and {odd} do not fit together: they are {both}.")


def _check_equal(path: str, values: Sequence[Any]) -> None:
    """Descends into containers, so that the path is that of what differs."""
    first, children = values[0], _children(values[0])
    if all(value is first for value in values):
        return  # nothing is read from the device
    if children is not None:
        others = [children, *(_alike(path, first, children, tree, at) for at, tree in enumerate(values[1:], start=1))]
        for key in children:
            _check_equal(f"{path}.{key}" if path != "the tree" else str(key), [one[key] for one in others])
        return
    for at, value in enumerate(values[1:], start=1):
        if not _equal(first, value):
            raise PluginError(f"{path}: part {at} differs from part 0, and Replicate() is the same in every part.")


def _equal(a: Any, b: Any) -> bool:
    """Bit for bit, so that NaN equals NaN."""
    torch = _torch()
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if (a.dtype, a.device, a.shape) != (b.dtype, b.device, b.shape):
            return False
        return bool(torch.equal(*(one.detach().contiguous().reshape(-1).view(torch.uint8) for one in (a, b))))
    return type(a) is type(b) and bool(a == b)


def _kind(value: Any) -> str:
    if value is None or isinstance(value, (Split, Stack, Replicate)):
        return repr(value)
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeio' else 'a'} {name}"


def _at(path: str) -> str:
    return path or "the tree"


def _torch() -> Any:
    import torch

    return torch
