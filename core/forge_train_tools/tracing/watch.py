"""Collectives and messages of a rank, as they are called: when, by whom, and when it waits for them."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import ScriptObject, Tensor
from torch._C import DispatchKey
from torch.library import Library

from forge_train.contract.transform import Phase
from forge_train.plugin.calls import at_home
from forge_train.plugin.job import Job

from ..planning.communication import FUNCTIONAL, IN_PLACE, Collective, Names, group_named, kind_of, size_of
from ..stacks import is_own
from .modules import Modules
from .record import Call

KERNEL = "forge"
"""Label of the kernel's own calls: sums over losses, counts and norms."""
KERNEL_PACKAGE = "forge_train"
SERVICE = "forge_train.mesh"
"""Package through which plugins call collectives: the call is theirs."""
BETWEEN = (
    *("torch._ops", "torch.library", "torch._library", "torch.utils._contextlib"),
    *("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger"),
    "torch.distributed._functional_collectives",
)
"""Modules of torch between whoever calls a collective and the collective."""
PLACES = 3
"""Places of a call that are kept."""
Frame = tuple[str, str, int, str]
"""File, module, line and function."""
SHARDING = "torch.distributed.fsdp"
"""Package of torch that gathers and reduces weights, over groups that may be any axes'."""
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
        self._job, self._modules, self._owners = job, modules, owners
        self._optimizer = next(iter(job.hooks.acting("optimizer")), "")
        self._names = Names(job.dist)
        self._libraries: list[Any] = []
        self._within = False  # a functional collective, which calls one in place
        self._numbers: Counter[Any] = Counter()
        self._works: dict[int, tuple[Any, Call]] = {}  # the work stays alive, or its id would be another's
        self._storages: dict[int, Call] = {}
        self._own: dict[str, bool] = {}
        self._frames_of: list[tuple[list[Frame], str]] = []
        self._homes: dict[str, str] = {}

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
        frames, via = self._frames(sys._getframe(1))
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

    def _frames(self, frame: FrameType | None) -> tuple[list[Frame], str]:
        """The innermost frames of own code, and the module of torch through which they call. Names are found later."""
        found: list[Frame] = []
        via = ""
        while frame is not None and len(found) < PLACES:
            file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
            own = self._own.get(file)
            if own is None:
                own = self._own[file] = is_own(file) and not module.startswith(__package__ or "-")
            if own:
                found.append((file, module, frame.f_lineno, frame.f_code.co_name))
            elif not found and not module.startswith((*BETWEEN, __package__ or "-")):
                via = via or module
            frame = frame.f_back
        return found, via

    def _name(self) -> None:
        """Say axes, plugins and places of all calls. While the step lasts, that would take a share of it."""
        for call, (frames, via) in zip(self.found, self._frames_of, strict=True):
            call.axis = self._names.of(call.group)
            call.places = [f"{_short(file, module)}:{line}, in {name}" for file, module, line, name in frames]
            callers = [module for _, module, _, _ in frames if not module.startswith(SERVICE)]
            call.plugin = self._who(self._home(callers[0]) if callers else "", call, via)

    def _home(self, module: str) -> str:
        if module not in self._homes:
            names = (one.name for one in at_home(module, self._job.hooks.enabled.values()))
            own = KERNEL if module.partition(".")[0] == KERNEL_PACKAGE else ""
            self._homes[module] = own or " or ".join(dict.fromkeys(names))
        return self._homes[module]

    def _who(self, whose: str, call: Call, via: str) -> str:
        """The plugin that a call is due to. Many collectives of a layout are called by torch, from the model's lines:
        they are due to whoever shards, or made their axis real. Those of a shared library are the optimizer's, if it
        is at work."""
        if via.startswith(SHARDING) and SHARDING in self._owners:
            return self._owners[SHARDING]
        if whose and (not via or whose == KERNEL):
            return whose
        if not whose and call.phase == "update":
            return self._optimizer or KERNEL
        return next((self._owners[one] for one in call.axis.split(" × ") if one in self._owners), whose or KERNEL)


def owners(transforms: Sequence[tuple[str, Any]]) -> dict[str, str]:
    """Axis → the plugin whose transform covers it; `SHARDING` → the plugin that shards."""
    found = {axis: plugin for plugin, transform in transforms for axis in transform.covers}
    for plugin, transform in transforms:
        if transform.phase is Phase.SHARD:
            found[SHARDING] = plugin
    return found


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


def _short(file: str, module: str) -> str:
    """The path of a module below the folder that it is imported from."""
    parts = file.replace("\\", "/").split("/")
    return "/".join(parts[-(module.count(".") + 1 + (parts[-1] == "__init__.py")) :])
