"""The logits of a model that generates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forge_train.base.errors import ForgeError
from forge_train.contract.batch import MASKED, Batch
from forge_train.contract.protocols import Task
from forge_train.mesh.tensors import full_tensor
from forge_train.plugin import hookspecs
from forge_train.plugin.job import Job
from forge_train_kit.capabilities import capabilities_of


class Logits:
    """Logits of the next token, computed from the new tokens."""

    def __init__(self, job: Job, part: nn.Module, length: int) -> None:
        self._part, self._device = part, job.device
        self._task: Task = hookspecs.task(job)
        self._cache = new_cache(part, length) if continues(job) else None
        self._ids: list[int] = []

    @torch.no_grad()
    def __call__(self, new: Sequence[int]) -> Tensor:
        """`[vocabulary]` fp32 on the CPU.

        Raises:
            ForgeError: if they are NaN.
        """
        self._ids += new
        ids = torch.tensor([self._ids if self._cache is None else new], device=self._device)
        hidden = self._part(ids) if self._cache is None else self._part(ids, cache=self._cache)
        return logits_of(self._task, self._part, hidden[:, -1:], len(self._ids))[-1]


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
