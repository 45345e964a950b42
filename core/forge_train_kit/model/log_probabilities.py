"""Log-probabilities of whole answers, for losses that compare them: preferences, reinforcement learning."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from forge_train.contract.batch import MASKED
from forge_train.mesh.tensors import full_tensor

from .chunks import sum_in_chunks
from .pooling import sum_of_slices

if TYPE_CHECKING:
    from forge_train.plugin.job import Job


def row_log_probabilities(
    hidden: Tensor, head: nn.Module, labels: Tensor, job: Job, *, chunk: int = 0, gathered: bool = False
) -> tuple[Tensor, Tensor]:
    """The summed log-probability of the unmasked labels of each row, and their number; both `[batch]` fp32.

    The head's logits may be sharded over the vocabulary. Under context parallelism, every rank gets the sums of whole
    rows and propagates its part of the gradient, as with `pool`. The logits of a chunk are recomputed in the backward
    pass, because the gradient of a row may depend on the other rows.

    Args:
        hidden: `[batch, sequence, dim]`, of the model's last part.
        head: gives token logits.
        labels: `[batch, sequence]`, where −100 is masked.
        job: the run.
        chunk: tokens whose logits exist at once; 0 chooses.
        gathered: whether every rank gathers the logits of a chunk: before a step or an evaluation, outside of the spans
            in which torch computes with logits that are sharded over the vocabulary (`loss_parallel`).
    """
    sums = sum_in_chunks(partial(_by_row, head, gathered), head, chunk, hidden, labels)
    return sum_of_slices(sums, job), sum_of_slices((labels != MASKED).sum(1).float(), job)


def _by_row(head: nn.Module, gathered: bool, hidden: Tensor, labels: Tensor) -> Tensor:
    """`[batch]`, of one chunk."""
    logits = full_tensor(head(hidden)) if gathered else head(hidden)
    log_probabilities = F.log_softmax(logits.float().flatten(0, 1), -1)
    each = full_tensor(F.nll_loss(log_probabilities, labels.flatten(), ignore_index=MASKED, reduction="none"))
    return -each.view(labels.shape).sum(1)
