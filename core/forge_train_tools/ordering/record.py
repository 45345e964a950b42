"""Collectives and messages of one rank of a world that does not exist, in the order of its calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import ScriptObject, Tensor
from torch._C._distributed_c10d import FakeWork
from torch.distributed import distributed_c10d as c10d

from ..planning import meshes
from ..planning.communication import group_named, kind_of, size_of
from ..planning.imagined import ImaginedContext
from ..planning.watch import Watch
from ..tracing.callers import SERVICE, Callers, places

MESSAGES = ("send", "recv")
WAIT = "wait"
OTHERS = {"recv_": "recv", "recv_any_source_": "recv", "barrier": "barrier"}
"""Operations of `c10d` that send nothing → kind."""
REDUCING = [name for name in dir(dist.ProcessGroup) if "reduce" in name and not name.startswith("__")]


@dataclass(frozen=True, slots=True)
class Group:
    """A process group, seen from one of its ranks: the ranks that differ from it along some axes only."""

    domain: str
    axes: tuple[str, ...]
    """Empty for ranks that tile no axes."""
    number: int = 0
    """Number of groups of the same ranks that were made before it."""

    def __str__(self) -> str:
        """`dp_shard`, and `dp_shard #2` for a second group of the same ranks."""
        again = f" #{self.number + 1}" if self.number else ""
        return f"{' × '.join(self.axes)}{again}"


@dataclass(frozen=True, slots=True)
class Called:
    """One call of a rank. Two are equal if they fit each other, wherever they stand in the code."""

    kind: str
    group: Group
    shape: tuple[int, ...] = ()
    """Of the largest tensor, the same on all ranks that take part; without the first axis for an all-to-all."""
    dtype: str = ""
    op: str = ""
    """Reduction, in lower case."""
    root: int | None = None
    """Place of the root within the group."""
    peer: tuple[tuple[str, int], ...] = ()
    """Axis → steps along it to the other rank of a message, modulo the axis's size."""
    message: int = -1
    """Number of the message that is waited for, among those of the rank."""
    part: str = field(default="", compare=False)
    """Part of the step: `composition`, `data`, `forward`, `backward`, `gradients`, `optimizer` or `checkpoint`."""
    place: str = field(default="", compare=False)
    """`file:line, in function`."""
    plugin: str = field(default="", compare=False)

    def __str__(self) -> str:
        size = f" of {self.dtype} {list(self.shape)}" if self.dtype else ""
        how = f" ({self.op})" if self.op else ""
        root = f" from place {self.root}" if self.root is not None else ""
        return f"{self.kind}{how}{size}{root} along {self.group}"

    @property
    def origin(self) -> str:
        """Part of the step, line and plugin."""
        return f"{self.part}, {self.place}, plugin {self.plugin}"


