"""Collectives and messages of a rank, as they are called: when, by whom, and when it waits for them."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import ScriptObject, Tensor
from torch._C import DispatchKey
from torch.library import Library

from forge_train.plugin.job import Job

from ..planning.communication import FUNCTIONAL, IN_PLACE, Collective, Names, group_named, kind_of, size_of
from .callers import Callers, Frame, places
from .modules import Modules
from .record import Call

WAIT = "wait"
RECEIVES = {"recv_": "recv", "recv_any_source_": "recv"}
SEEN = {"_c10d_functional": (*FUNCTIONAL, "wait_tensor"), "c10d": (*IN_PLACE, *RECEIVES)}
BELOW = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)


class Calls:
    """Records collectives and messages while it is on, as a context. It costs other operations nothing.

    A mode that sees every operation (`TorchDispatchMode`) takes a fifth of a small step on a CPU, and switches
    torch.compile off. Kernels of Python are put before those of the collectives alone instead: at `BackendSelect`,
    which lies below autograd, so that what C++ calls in the backward pass is seen too.

    Args:
        job: the run.
        modules: knows which module the rank works for.
        owners: axis, or `SHARDING` → the plugin that made it real.
    """

    def __init__(self, job: Job, modules: Modules, owners: Mapping[str, str]) -> None:
        self.found: list[Call] = []
        self._job, self._modules, self._callers = job, modules, Callers(job, owners)
        self._names = Names(job.dist)
        self._libraries: list[Any] = []
        self._within = False  # a functional collective, which calls one in place
        self._numbers: Counter[Any] = Counter()
        self._works: dict[int, tuple[Any, Call]] = {}  # the work stays alive, or its id would be another's
        self._storages: dict[int, Call] = {}
        self._frames_of: list[tuple[list[Frame], str]] = []

    def __enter__(self) -> Calls:
        for namespace, names in SEEN.items():
            library: Any = Library(namespace, "IMPL")  # type: ignore[no-untyped-call]  # torch (2.13) has no types here
            for name in names:
                func = getattr(getattr(torch.ops, namespace), name).default
                library.impl(name, partial(self._seen, func, *_kind(func)), "BackendSelect", with_keyset=True)
            self._libraries.append(library)
        work: Any = dist.Work
        self._wait, works = work.wait, self._works

        def wait(one: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return self._wait(one, *args, **kwargs)
            finally:
                if entry := works.pop(id(one), None):
                    _waited(entry[1], began)

        work.wait = wait
        return self

    def __exit__(self, *error: object) -> None:
        work: Any = dist.Work
        work.wait = self._wait
        for library in self._libraries:
            library._destroy()
        self._libraries.clear()
        self._works.clear()
        self._storages.clear()
        self._name()

    def _seen(self, func: Any, kind: str, functional: bool, keys: Any, *args: Any, **kwargs: Any) -> Any:
        if self._within:
            return func.redispatch(keys & BELOW, *args, **kwargs)
        self._within = True
        try:
            if kind != WAIT:
                return self._call(kind, func, keys & BELOW, args, kwargs, functional=functional)
            began = time.perf_counter()
            out = func.redispatch(keys & BELOW, *args, **kwargs)
            if call := self._storages.pop(_storage(args[0]), None):
                _waited(call, began)
            return out
        finally:
            self._within = False

    def _call(self, kind: str, func: Any, keys: Any, args: Any, kwargs: Any, *, functional: bool) -> Any:
        frames, via = self._callers.frames(sys._getframe(1))
        module, phase = self._modules.now
        began = time.perf_counter()
        out = func.redispatch(keys, *args, **kwargs)
        ended = time.perf_counter()
        if functional:
            group = group_named(args[-1])
        else:
            group = next(dist.ProcessGroup.unbox(argument) for argument in args if isinstance(argument, ScriptObject))
        if group.size() == 1:
            return out
        ranks = self._names.ranks(group.group_name)
        largest = max((*args, out), key=size_of)
        main, held = max(_tensors(largest), key=size_of), size_of(largest)
        if kind in ("send", "recv"):
            pair = [self._job.dist.rank, ranks[args[2]]]
            ranks = pair if kind == "send" else pair[::-1]
        sent = 0.0 if kind == "recv" else Collective(kind, group.group_name, group.size(), held).sent
        key = (group.group_name, *ranks) if kind in ("send", "recv") else group.group_name
        call = Call(
            kind=kind,
            axis="",
            ranks=ranks,
            group=group.group_name,
            number=self._numbers[key],
            bytes=held,
            sent=sent,
            dtype=str(main.dtype).removeprefix("torch."),
            shape=list(main.shape),
            start=began,
            end=ended,
            module=module,
            phase=phase,
            plugin="",
            places=[],
        )
        self._numbers[key] += 1
        self.found.append(call)
        self._frames_of.append((frames, via))
        self._expect(call, out, functional=functional)
        return out

    def _expect(self, call: Call, out: Any, *, functional: bool) -> None:
        """Know the call again where it is waited for."""
        if functional:
            for tensor in _tensors(out):
                self._storages[_storage(tensor)] = call
            return
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, ScriptObject):
                work = dist.Work.unbox(one)
                self._works[id(work)] = (work, call)

    def _name(self) -> None:
        """Say axes, plugins and places of all calls. While the step lasts, that would take a share of it."""
        for call, (frames, via) in zip(self.found, self._frames_of, strict=True):
            call.axis = self._names.of(call.group)
            call.places = places(frames)
            call.plugin = self._callers.plugin(frames, via, call.axis, call.phase)


def _kind(func: Any) -> tuple[str, bool]:
    if func.namespace == "_c10d_functional" and func._opname == "wait_tensor":
        return WAIT, True
    if func.namespace == "c10d" and func._opname in RECEIVES:
        return RECEIVES[func._opname], False
    return kind_of(func)


def _waited(call: Call, began: float) -> None:
    call.end = time.perf_counter()
    call.waits.append((began, call.end))


def _storage(tensor: Tensor) -> int:
    with suppress(RuntimeError, NotImplementedError):
        return int(tensor.untyped_storage()._cdata)
    return id(tensor)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [one for item in value for one in _tensors(item)] if isinstance(value, (list, tuple)) else []
