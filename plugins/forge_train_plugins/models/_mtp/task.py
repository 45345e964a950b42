"""The task of the `mtp` plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import MASKED, Batch, PluginError
from forge_train_kit.losses import LossFunction, batch_loss
from forge_train_kit.model import full_tensor, sum_in_chunks

from .ahead import LABELS


@dataclass(frozen=True)
class MultiTokenTask:
    """The next token's loss. Its gradient also includes `weight / depths · Σ` of the depths' cross-entropy
    (arXiv:2412.19437, eq. 24 and 25). As in the paper, a depth's sum is divided by the number of next-token labels.
    """

    loss_function: LossFunction
    depths: int
    share: float
    chunk: int
    observe: Callable[[Tensor], None]
    """Called with the summed losses, the correct guesses and the label counts of each depth, `[3, depths]`."""

    def weight(self, batch: Batch) -> int:
        return int((batch.labels != MASKED).sum())

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        head, depths = part.get_submodule("head"), self.depths
        rows = len(batch.inputs)
        loss = batch_loss(self.loss_function, hidden[:rows], head, batch)
        if not part.training:
            return loss
        if len(hidden) != rows * (1 + depths):
            raise PluginError(
                f"mtp: in training, the model returned {len(hidden)} rows of hidden states for {rows} sequences, but "
                f"{1 + depths} for each were expected. The model must call its tail, and the executor must call "
                "model.on_micro_batch(…, batch=batch)."
            )
        labels = torch.cat(batch.targets[LABELS].unbind(-1))
        total, seen = sum_in_chunks(partial(_sums, head, depths), head, self.chunk, hidden[rows:], labels)
        self.observe(seen)
        further = self.share / depths * total
        return loss + (further - further.detach())  # adds a gradient, but no value

    def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        logits: Tensor = part.get_submodule("head")(hidden)
        return logits


def _sums(head: nn.Module, depths: int, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss, and the observed values, `[3, depths]`."""
    log_probabilities = F.log_softmax(head(hidden).float().flatten(0, 1), -1)
    flat = labels.flatten()
    loss = full_tensor(F.nll_loss(log_probabilities, flat, ignore_index=MASKED, reduction="sum"))
    with torch.no_grad():
        each = full_tensor(F.nll_loss(log_probabilities, flat, ignore_index=MASKED, reduction="none"))
        kept = flat != MASKED
        hits = (full_tensor(log_probabilities.amax(-1)) <= -each) & kept
        seen = torch.stack((each, hits.to(each), kept.to(each))).view(3, depths, -1).sum(-1)
    return loss, seen
