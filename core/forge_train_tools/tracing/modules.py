"""The module that a rank works for: in the forward pass by its calls, in the backward pass by the graph's nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from forge_train_kit.activations.modules import tensors_in

from .record import Segment

SEEN = "forge_trace"
ROOT = "(model)"


class Modules:
    """Follows a rank through its modules while it is on. Graph and values stay as they are.

    torch's full backward hooks would put nodes of their own into the graph. Instead, the node that gave a tensor at the
    border of a module tells when the backward pass comes to it.
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.uncut: list[str] = []
        """Compiled modules: to look inside, torch would have to compile them otherwise."""
        self._on, self._stack = False, list[str]()
        self._at, self._since = ("", ""), 0.0

    @property
    def now(self) -> tuple[str, str]:
        """Module and phase."""
        return self._at[1], self._at[0]

    @contextmanager
    def followed(self, parts: tuple[nn.Module, ...]) -> Iterator[None]:
        """Follow while the block lasts."""
        undo = [remove for part in parts for remove in self._watch(part, "", {})]
        self._on, self._since = True, time.perf_counter()
        try:
            yield
        finally:
            self.mark("", "")
            self._on = False
            for remove in undo:
                remove()

    def mark(self, phase: str, module: str = "") -> None:
        """A phase or a module begins."""
        if not self._on or (phase, module) == self._at:
            return
        now = time.perf_counter()
        if self._at[0]:
            self.segments.append(Segment(self._since, now, *self._at))
        self._at, self._since = (phase, module), now

    def begin(self, phase: str) -> None:
        """A phase outside of all modules begins."""
        self._stack.clear()
        self.mark(phase)

    def _watch(self, module: nn.Module, path: str, known: dict[int, str]) -> Iterator[Callable[[], None]]:
        if id(module) in known:
            return
        known[id(module)] = path
        if module._compiled_call_impl is not None:
            self.uncut.append(path)
            return
        name = path or ROOT
        yield module.register_forward_pre_hook(partial(self._enter, name), prepend=True, with_kwargs=True).remove
        yield module.register_forward_hook(partial(self._leave, name)).remove
        for key, child in module.named_children():
            yield from self._watch(child, f"{path}.{key}" if path else key, known)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._recomputing():
            self._stack.clear()
        self._tag((args, kwargs), self._stack[-1] if self._stack else "")
        self._stack.append(name)
        self.mark(self._pass(), name)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._tag(output, name)
        while self._stack and self._stack.pop() != name:  # a pass that was cut short left others
            pass
        self.mark(self._pass(), self._stack[-1] if self._stack else "")

    def _recomputing(self) -> bool:
        return self._at[0] == "backward" and torch._C._current_graph_task_id() != -1

    def _pass(self) -> str:
        return "recompute" if torch._C._current_graph_task_id() != -1 else "forward"

    def _tag(self, value: Any, name: str) -> None:
        for _, tensor in tensors_in(value):
            node: Any = tensor.grad_fn  # whose metadata is a property, and no function as torch (2.13) declares
            if node is not None and SEEN not in node.metadata:
                node.metadata[SEEN] = name
                node.register_prehook(partial(self._back, name))

    def _back(self, name: str, gradients: Any) -> None:
        self.mark("backward", name)
