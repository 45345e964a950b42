"""Placement of an optimizer's state on a layout: what must match on all ranks, and how saved state is redistributed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from ..base.errors import PluginError
from ..contract.model import Model
from ..mesh.distributed import DistributedContext

STATE = "optimizer.state."
"""Prefix of the names of tensors that belong to a parameter."""


def reduce_partial(optimizer: torch.optim.Optimizer) -> None:
    """Sum the Partial DTensors in the optimizer's state, because only a sum can be saved. This is done after each step,
    and not where a checkpoint is taken, so that checkpoints change no number."""
    for key, values in optimizer.state.items():
        if any(_is_partial(tensor) for _, tensor in _tensors(values, "")):
            optimizer.state[key] = _mapped(values, lambda tensor: _summed(tensor) if _is_partial(tensor) else tensor)


def check_alike(state: Mapping[str, Any], model: Model, dist: DistributedContext) -> None:
    """Check that all ranks of a stage have the same state, except for shards: only the first rank's copy is saved.

    Args:
        state: as returned by `optimizer_state`.
        model: the model whose parameters it belongs to.
        dist: the processes; all ranks call this.

    Raises:
        PluginError: on every rank, naming what differs.
    """
    if dist.world == 1:
        return
    parameters = dict(model.named_parameters())
    lines = {name: _words(name, leaf, parameters) for name, leaf in _leaves(state, "optimizer")}
    together = hashlib.sha256(repr(sorted(lines.items())).encode()).hexdigest()
    size = dist.world // dist.layout.stages
    first = dist.gather_objects(together)
    if all(mark == first[rank - rank % size] for rank, mark in enumerate(first)):
        return
    everybody = dist.gather_objects(lines)
    stages = [everybody[start : start + size] for start in range(0, dist.world, size)]
    name = min(name for ranks in stages for one in ranks for name in one if len({o.get(name) for o in ranks}) > 1)
    raise PluginError(
        f"The optimizer's state {name!r} can't be saved: it differs from rank to rank, and is no shard of a DTensor. "
        "Make it of the parameter (torch.zeros_like), or the same on every rank."
    )


def describe_odd(state: Mapping[str, Any], model: Model) -> dict[str, list[str]]:
    """Record how tensors lay beside a sharded parameter, where their shapes do not show it.

    Returns:
        `plain`: tensors that were not sharded; `spread`: tensors that were, with a shape other than the parameter's.
    """
    parameters = dict(model.named_parameters())
    odd: dict[str, list[str]] = {"plain": [], "spread": []}
    for name, leaf in _leaves(state, "optimizer"):
        parameter = _parameter(name, parameters)
        if not isinstance(leaf, Tensor) or parameter is None or not _is_sharded(parameter):
            continue
        if not _is_sharded(leaf) and leaf.dim():
            odd["plain"].append(name)
        elif _is_sharded(leaf) and leaf.shape != parameter.shape:
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
    parameter = _parameter(name, parameters)
    if parameter is None or name in odd["plain"]:
        return torch.empty(shape, dtype=dtype)
    if tuple(parameter.shape) == shape:
        return torch.empty_like(parameter, dtype=dtype)
    # Saved by one process, it may be rows or columns of the parameter (Adafactor), which must mix with its shards here.
    if _is_sharded(parameter) and (name in odd["spread"] or (shape and _is_part(shape, tuple(parameter.shape)))):
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


def _parameter(name: str, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """The parameter that a tensor belongs to: a state may be nested, and names have dots."""
    key = name.removeprefix(STATE) if name.startswith(STATE) else ""
    while key:
        key = key.rpartition(".")[0]
        if key in parameters:
            return parameters[key]
    return None


# -- walking through a state ------------------------------------------------------------------------------------------


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{name}.{key}")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{name}.{index}")
    else:
        yield name, tree


def _tensors(tree: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    return ((name, leaf) for name, leaf in _leaves(tree, name) if isinstance(leaf, Tensor))


def _mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: _mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_mapped(value, change) for value in tree)
    return tree


def _words(name: str, leaf: Any, parameters: Mapping[str, Tensor]) -> str:
    """A leaf, as far as ranks have to have it alike."""
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    what = f"{tuple(leaf.shape)} {leaf.dtype}"
    if _is_sharded(leaf):
        return f"{what} sharded"
    parameter = _parameter(name, parameters)
    if parameter is not None and not _is_sharded(parameter) and parameter.shape == leaf.shape:
        return what  # replicated as its parameter is
    content = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{what} {hashlib.sha256(content).hexdigest()}"


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh")


def _is_partial(tensor: Tensor) -> bool:
    return any(placement.is_partial() for placement in getattr(tensor, "placements", ()))


def _summed(tensor: Any) -> Tensor:
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    summed: Tensor = tensor.redistribute(placements=placements)
    return summed
