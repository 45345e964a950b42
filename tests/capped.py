"""A plugin that has memory run out, wherever it is told to. Enable it as `capped:Cap`."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from typing import Annotated, Any, Literal

from forge_train import Ge, Gt, Plugin, hookimpl, section


class Cap(Plugin):
    """Caps this process's address space at what it has and a little more."""

    api = (1, 0)

    @section
    class Config:
        at: Literal["building", "forward", "backward", "optimizer"] = "forward"
        room: Annotated[int, Gt(0)] = 8
        """MiB above what the process has at that moment."""
        rank: Annotated[int, Ge(0)] = 0

    @hookimpl
    def parallelize(self, job: Any) -> None:
        if self.config.at == "building":
            self.cap()

    @hookimpl
    def on_start(self, model: Any) -> None:
        if self.config.at == "forward":
            model.parts[0].register_forward_pre_hook(lambda module, args: self.cap())
        if self.config.at == "backward":
            model.parts[0].head.register_full_backward_hook(lambda module, of_inputs, of_outputs: self.demand())

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        if self.config.at == "optimizer":
            self.cap()

    def demand(self) -> None:
        """Ask for more than there is: what a backward pass needs, it may find in memory that was freed."""
        import torch

        self.cap()
        if self.capped:
            torch.empty(2**30, dtype=torch.uint8)

    @property
    def capped(self) -> bool:
        return int(os.environ.get("RANK", "0")) == self.config.rank

    def cap(self) -> None:
        if self.capped:
            status = Path("/proc/self/status").read_text(encoding="ascii")
            now = 1024 * int(re.search(r"VmSize:\s*(\d+) kB", status)[1])  # type: ignore[index]
            resource.setrlimit(resource.RLIMIT_AS, (now + self.config.room * 2**20, resource.RLIM_INFINITY))
