"""Placement of an optimizer's state on a layout: what must match on all ranks, and how saved state is redistributed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from ..contract.model import Model

STATE = "optimizer.state."
"""Prefix of the names of tensors that belong to a parameter."""


def reduce_partial(optimizer: torch.optim.Optimizer) -> None:
    """Sum the Partial DTensors in the optimizer's state, because only a sum can be saved. This is done after each step,
    and not where a checkpoint is taken, so that checkpoints change no number."""
    for key, values in optimizer.state.items():
        if any(_is_partial(tensor) for _, tensor in _tensors(values, "")):
            optimizer.state[key] = _mapped(values, lambda tensor: _summed(tensor) if _is_partial(tensor) else tensor)


def describe_odd(state: Mapping[str, Any], model: Model) -> dict[str, list[str]]:
    """Record how tensors lay beside a sharded parameter, where their shapes do not show it.

    Returns:
        `plain`: tensors that were not sharded; `spread`: tensors that were, with a shape other than the parameter's.
    """
    parameters = dict(model.named_parameters())
    odd: dict[str, list[str]] = {"plain": [], "spread": []}
    for name, leaf in leaves(state, "optimizer"):
        parameter = parameter_of(name, parameters)
        if not isinstance(leaf, Tensor) or parameter is None or not is_sharded(parameter):
            continue
        if not is_sharded(leaf) and leaf.dim():
            odd["plain"].append(name)
        elif is_sharded(leaf) and leaf.shape != parameter.shape:
            odd["spread"].append(name)
    return odd


def place(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    parameters: Mapping[str, Tensor],
    odd: Mapping[str, Set[str]],
) -> Tensor:
    """Return an empty tensor to load a tensor of an optimizer into.

    Args:
        name: the name that it was saved under.
        shape: its full shape.
        dtype: the dtype that it was saved in.
        parameters: those on this rank, by name.
        odd: what `describe_odd` returned when it was saved.
    """
    parameter = parameter_of(name, parameters)
    if parameter is None or name in odd["plain"]:
        return torch.empty(shape, dtype=dtype)
    if tuple(parameter.shape) == shape:
        return torch.empty_like(parameter, dtype=dtype)
    # Saved by one process, it may be rows or columns of the parameter (Adafactor), which must mix with its shards here.
    if is_sharded(parameter) and (name in odd["spread"] or (shape and _is_part(shape, tuple(parameter.shape)))):
        from torch.distributed.tensor import Replicate, empty

        mesh = parameter.device_mesh  # type: ignore[attr-defined]
        return empty(shape, dtype=dtype, device_mesh=mesh, placements=[Replicate()] * mesh.ndim)
    return torch.empty(shape, dtype=dtype)


def _is_part(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Return True if a shape is another one with sizes left out or set to 1."""
    if len(shape) == len(whole):
        return all(size in (1, of) for size, of in zip(shape, whole, strict=True))
    left = iter(whole)
    return len(shape) < len(whole) and all(size in left for size in shape)


def parameter_of(name: str, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """The parameter that a tensor belongs to: a state may be nested, and names have dots."""
    key = name.removeprefix(STATE) if name.startswith(STATE) else ""
    while key:
        key = key.rpartition(".")[0]
        if key in parameters:
            return parameters[key]
    return None


# -- walking through a state ------------------------------------------------------------------------------------------


def leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Everything in nested tables and lists, by its dotted name."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{name}.{key}")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{name}.{index}")
    else:
        yield name, tree


def _tensors(tree: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    return ((name, leaf) for name, leaf in leaves(tree, name) if isinstance(leaf, Tensor))


def _mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: _mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_mapped(value, change) for value in tree)
    return tree


def is_sharded(tensor: Tensor) -> bool:
    """Return True for a DTensor."""
    return hasattr(tensor, "device_mesh")


def _is_partial(tensor: Tensor) -> bool:
    return any(placement.is_partial() for placement in getattr(tensor, "placements", ()))


def _summed(tensor: Any) -> Tensor:
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    summed: Tensor = tensor.redistribute(placements=placements)
    return summed
