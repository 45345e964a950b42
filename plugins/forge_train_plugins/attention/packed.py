"""Attention over packed documents, given by their bounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from forge_train import ConfigError, Plugin, Problem, hookimpl, section
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.layers import AttentionKernel

if TYPE_CHECKING:
    from forge_train import Job


class Varlen(Plugin):
    """Attention without a mask, over packed documents given by their bounds: torch's varlen attention on CUDA.

    If torch has none, flash-attn's is used. Both compute in bf16 or fp16. On other devices, attention is computed in
    tiles of plain torch operations, in any dtype. None of them holds a sequence × sequence mask, and the bounds are
    read from the device once per batch. The tokens of a document must be neighbours.
    """

    api = (1, 0)
    kernel_capabilities = KernelCapabilities(documents=True, offsets=True, windows=True)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._kernel: AttentionKernel | None = None

    @hookimpl
    def attention_kernel(self, job: Job) -> AttentionKernel:
        """The same kernel for every layer, so that layers share a batch's bounds."""
        from ._packed.functions import flash_function, torch_function
        from ._packed.kernel import PackedKernel, TiledKernel

        if self._kernel is None and job.device.type == "cuda":
            check_dtype(job, "varlen")
            function = torch_function() or flash_function("auto", job.device, "varlen")
            self._kernel = PackedKernel(function)
        self._kernel = self._kernel or TiledKernel()
        return self._kernel


class Flash(Plugin):
    """Attention by flash-attn 2, 3 or 4, whichever is installed; CUDA, bf16 or fp16, heads of up to 256 features.

    The tokens of a document must be neighbours.
    """

    api = (1, 0)
    devices = ("cuda",)
    kernel_capabilities = KernelCapabilities(documents=True, offsets=True, windows=True)

    @section
    class Config:
        version: Literal["auto", "2", "3", "4"] = "auto"
        """Version of flash-attn; auto means the newest that is installed and runs on the device."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._kernel: AttentionKernel | None = None

    @hookimpl
    def check_config(self) -> Iterator[Problem]:
        from ._packed.versions import missing

        if problem := missing(self.config.version):
            yield Problem("flash.version", problem)

    @hookimpl
    def attention_kernel(self, job: Job) -> AttentionKernel:
        """The same kernel for every layer, so that layers share a batch's bounds."""
        from ._packed.functions import flash_function
        from ._packed.kernel import PackedKernel

        if self._kernel is None:
            check_dtype(job, "flash")
            self._kernel = PackedKernel(flash_function(self.config.version, job.device, "flash"))
        return self._kernel


def check_dtype(job: Job, name: str) -> None:
    """Check that a fused kernel can compute in the run's dtype.

    Raises:
        ConfigError: if it can't.
    """
    if job.config.train.precision == "fp32":
        raise ConfigError(
            f"{name}: on CUDA it computes in bf16 or fp16 only, and train.precision is 'fp32'; set it to 'bf16', or "
            "use another kernel."
        )
