"""Context parallelism applied to one part of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from forge_train import Applied, ConfigError
from forge_train_kit.capabilities import capabilities_of

from .kernel import ContextKernel, Ranks, undivided
from .moving import Group
from .recurrence import ContextRecurrence

if TYPE_CHECKING:
    from forge_train import Job

LONG = 32_768
"""Tokens of a sequence from which `auto` no longer holds whole keys and values on each rank, if it has a choice."""


@dataclass(frozen=True)
class Heads:
    """Of an attention module on this rank: all of them, and those of keys and values."""

    queries: int
    keys: int
    features: int


def wrap(part: nn.Module, job: Job, method: str, ulysses: int = 0) -> Applied:
    """Put a context kernel around the kernel of every module that shows one, and the like around every recurrence.

    Args:
        part: of a model.
        job: of the run.
        method: see `ContextParallel.Config`.
        ulysses: see there.

    Raises:
        ConfigError: for a unit without a kernel, or heads that the method can't share out.
    """
    size = job.dist.layout.cp
    modules, recurrent = with_kernels(part, size), with_recurrences(part)
    if recurrent:
        all_heads = ranks_of(job, size)
    for name, module in recurrent.items():
        check_recurrence(name, module, size, job.dist.layout.tp)
        module.recurrence = ContextRecurrence(module.recurrence, all_heads)
    if not modules and recurrent:
        return Applied(part, tuple(recurrent), f"{size} ranks: heads of {len(recurrent)} recurrences exchanged")
    if not modules:  # a pipeline's part without a block
        if method == "ulysses_ring":
            raise ConfigError(
                "cp.method = 'ulysses_ring' makes its groups with every part of a pipeline, and one has no attention; "
                "give each part a block (pp.cuts), or take 'ring' or 'ulysses'."
            )
        return Applied(part)
    heads = heads_of(modules, job.dist.layout.tp)
    prefixes = next((name for name, module in modules.items() if getattr(module, "prefix", False)), "")
    if method == "auto":
        method, ulysses = choose(heads.values(), len(heads) == len(modules), size, job, ring=not prefixes)
    if prefixes and "ring" in method:
        raise ConfigError(
            f"cp.method = {method!r}: the tokens of a prefix see each other in {prefixes}, and blocks that go round "
            "are computed only for later queries; take 'gather' or 'ulysses'.",
            key="cp.method",
        )
    by_heads = {"ulysses": size, "ulysses_ring": ulysses or most_ranks(heads.values(), size)}.get(method, 1)
    for name, one in heads.items():
        if problem := undivided(one.queries, one.keys, by_heads):
            raise ConfigError(f"cp.method = {method!r}: {problem} of {name}. {_way_out(one, size)}", key="cp.method")
    ranks = all_heads if recurrent and by_heads == size else ranks_of(job, by_heads)
    for module in modules.values():
        module.kernel = ContextKernel(module.kernel, ranks, "ring" if "ring" in method else "gather")
    shape = f"{by_heads} × {size // by_heads} " if method == "ulysses_ring" else ""
    sent = sum(sent_by(one, by_heads, size // by_heads, "ring" in method, job) for one in heads.values())
    known = len(heads) == len(modules) and not recurrent
    expected = {"cp": sent} if known and by_heads in (1, size) else {}
    more = f"; heads of {len(recurrent)} recurrences exchanged" if recurrent else ""
    return Applied(part, (*modules, *recurrent), f"{size} ranks: {shape}{method}{more}", expected_bytes=expected)


def with_kernels(part: nn.Module, ranks: int) -> dict[str, Any]:
    """Name → module that shows a kernel.

    Raises:
        ConfigError: naming a unit that has none, unless the `tensor_plan()` says that it works on each token alone.
    """
    found = {name: module for name, module in part.named_modules() if callable(getattr(module, "kernel", None))}
    carried = {**found, **with_recurrences(part)}
    bare = [
        unit for unit in getattr(part, "units", ()) if not any(f"{name}.".startswith(f"{unit}.") for name in carried)
    ]
    alone = _on_each_token(part) if bare else ()
    for unit in bare:
        if not f"{unit}.".startswith(alone):
            raise ConfigError(
                f"parallel.cp = {ranks}: {unit} ({type(part.get_submodule(unit)).__name__}) shows no attention kernel "
                "(`.kernel`) and no `.recurrence`, so that nothing would carry a sequence from one rank's slice to the "
                "next. Set parallel.cp = 1."
            )
    return found


def _on_each_token(part: nn.Module) -> tuple[str, ...]:
    """The beginnings of names of modules that work on each token alone; none for a model without a plan."""
    declare: Callable[[], Mapping[str, str]] = getattr(part, "tensor_plan", dict)
    try:
        plan = declare()
    except TypeError:  # a class that declares none
        return ()
    return tuple(f"{name}." for name, style in plan.items() if style == "sequence")


def with_recurrences(part: nn.Module) -> dict[str, Any]:
    """Name → module that shows a recurrence."""
    return {name: module for name, module in part.named_modules() if callable(getattr(module, "recurrence", None))}


def check_recurrence(name: str, module: Any, size: int, tp: int) -> None:
    """Check that ranks can exchange heads for sequences.

    Raises:
        ConfigError: if the number of heads does not divide among them.
    """
    heads, keys = module.heads // tp, module.kv_heads // tp
    if heads % size or keys % size:
        raise ConfigError(
            f"parallel.cp = {size}: {size} ranks can't divide the {heads} value heads and {keys} key heads of {name} "
            f"({type(module).__name__}). Its recurrence needs whole sequences, so each rank takes some of the heads. "
            "Set parallel.cp to a divisor of both."
        )


def heads_of(modules: Mapping[str, Any], tp: int) -> dict[str, Heads]:
    """Name → heads on this rank, of modules that declare them."""
    names = ("heads", "kv_heads", "head_dim")
    known = {name: module for name, module in modules.items() if all(hasattr(module, one) for one in names)}
    return {
        name: Heads(module.heads // tp, max(module.kv_heads // tp, 1), module.head_dim)
        for name, module in known.items()
    }


def choose(heads: Iterable[Heads], all_known: bool, size: int, job: Job, *, ring: bool = True) -> tuple[str, int]:
    """A method, and with how many ranks heads are exchanged, for `auto`.

    Heads are exchanged if they can be shared out and that sends less than gathering does. Sequences that are too long
    to be held whole go round, if the kernel can compute blocks, or else have their heads exchanged.
    """
    heads = list(heads)
    kernel = job.hooks.provider("attention_kernel")
    blocks = ring and kernel is not None and capabilities_of(job.hooks.enabled[kernel].cls).blocks
    long = job.config.train.sequence >= LONG
    shared = all_known and bool(heads) and all(not undivided(one.queries, one.keys, size) for one in heads)
    cheap = sum(one.queries + max(one.keys, size) for one in heads) < size * sum(one.keys for one in heads)
    if shared and (cheap or (long and not blocks)):
        return "ulysses", 0
    if not long or not blocks:
        return "gather", 0
    some = most_ranks(heads, size) if all_known else 1
    return ("ulysses_ring", some) if 1 < some < size else ("ring", 0)


def most_ranks(heads: Iterable[Heads], size: int) -> int:
    """The most ranks, short of all, that divide `size` and can share every module's heads out."""
    heads = list(heads)
    able = (
        ranks
        for ranks in range(size - 1, 1, -1)
        if size % ranks == 0 and all(not undivided(one.queries, one.keys, ranks) for one in heads)
    )
    return next(able, 1)


