"""Attention as in its formula."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge_train import Plugin, hookimpl
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.layers import AttentionKernel

if TYPE_CHECKING:
    from forge_train import Job


class Eager(Plugin):
    """The reference attention, in plain torch operations: supports everything on every device, but slowly."""

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

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._kernel: AttentionKernel | None = None

    @hookimpl
    def attention_kernel(self, job: Job) -> AttentionKernel:
        """The same kernel for every layer, so that layers share a batch's mask."""
        from ._eager import Kernel

        self._kernel = self._kernel or Kernel()
        return self._kernel