class Order(Watch):
    """Records the calls of a rank while it is on.

    Args:
        context: of the rank; its calls that a plan answers by itself are recorded too.
        callers: finds who calls.
    """

    def __init__(self, context: ImaginedContext, callers: Callers) -> None:
        super().__init__()
        self.calls: list[Called] = []
        self.part = "composition"
        self.left_out: set[str] = set()
        """Places of calls in groups that tile no axes."""
        self._context, self._callers = context, callers
        self._domains = {name: context.layout.domain(name) for name in ("dense", "expert")}
        self._groups: dict[str, Group] = {}
        self._messages: dict[int, tuple[Any, int]] = {}
        self._sent = 0
        self._op = ""
        self._patches = ExitStack()
        context.asked = self._asked

    def begin(self) -> None:
        for name in REDUCING:
            self._patches.enter_context(patch.object(dist.ProcessGroup, name, self._reduces(name)))
        self._patches.enter_context(patch.object(FakeWork, "wait", self._waits(FakeWork.wait)))

    def end(self) -> None:
        self._patches.close()

    def look(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        kind, functional = kind_of(func)
        if func.namespace == "c10d":
            kind = kind or OTHERS.get(func._opname, "")
        if not kind:
            return
        given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
        if functional:
            group = group_named(args[-1])
        else:
            group = next(dist.ProcessGroup.unbox(one) for one in args if isinstance(one, ScriptObject))
        if group.size() > 1:
            self._call(kind, group, given, () if kind == "barrier" else (*args, out) if functional else args, out)

    def _call(self, kind: str, group: Any, given: Mapping[str, Any], sized: tuple[Any, ...], out: Any) -> None:
        ranks = dist.get_process_group_ranks(group)
        main = _main(kind, given, sized)
        op = str(given.get("reduce_op", "")) if isinstance(given.get("reduce_op"), str) else self._op
        peer: tuple[tuple[str, int], ...] = ()
        other = given.get("dst", given.get("src"))
        if kind in MESSAGES:
            peer = self._steps(ranks[other]) if other is not None else ()
            works = out if isinstance(out, (tuple, list)) else (out,)
            for one in works:
                if isinstance(one, ScriptObject):
                    work = dist.Work.unbox(one)
                    self._messages[id(work)] = (work, self._sent)
            self._sent += 1
        shape = tuple(main.shape) if main is not None else ()
        self._add(
            group,
            kind=kind,
            shape=shape[1:] if kind == "all_to_all" else shape,
            dtype=str(main.dtype).removeprefix("torch.") if main is not None else "",
            op=op if "reduce" in kind else "",
            root=given.get("root_rank"),
            peer=peer,
        )

    def _add(self, group: Any, **about: Any) -> None:
        named = self._named(group)
        frames, via = self._callers.frames(sys._getframe(1))
        part = self.part
        if part == "forward" and torch._C._current_graph_task_id() != -1:
            part = "backward"
        own = [one for one in frames if not one[1].startswith(SERVICE)] or frames
        place = (places(own) or ["torch"])[0]
        if not named.axes:
            self.left_out.add(place)
            return
        phase = "update" if part == "optimizer" else part
        plugin = self._callers.plugin(frames, via, " × ".join(named.axes), phase)
        self.calls.append(Called(group=named, part=part, place=place, plugin=plugin, **about))

    def _asked(self, what: str, axis: str) -> None:
        """A call that the imagined context answers: the values, and so their sizes, are not known."""
        if self._context.world > 1:
            group = self._context._group(axis) or dist.group.WORLD
            if dist.get_world_size(group) > 1:
                self._add(group, kind=what)

    def _waits(self, original: Callable[..., Any]) -> Callable[..., Any]:
        messages, calls = self._messages, self.calls

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            if found := messages.pop(id(work), None):
                frames, _ = self._callers.frames(sys._getframe(1))
                place = (places(frames) or ["torch"])[0]
                calls.append(Called(WAIT, Group("", ()), message=found[1], part=self.part, place=place))
            return original(work, *args, **kwargs)

        return wait

    def _reduces(self, name: str) -> Callable[..., Any]:
        """A method of a process group that notes its reduction: Python can't read it from what is dispatched."""
        original = getattr(dist.ProcessGroup, name)

        def reduces(*args: Any, **kwargs: Any) -> Any:
            options = [one for one in (*args, *kwargs.values()) if hasattr(one, "reduceOp")]
            plain = [one for one in (*args, *kwargs.values()) if isinstance(one, dist.ReduceOp)]
            found: Any = options[0].reduceOp if options else plain[0] if plain else dist.ReduceOp.SUM
            self._op = str(getattr(found, "op", found)).rpartition(".")[2].lower()
            try:
                return original(*args, **kwargs)
            finally:
                self._op = ""

        return reduces

    def _named(self, group: Any) -> Group:
        name = group.group_name
        if name not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            same = [one.group_name for one, own in c10d._world.pg_group_ranks.items() if sorted(own) == sorted(ranks)]
            found = ((domain, meshes.along(axes, ranks)) for domain, axes in self._domains.items())
            domain, axes = next((one for one in found if one[1]), ("", ()))
            self._groups[name] = Group(domain, axes, same.index(name) if name in same else 0)
        return self._groups[name]

    def _steps(self, other: int) -> tuple[tuple[str, int], ...]:
        own, there = (position(self._domains["dense"], rank) for rank in (self._context.rank, other))
        sizes = self._domains["dense"]
        return tuple((axis, (there[axis] - own[axis]) % sizes[axis]) for axis in sizes if there[axis] != own[axis])


def position(axes: meshes.Axes, rank: int) -> dict[str, int]:
    """Axis → place along it."""
    found: dict[str, int] = {}
    for axis, size in reversed([*axes.items()]):
        rank, found[axis] = divmod(rank, size)
    return found


def _main(kind: str, given: Mapping[str, Any], sized: tuple[Any, ...]) -> Tensor | None:
    """The tensor whose shape all ranks of a call must have in common."""
    uneven = {"gather": "input_tensors", "scatter": "output_tensors"}  # only the root holds the others
    largest = given[uneven[kind]] if kind in uneven else max(sized, key=size_of, default=None)
    return max(_tensors(largest), key=size_of, default=None)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


@contextmanager
def during(order: Order, part: str) -> Iterator[None]:
    """A part of the step, on its own."""
    order.part = part
    with order:
        yield
