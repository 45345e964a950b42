"""The fastest attention kernel, by measurement."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from forge_train import ConfigError, Plugin, Problem, Volatile, hookimpl, section
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.layers import AttentionKernel

if TYPE_CHECKING:
    from forge_train import Job

    from ._auto.choice import Choice

log = logging.getLogger("forge_train")


class Auto(Plugin):
    """Attention by the fastest of several kernels that can do what the run needs, measured when the run starts.

    Rank 0 measures forward and backward at the run's shape and tells the other ranks. The result is kept for later runs
    on the same kind of device. A resumed run keeps its kernel, and logs a warning if that kernel can't run any more. A
    call that needs more than the run declared at the start, as generation does, uses the first kernel of the list that
    supports it. `forge plan` and offline commands measure nothing; they, too, use the first kernel of the list that
    supports the run.
    """

    api = (1, 0)
    kernel_capabilities = KernelCapabilities(
        documents=True,
        offsets=True,
        windows=True,
        dropout=True,
        soft_caps=True,
        sinks=True,
        log_sum_exp=True,
        blocks=True,
        lengths=True,
        prefixes=True,
    )

    @section
    class Config:
        kernels: tuple[str, ...] = ("sdpa", "varlen", "flex", "flash", "eager")
        """Installed kernels to choose from, each with its defaults; the last is used only if no other can be."""
        cache: Annotated[str, Volatile()] = ""
        """Folder for measurements; empty means forge-train/attention in $XDG_CACHE_HOME or ~/.cache."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._choice: Choice | None = None
        self._main = True

    @hookimpl
    def check_config(self) -> Iterator[Problem]:
        from forge_train_kit.plugins import find
        from forge_train_kit.source import Source

        if self.config.cache and Path(self.config.cache).expanduser().is_file():
            yield Problem("auto.cache", f"must be a folder; {self.config.cache} is a file.")
        if not self.config.kernels:
            yield Problem("auto.kernels", "names no kernel.")
        for name, count in Counter(self.config.kernels).items():
            if count > 1:
                yield Problem("auto.kernels", f"names {name!r} {count} times.")
        for name in self.config.kernels:
            try:
                found = find(name)
            except ConfigError as error:
                yield Problem("auto.kernels", str(error))
                continue
            if "attention_kernel" not in Source(found).hooks or found.object.endswith(":Auto"):
                yield Problem("auto.kernels", f"{name!r} is not an attention kernel that auto can choose.")

    @hookimpl
    def attention_kernel(self, job: Job) -> AttentionKernel:
        from ._auto.choice import Choice

        if self._choice is None:
            self._choice = Choice(self.config.kernels, job)
        return self._choice

    @hookimpl
    def on_start(self, job: Job) -> None:
        """Measure once the model is composed: by then every layer has declared what it needs."""
        from ._auto.measure import fastest

        self._main = job.dist.main
        if self._choice is not None:
            choice = self._choice
            name, why = job.dist.on_main(lambda: fastest(choice, job, self.config.cache))
            choice.take(name)
            if self._main:
                _tell(f"auto: attention by {name}: {why}")

    def state_dict(self) -> dict[str, Any]:
        """The run's kernel, because another one rounds differently."""
        return {"kernel": self._choice.taken if self._choice else ""}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._choice is None or not (name := state["kernel"]) or name == self._choice.taken:
            return
        if name in self._choice.able():
            self._choice.take(name)
            if self._main:
                _tell(f"auto: attention by {name}, as before in this run")
        else:
            log.warning(
                "auto: so far this run used the attention kernel %s, which can't run now; it continues with %s, and "
                "its numbers may differ by rounding",
                name,
                self._choice.taken,
            )


def _tell(text: str) -> None:
    """Write to the run's log, and to the screen of a command that shows progress."""
    log.info("%s", text)
    shown = logging.getLogger("forge_train.progress")
    if shown.handlers:
        shown.info("%s", text)
