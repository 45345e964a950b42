"""The logits of a model that generates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forge_train.base.errors import ForgeError
from forge_train.contract.batch import MASKED, Batch
from forge_train.contract.protocols import Task
from forge_train.mesh.tensors import full_tensor
from forge_train.plugin.job import Job
from forge_train_kit.capabilities import capabilities_of


def logits_of(task: Task, part: nn.Module, hidden: Tensor, seen: int) -> Tensor:
    """The logits for `hidden [1, sequence, dim]`: `[sequence, vocabulary]` fp32 on the CPU.

    Args:
        task: computes them as its outputs.
        part: the part of the model that has the head.
        hidden: hidden states for the head.
        seen: number of tokens that the model has processed, for the message.

    Raises:
        ForgeError: if they are NaN.
    """
    ids = torch.full(hidden.shape[:2], MASKED, device=hidden.device)
    logits = full_tensor(task.outputs(part, hidden, Batch(inputs=ids, labels=ids)))[0].float().cpu()
    if bool(logits.isnan().any()):
        raise ForgeError(f"The model's logits are NaN after {seen} tokens: its weights are damaged.")
    return logits


def continues(job: Job) -> bool:
    """Return True if attention can continue from a cache, with fewer queries than keys."""
    name = job.hooks.provider("attention_kernel")
    return name is None or capabilities_of(job.hooks.enabled[name].cls).offsets


def new_cache(part: nn.Module, length: int) -> Any:
    """A cache for one sequence, or None if the model or one of its layers (TypeError) has none."""
    make = getattr(part, "new_cache", None)
    try:
        return make(1, length) if make is not None else None
    except TypeError:
        return None
