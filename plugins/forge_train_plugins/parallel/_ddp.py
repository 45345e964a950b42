"""Replication of one part of the model by DDP."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from forge_train import Applied, ConfigError, MicroBatch

FIRST = 2**20
"""Bytes of the first bucket: its reduction should begin early."""


def replicate(part: nn.Module, group: dist.ProcessGroup, size: int) -> Applied:
    """Average the gradients of a part over a group, in buckets of `size` bytes.

    Raises:
        ConfigError: if parameters are split already.
    """
    split = [name for name, parameter in part.named_parameters() if isinstance(parameter, DTensor)]
    if split:
        raise ConfigError(
            f"ddp can't take weights that another plugin has split ({split[0]}); use fsdp2 instead of ddp."
        )
    average = Average(part, group, size)
    trained = {name: parameter for name, parameter in part.named_parameters() if parameter.requires_grad}
    ranks, held = dist.get_world_size(group), sum(p.numel() * p.element_size() for p in trained.values())
    return Applied(
        part,
        matched=tuple(trained),
        note=f"{ranks} replicas",
        expected_bytes={"data": 2 * held * (ranks - 1) / ranks},  # a ring; arXiv:2006.15704, §2.3
        on_micro_batch=average.begin,
        after_backward=average.finish,
    )


@dataclass
class _Bucket:
    """Parameters whose gradients are averaged together."""

    parameters: list[nn.Parameter] = field(default_factory=list)
    bytes: int = 0
    missing: int = 0
    """Gradients that the last backward pass has not brought yet."""
    flat: Tensor | None = None
    work: Any = None


class Average:
    """Buckets of gradients, each reduced as soon as it and all before it are complete, in the same order on all ranks.

    Parameters come in the reverse of their order in the model, which is about the order of their gradients.
    """

    def __init__(self, part: nn.Module, group: dist.ProcessGroup, size: int) -> None:
        self._part, self._group, self._size = part, group, size
        self._ranks = dist.get_world_size(group)
        self._buckets: list[_Bucket] = []
        self._attached: dict[int, nn.Parameter] = {}
        self._hooks: list[RemovableHandle] = []
        self._next = 0
        self._last = False

    def begin(self, micro: MicroBatch) -> None:
        """A backward pass begins: in the last one, gradients are averaged as they come."""
        if micro.direction == "forward":
            return
        # Not earlier: parameters get their memory, and with it their identity, after composition. Frozen ones may thaw.
        trained = {id(one): one for one in self._part.parameters() if one.requires_grad}
        if trained.keys() != self._attached.keys():
            self._attach(trained)
        self._last = micro.last
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def finish(self) -> None:
        """Reduce the remaining buckets (a parameter without gradient counts as zero), and copy the averages back."""
        while self._next < len(self._buckets):
            self._reduce()
        for bucket in self._buckets:
            assert bucket.flat is not None
            bucket.work.wait()
            bucket.flat.div_(self._ranks)
            offset = 0
            for parameter in bucket.parameters:
                parameter.grad = bucket.flat[offset : offset + parameter.numel()].view_as(parameter)
                offset += parameter.numel()
            bucket.flat = bucket.work = None

    def _attach(self, trained: dict[int, nn.Parameter]) -> None:
        for hook in self._hooks:
            hook.remove()
        self._attached, self._hooks, self._buckets = trained, [], []
        limit = min(FIRST, self._size)
        for parameter in reversed(trained.values()):
            bucket = self._buckets[-1] if self._buckets else None
            if bucket is None or bucket.bytes >= limit or bucket.parameters[0].dtype != parameter.dtype:
                limit = self._size if self._buckets else limit
                bucket = _Bucket()
                self._buckets.append(bucket)
            bucket.parameters.append(parameter)
            bucket.bytes += parameter.numel() * parameter.element_size()
            arrived = partial(self._arrived, bucket)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]

    def _arrived(self, bucket: _Bucket, parameter: Tensor) -> None:
        if not self._last:
            return
        bucket.missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._reduce()

    @torch.no_grad()
    def _reduce(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.flat = torch.cat([_gradient(parameter).reshape(-1) for parameter in bucket.parameters])
        for parameter in bucket.parameters:
            parameter.grad = None
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
