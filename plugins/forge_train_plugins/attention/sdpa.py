"""Attention by torch's own kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from forge_train import ConfigError, Plugin, hookimpl, section
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.layers import AttentionKernel

if TYPE_CHECKING:
    from forge_train import Job


class SDPA(Plugin):
    """Attention by torch's scaled_dot_product_attention: runs everywhere.

    Documents, windows and prefixes need a dense mask, which torch's flash kernels on CUDA do not support; `flex`
    needs none, and `varlen` none for documents and windows.
    """

    api = (1, 0)
    kernel_capabilities = KernelCapabilities(documents=True, offsets=True, windows=True, lengths=True, prefixes=True)

    @section
    class Config:
        backend: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
        """Torch's implementation; auto lets torch choose for each call."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._kernel: AttentionKernel | None = None

    @hookimpl
    def attention_kernel(self, job: Job) -> AttentionKernel:
        """The same kernel for every layer, so that layers share a batch's mask."""
        from forge_train_kit.kernels import needs_of

        from ._sdpa import Kernel, missing

        backend = self.config.backend
        if self._kernel is None and backend != "auto":
            masked = any(
                needs.documents or needs.windows or needs.prefixes for _, needs in needs_of(job.hooks, job.config)
            )
            if why := missing(backend, job.device, job.config.train.precision, masked=masked):
                raise ConfigError(f"sdpa.backend = {backend!r}: {why}.")
        self._kernel = self._kernel or Kernel(backend)
        return self._kernel
