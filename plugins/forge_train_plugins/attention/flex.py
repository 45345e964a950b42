"""FlexAttention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge_train import Plugin, hookimpl
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.layers import AttentionKernel

if TYPE_CHECKING:
    from forge_train import Job


class Flex(Plugin):
    """Attention by torch's FlexAttention on CUDA, with documents, windows, soft caps and sinks in one fused kernel.

    FlexAttention trains on CUDA only (torch 2.13); on other devices, attention is computed in tiles of plain torch
    operations. Neither holds a sequence × sequence mask. The tokens of a document must be neighbours.
    """

    api = (1, 0)
    kernel_capabilities = KernelCapabilities(
        documents=True,
        offsets=True,
        windows=True,
        soft_caps=True,
        sinks=True,
        log_sum_exp=True,
        blocks=True,
        prefixes=True,
    )

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._kernel: AttentionKernel | None = None

    @hookimpl
    def attention_kernel(self, job: Job) -> AttentionKernel:
        """The same kernel for every layer, so that layers share a batch's block mask."""
        from ._flex import FlexKernel

        if self._kernel is None:
            from forge_train_kit.model import TiledAttention

            self._kernel = FlexKernel() if job.device.type == "cuda" else TiledAttention()
        return self._kernel
