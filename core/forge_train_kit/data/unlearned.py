"""Stop tokens that a frozen head can't tell from others."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_train.compose.initialise import local_window

if TYPE_CHECKING:
    from forge_train import Job, Model

log = logging.getLogger("forge_train")

SMALL = 1e-3
"""Length of a row, as a share of the mean of all, below which its logits stay at zero."""


def warn_of_unlearned_stop(model: Model, job: Job, name: str, end: int, way_out: str) -> None:
    """Warn if a run does not train the head, and the head's row of the token that ends a turn is zero, or the same as
    that of another token: whatever the layers before it learn, that token's logit stays at zero, or is another's too.

    All processes call this once the weights are there.

    Args:
        model: of the run.
        job: the run.
        name: the plugin whose template it is, for the message.
        end: the token.
        way_out: what has the row trained, for the message.
    """
    text = job.hooks.provider("tokenizer") and job.hooks.gives("head") == "token_logits"
    found = _frozen_head(model, job) if text else None
    if found is None:
        return
    head, weight = found
    like = _like(weight, job, end)
    if like and job.dist.main:
        log.warning(
            "%s: a turn ends with token %d, whose row of %s is %s, so the base never learned it; this run does not "
            "train the row, and the model can't learn to end its turns. Train it: %s.",
            *(name, end, head, like, way_out),
        )


def _frozen_head(model: Model, job: Job) -> tuple[str, Tensor | None] | None:
    """The name of the matrix that gives logits, and the matrix itself on a process that has it; None if any of its
    module's parameters is trained."""
    parameters, roles = dict(model.named_parameters()), model.roles
    here = [(name, roles[name]) for name, one in parameters.items() if one.ndim == 2 and name in roles]
    stages = [pair for stage in job.dist.gather_stages(here) for pair in stage]
    names = [name for name, role in stages if role == "head"] or [name for name, role in stages if role == "embedding"]
    if len(names) != 1:
        return None
    whose = f"{names[0].rpartition('.')[0]}."
    trained = any(one.requires_grad for name, one in parameters.items() if name.startswith(whose))
    if any(job.dist.gather_objects(trained)):
        return None
    return names[0], parameters.get(names[0])


@torch.no_grad()
def _like(weight: Tensor | None, job: Job, end: int) -> str:
    """Say what is odd about a row; empty for a row of its own."""
    empty = torch.empty(0, 0), [(0, 0), (0, 0)]
    part, window = empty if weight is None else local_window(weight.detach())
    first, last = window[0]
    whole = weight is None or window[1] == (0, weight.shape[1])
    own = part[end - first].cpu() if first <= end < last else None
    given = job.dist.gather_objects((whole, own))
    row = next((one for _, one in given if one is not None), None)
    if row is None or not all(one for one, _ in given):
        return ""
    same, length = set[int](), 0.0
    if len(part):
        there = row.to(part.device)
        near = (part[:, 0] == there[0]).nonzero().flatten().tolist()
        same = {first + at for at in near if torch.equal(part[at], there)}
        length = float(torch.linalg.vector_norm(part, dim=1, dtype=torch.float32).sum())
    all_same, lengths, counts = zip(*job.dist.gather_objects((same, length, len(part))), strict=True)
    if float(row.norm()) <= SMALL * sum(lengths) / max(sum(counts), 1):
        return "nearly zero" if row.any() else "zero"
    others = sorted(set[int]().union(*all_same) - {end})
    return f"the same as that of token {others[0]}" if others else ""
