"""The transport of tokens to their experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from forge_train import Plugin, hookimpl, section

from .hookspecs import TokenDispatch

if TYPE_CHECKING:
    from forge_train import Job


class AllToAll(Plugin):
    """Sends tokens to their experts' ranks by all-to-all; sends nothing if all experts are local."""

    api = (1, 0)

    @section
    class Config:
        payload: Literal["same", "fp8"] = "same"
        """Format of the rows sent to experts, and of the gradients sent back: values unchanged, or e4m3 with an fp32
        scale for each 128 of a row, half the bytes of bf16 (arXiv:2412.19437, §3.3.3). The experts' outputs are sent
        unchanged."""

    config: Config

    @hookimpl
    def token_dispatch(self, job: Job) -> TokenDispatch:
        from ._alltoall.transport import Exchange, Local

        narrow = self.config.payload == "fp8"
        if job.dist.layout.ep == 1:
            return Local(narrow=narrow)
        return Exchange(job.dist.mesh("expert", "ep").get_group(), narrow=narrow)