def ranks_of(job: Job, by_heads: int) -> Ranks:
    """The ranks of the axis, in groups of so many that exchange heads."""
    mesh = job.dist.mesh("dense", "cp")
    everybody, alone = Group.of(mesh.get_group()), Group(mesh.get_group(), 1, 0)
    if by_heads == 1:
        return Ranks(everybody, alone, everybody)
    if by_heads == everybody.size:
        return Ranks(everybody, everybody, alone)
    both = mesh._unflatten(0, (everybody.size // by_heads, by_heads), ("cp_along", "cp_heads"))
    heads, along = (Group.of(both[name].get_group()) for name in ("cp_heads", "cp_along"))
    return Ranks(everybody, heads, along)


def sent_by(one: Heads, by_heads: int, along: int, ring: bool, job: Job) -> float:
    """Bytes that a rank has to send for a module in a step, recomputation left out.

    Heads are exchanged for queries, keys, values and results, and again for their gradients. Keys and values are
    gathered once, and their gradients scattered; or they go round twice, and their gradients, in fp32, once.
    """
    train, size = job.config.train, job.precision.compute.itemsize
    tokens = train.global_batch // job.dist.data_ranks * train.sequence / (by_heads * along)
    wide = max(size, 4)
    if by_heads > 1:
        features = 2 * (one.queries + max(one.keys, by_heads)) * one.features
        return 2 * features * tokens * size * (by_heads - 1) / by_heads
    each = 2 * one.keys * one.features * tokens * (along - 1)
    return each * (2 * size + wide) if ring else each * 2 * size


def _way_out(one: Heads, size: int) -> str:
    """Name the methods that would work."""
    some = most_ranks([one], size)
    more = f", 'ulysses_ring' with cp.ulysses = {some}" if some > 1 else ""
    return f"These can: 'gather', 'ring'{more}."
