"""The transport of tokens to their experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from forge_train import Plugin, TokenDispatch, hookimpl, section

if TYPE_CHECKING:
    from forge_train import Job


class AllToAll(Plugin):
    """Sends tokens to the ranks of their experts by all-to-all, and nowhere where all experts are local."""

    api = (1, 0)

    @section
    class Config:
        payload: Literal["same", "fp8"] = "same"
        """What is sent to experts, and as gradients back to them: values as they are, or e4m3 with an fp32 scale for
        each 128 of a row, half the bytes of bf16 (arXiv:2412.19437, §3.3.3). What experts give is sent as it is."""

    config: Config

    @hookimpl
    def token_dispatch(self, job: Job) -> TokenDispatch:
        from ._alltoall.transport import Exchange, Local

        narrow = self.config.payload == "fp8"
        if job.dist.layout.ep == 1:
            return Local(narrow=narrow)
        return Exchange(job.dist.mesh("expert", "ep").get_group(), narrow=narrow)
