"""Losses of whole logits, as other frameworks have them: their memory, for a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from forge_train import MASKED, Plugin, hookimpl, section

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from forge_train import Job


class OwnLoss(Plugin):
    """Cross-entropy of all logits at once: in their own dtype, or in one compiled kernel each way."""

    api = (1, 0)
    takes: ClassVar[Mapping[str, tuple[str, ...]]] = {"head": ("token_logits",)}

    @section
    class Config:
        compiled: bool = False
        """Keep logits for the backward pass, and nothing as large beside them: as torch.compile has it."""

    config: Config

    @hookimpl
    def loss(self, job: Job) -> Loss:
        return Loss(self.config.compiled)


class Loss:
    """`hidden [batch, sequence, dim]`, `labels [batch, sequence]` → 0-dim."""

    def __init__(self, compiled: bool) -> None:
        self._compiled = compiled
        self._logits: Tensor | None = None

    def __call__(self, hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
        import torch.nn.functional as F

        from forge_train_kit.model import full_tensor

        logits = head(hidden).flatten(0, 1)
        if self._compiled:
            return _compiled(logits)
        self._logits = logits.detach()  # a variable of the step's loop, until the next micro-batch
        return full_tensor(F.cross_entropy(logits, labels.flatten(), ignore_index=MASKED, reduction="sum").float())


def _compiled(logits: Tensor) -> Tensor:
    import torch

    class Compiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor) -> Tensor:
            ctx.save_for_backward(logits)
            return logits.new_empty((), dtype=torch.float32)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return torch.empty_like(ctx.saved_tensors[0])

    found: Tensor = Compiled.apply(logits)  # type: ignore[no-untyped-call]  # torch has no types there
    return found
