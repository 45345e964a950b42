"""Callers of collectives: their lines, and the plugins that the calls are due to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from forge_train.contract.transform import Phase
from forge_train.plugin.calls import at_home
from forge_train.plugin.job import Job

from ..stacks import is_own

KERNEL = "forge"
"""Label of the kernel's own calls: sums over losses, counts and norms."""
KERNEL_PACKAGE = "forge_train"
SERVICE = "forge_train.mesh"
"""Package through which plugins call collectives: the call is theirs."""
BETWEEN = (
    *("torch._ops", "torch.library", "torch._library", "torch.utils._contextlib"),
    *("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger"),
    *("torch.distributed._functional_collectives", "torch._compile", "torch._dynamo.eval_frame"),
)
"""Modules of torch between whoever calls a collective and the collective."""
PLACES = 3
"""Places of a call that are kept."""
TOOLS = ("forge_train_tools.tracing", "forge_train_tools.planning", "forge_train_tools.ordering")
"""Packages that watch calls: no caller is among them."""
Frame = tuple[str, str, int, str]
"""File, module, line and function."""
SHARDING = "torch.distributed.fsdp"
"""Package of torch that gathers and reduces weights, over groups that may be any axes'."""


class Callers:
    """Finds callers in the stack.

    Args:
        job: the run.
        owners: axis, or `SHARDING` → the plugin that made it real.
    """

    def __init__(self, job: Job, owners: Mapping[str, str]) -> None:
        self._job, self._owners = job, owners
        self._optimizer = next(iter(job.hooks.acting("optimizer")), "")
        self._own: dict[str, bool] = {}
        self._homes: dict[str, str] = {}

    def frames(self, frame: FrameType | None) -> tuple[list[Frame], str]:
        """The innermost frames of own code, and the module of torch through which they call. Names are found later."""
        found: list[Frame] = []
        via = ""
        while frame is not None and len(found) < PLACES:
            file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
            own = self._own.get(file)
            if own is None:
                own = self._own[file] = is_own(file) and not module.startswith(TOOLS)
            if own:
                found.append((file, module, frame.f_lineno, frame.f_code.co_name))
            elif not found and not module.startswith((*BETWEEN, *TOOLS)):
                via = via or module
            frame = frame.f_back
        return found, via

    def plugin(self, frames: Sequence[Frame], via: str, axis: str, phase: str) -> str:
        """Return the plugin that a call is due to. Many collectives of a layout are called by torch, from the model's
        lines: they are due to whoever shards, or made their axis real. Those of a shared library are the optimizer's,
        if it is at work."""
        modules = [module for _, module, _, _ in frames if not module.startswith(SERVICE)]
        whose = self._home(modules[0]) if modules else ""
        if via.startswith(SHARDING) and SHARDING in self._owners:
            return self._owners[SHARDING]
        if whose and (not via or whose == KERNEL):
            return whose
        if not whose and phase == "update":
            return self._optimizer or KERNEL
        return next((self._owners[one] for one in axis.split(" × ") if one in self._owners), whose or KERNEL)

    def _home(self, module: str) -> str:
        if module not in self._homes:
            names = (one.name for one in at_home(module, self._job.hooks.enabled.values()))
            own = KERNEL if module.partition(".")[0] == KERNEL_PACKAGE else ""
            self._homes[module] = own or " or ".join(dict.fromkeys(names))
        return self._homes[module]


def owners(transforms: Sequence[tuple[str, Any]]) -> dict[str, str]:
    """Axis → the plugin whose transform covers it; `SHARDING` → the plugin that shards."""
    found = {axis: plugin for plugin, transform in transforms for axis in transform.covers}
    for plugin, transform in transforms:
        if transform.phase is Phase.SHARD:
            found[SHARDING] = plugin
    return found


def places(frames: Sequence[Frame]) -> list[str]:
    """`file:line, in function` of each frame."""
    return [f"{_short(file, module)}:{line}, in {name}" for file, module, line, name in frames]


def _short(file: str, module: str) -> str:
    """The path of a module below the folder that it is imported from."""
    parts = file.replace("\\", "/").split("/")
    return "/".join(parts[-(module.count(".") + 1 + (parts[-1] == "__init__.py")) :])
