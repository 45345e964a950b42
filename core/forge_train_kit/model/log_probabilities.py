"""Log-probabilities of whole answers, for losses that compare them: preferences, reinforcement learning."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train.contract.batch import MASKED
from forge_train.mesh.tensors import full_tensor

from ..losses import ANSWERS
from .chunks import chosen, sum_in_chunks
from .pooling import MEMBER, sum_of_slices

if TYPE_CHECKING:
    from forge_train.contract.batch import Batch
    from forge_train.plugin.job import Job


def answers_of(batch: Batch) -> tuple[Tensor, int] | None:
    """The number of each token's answer in its row, and the largest number of answers of a row: for
    `row_log_probabilities`; None if each row is one answer."""
    numbers = batch.targets.get(ANSWERS)
    return None if numbers is None else (numbers, batch.targets[MEMBER].shape[1])


def row_log_probabilities(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    job: Job,
    *,
    chunk: int = 0,
    gathered: bool = False,
    answers: tuple[Tensor, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The summed log-probability of the unmasked labels of each row in fp64, and their number; both `[batch]`.

    The head's logits may be sharded over the vocabulary. Under context parallelism, every rank gets the sums of whole
    rows and propagates its part of the gradient, as with `pool`. The logits of a chunk are recomputed in the backward
    pass, because the gradient of a row may depend on the other rows. Log-probabilities of single tokens are fp32, and
    their sums are not: tasks take the difference of two large ones that are almost equal.

    Args:
        hidden: `[batch, sequence, dim]`, of the model's last part.
        head: gives token logits.
        labels: `[batch, sequence]`, where −100 is masked.
        job: the run.
        chunk: tokens whose logits exist at once; 0 chooses.
        gathered: whether every rank gathers the logits of a chunk: before a step or an evaluation, outside of the spans
            in which torch computes with logits that are sharded over the vocabulary (`loss_parallel`).
        answers: where rows hold several answers, the number of each token's in its row, `[batch, sequence]`, and how
            many a row has at most: both results are then of answers, `[batch × most]`, row by row.
    """
    numbers, most = ((), 0) if answers is None else ((answers[0],), answers[1])
    sums = sum_in_chunks(partial(_by_row, head, gathered, most), head, chunk, hidden, labels, *numbers)
    return sum_of_slices(sums, job), sum_of_slices(_summed((labels != MASKED).float(), most, *numbers), job)


def token_log_probabilities(hidden: Tensor, head: nn.Module, labels: Tensor, *, gathered: bool = False) -> Tensor:
    """The log-probability of each unmasked label, and 0 for others: `[batch, sequence]` fp32, without gradients.

    Args:
        hidden: see `row_log_probabilities`; so are the others.
    """
    length = max(1, chosen(labels.numel(), head) // len(labels))
    pieces = zip(torch.split(hidden, length, 1), torch.split(labels, length, 1), strict=True)
    with torch.no_grad():
        return torch.cat([_by_token(head, gathered, *piece) for piece in pieces], 1)


def _by_row(
    head: nn.Module, gathered: bool, most: int, hidden: Tensor, labels: Tensor, numbers: Tensor | None = None
) -> Tensor:
    """`[batch]` or `[batch × most]`, of one chunk."""
    return _summed(_by_token(head, gathered, hidden, labels).double(), most, numbers)


def _by_token(head: nn.Module, gathered: bool, hidden: Tensor, labels: Tensor) -> Tensor:
    """`[batch, sequence]`, of one chunk."""
    logits = full_tensor(head(hidden)) if gathered else head(hidden)
    log_probabilities = F.log_softmax(logits.float().flatten(0, 1), -1)
    each = full_tensor(F.nll_loss(log_probabilities, labels.flatten(), ignore_index=MASKED, reduction="none"))
    return -each.view(labels.shape)


def _summed(each: Tensor, most: int, numbers: Tensor | None = None) -> Tensor:
    """Sums over rows, or over the tokens of each number from 0 on; in a fixed order on every device."""
    if numbers is None:
        return each.sum(1)
    own = numbers.unsqueeze(-1) == torch.arange(most, device=each.device)
    return torch.where(own, each.unsqueeze(-1), 0).sum(1).flatten()
