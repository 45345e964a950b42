"""Attention by torch's own kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge_train import AttentionKernel, KernelCapabilities, Plugin, hookimpl

if TYPE_CHECKING:
    from forge_train import Job


class SDPA(Plugin):
    """Attention by torch's scaled_dot_product_attention: runs everywhere, the reference for other kernels."""

    api = (1, 0)
    kernel_capabilities = KernelCapabilities(documents=True, offsets=True, windows=True, dropout=True)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._kernel: AttentionKernel | None = None

    @hookimpl
    def attention_kernel(self, job: Job) -> AttentionKernel:
        """The same for every layer that asks: they share a batch's mask."""
        from ._sdpa import Kernel

        self._kernel = self._kernel or Kernel()
        return self._kernel
