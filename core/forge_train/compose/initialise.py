"""Initial weights: a pure function of (run seed, parameter's name, row block), the same on every topology."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..base.errors import PluginError
from ..contract.model import Init
from ..mesh.tensors import held_bytes, local, window
from ..mesh.world import World, cores

ROWS = 64
"""Rows per seeded block: few enough that an uneven shard wastes little, enough that seeding costs nothing."""

THREADED = 2**20
"""Elements of a tensor from which on threads draw its blocks."""


def declared(part: nn.Module) -> dict[str, Init]:
    """Return the initial value of each parameter. Call it before transforms replace the modules that declare them.

    Raises:
        PluginError: if no module declares a parameter's initial value.
    """
    return {name: declared_init(part, name) for name, _ in part.named_parameters()}


def materialise(part: nn.Module, device: torch.device, seed: int, starts: Mapping[str, Init] | None = None) -> None:
    """Give a part that was built on the meta device its memory and its initial values.

    Args:
        part: the module, composed.
        device: where its memory is taken.
        seed: the run's.
        starts: what `declared` found before the composition; parameters that were added since are asked for here.

    Raises:
        PluginError: for a parameter or a buffer that nobody declares the start of.
    """
    starts = starts or {}
    allocate(part, device)
    done: set[int] = set()
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            if id(parameter) not in done:
                done.add(id(parameter))
                fill(parameter, name, starts.get(name) or declared_init(part, name), seed)


def physical_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def allocate(part: nn.Module, device: torch.device) -> None:
    """Give a part that was built on the meta device its memory: parameters hold anything, buffers what they start with.

    Raises:
        PluginError: for a buffer that nobody declares the start of.
        MemoryError: if this machine can't hold the part. Linux grants more memory than there is, and kills the process
            once it is used.
    """
    ties = tied_groups(part)
    offloaded = bool(getattr(part, "offloaded", False))  # declared by the transform that did it
    home = torch.device("cpu") if offloaded else device
    needed = held_bytes((*part.parameters(), *part.buffers()))
    if home.type == "cpu" and needed > physical_memory():
        raise MemoryError(f"tried to allocate {needed} bytes")
    part.to_empty(device=home)
    retie(part, ties)
    for module in part.modules() if offloaded else ():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)
    resets = {}
    for name, module in part.named_modules():
        if next(module.buffers(recurse=False), None) is not None:
            path = resetting(part, name)
            resets[path] = cast(Any, part.get_submodule(path)).reset_buffers
    for reset in resets.values():
        reset()


def resetting(part: nn.Module, name: str) -> str:
    """The module that fills the buffers of a module: the module itself, or the nearest one around it."""
    for path in _outwards(name):
        if hasattr(part.get_submodule(path), "reset_buffers"):
            return path
    module = part.get_submodule(name)
    raise PluginError(
        f"Module {name!r} ({type(module).__name__}) has buffers but no `reset_buffers()` to fill them "
        "after it was built on the meta device."
    )


def _outwards(path: str) -> Iterator[str]:
    """A module's path, and those of the modules around it; the last is empty."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def declared_init(part: nn.Module, name: str) -> Init:
    """Return a parameter's initial value from `initial(name)` of its module, or of the nearest enclosing one.

    Raises:
        PluginError: if none declares it.
    """
    owner, _, rest = name.rpartition(".")
    while True:
        initial = getattr(part.get_submodule(owner), "initial", lambda _: None)
        if isinstance(init := initial(rest), Init):
            return init
        if not owner:
            module = part.get_submodule(name.rpartition(".")[0])
            raise PluginError(
                f"Nobody declares how parameter {name!r} ({type(module).__name__}) starts: give its module, or one "
                "around it, `initial(name) -> Init`, or build it from forge_train_kit.model."
            )
        owner, _, last = owner.rpartition(".")
        rest = f"{last}.{rest}"


def fill(tensor: Tensor, name: str, init: Init, seed: int) -> None:
    """Fill a parameter, or this rank's shard of it, in place."""
    piece, window = local_window(tensor)
    if init.kind in ("ones", "zeros"):
        piece.fill_(1.0 if init.kind == "ones" else 0.0)
        return
    if piece.numel() == 0:
        return
    if init.kind == "given":
        assert init.values is not None
        whole = init.values(seed)
        if whole.shape != tensor.shape:
            raise PluginError(f"{name!r} is given values of shape {[*whole.shape]}, but has shape {[*tensor.shape]}.")
        piece.copy_(whole[tuple(slice(*bounds) for bounds in window)])
        return
    shape = (1, 1, *tensor.shape)[-max(tensor.dim(), 2) :]
    if tensor.dim() <= 1:
        piece, window = piece.reshape(1, -1), [(0, 1), *window] if tensor.dim() else [(0, 1), (0, 1)]
    leading, (row_from, row_to), columns = window[:-2], window[-2], slice(*window[-1])

    def draw(at: tuple[tuple[int, ...], int]) -> None:
        index, start = at
        target = piece[tuple(i - bounds[0] for i, bounds in zip(index, leading, strict=True))]
        rows = min(ROWS, shape[-2] - start)
        block = torch.empty(rows, shape[-1])
        _draw(block, init, _seed(seed, name, *index, start // ROWS))
        low, high = max(start, row_from), min(start + rows, row_to)
        with torch.no_grad():  # which is each thread's own
            target[low - row_from : high - row_from].copy_(block[low - start : high - start, columns])

    starts = range(row_from - row_from % ROWS, row_to, ROWS)
    blocks = itertools.product(itertools.product(*(range(*bounds) for bounds in leading)), starts)
    threads = _threads() if type(piece) in (Tensor, nn.Parameter) and piece.numel() >= THREADED else 1
    if threads == 1:  # modes of torch, such as those of fake tensors, are each thread's own too
        for at in blocks:
            draw(at)
        return
    with ThreadPoolExecutor(threads, "initial-weights") as pool:
        deque(pool.map(draw, blocks), maxlen=0)


def _threads() -> int:
    """This process's share of the cores; drawing releases the GIL."""
    return max(1, cores() // World.here().local_size)


def _draw(block: Tensor, init: Init, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    if init.kind == "normal":
        block.normal_(0.0, init.std, generator=generator)
    else:
        bound = math.sqrt(3.0) * init.std
        block.uniform_(-bound, bound, generator=generator)


def _seed(*parts: object) -> int:
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def local_window(tensor: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """This rank's part of a tensor, and what it covers of each axis: from, up to."""
    return local(tensor), [*window(tensor)]


def tied_groups(*parts: nn.Module) -> list[tuple[str, ...]]:
    """Names that share one parameter, a tuple for each such parameter."""
    names: dict[int, list[str]] = {}
    for part in parts:
        for name, parameter in part.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


def retie(part: nn.Module, groups: list[tuple[str, ...]]) -> list[str]:
    """Tie again what `to_empty` or tensor parallelism has untied; names that could not be tied.

    Two parameters can be tied when they have the same shape and the same placements.
    """
    failed = []
    for first, *others in groups:
        owner, _, attribute = first.rpartition(".")
        # Not by getattr: a module may compute with a narrower copy under the parameter's name.
        kept: Any = part.get_submodule(owner)._parameters[attribute]
        for name in others:
            owner, _, attribute = name.rpartition(".")
            module = part.get_submodule(owner)
            parameter: Any = module._parameters[attribute]
            if parameter is kept:
                continue
            if parameter.shape == kept.shape and getattr(parameter, "placements", 0) == getattr(kept, "placements", 0):
                setattr(module, attribute, kept)
            else:
                failed.append(name)
    return failed
