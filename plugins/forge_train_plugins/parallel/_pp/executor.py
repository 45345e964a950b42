"""The executor of the `pp` plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from forge_train import Batch, ConfigError, Job, Model, Task
from forge_train_kit.activations import Interventions
from forge_train_kit.model import full_tensor
from forge_train_kit.pipeline import Action, Timetable

from .channel import Channel
from .program import Operation, last_of_each, program
from .rules import RULES, advice, compiled
from .schedules import CountError, timetable
from .step import Step

if TYPE_CHECKING:
    from ..pp import PipelineParallel
    from .cutting import Cut


class Pipeline:
    """Follows a timetable. Without a cut, the model is one part on one rank.

    Schedules and the split of a backward pass are torch.distributed.pipelining's. Its stages are not: see
    docs/design/pipelines.md.
    """

    def __init__(
        self, model: Model, task: Task, job: Job, config: PipelineParallel.Config, cut: Cut | None = None
    ) -> None:
        self.model, self.task, self.job, self._config = model, task, job, config
        self._ranks = job.dist.layout.pp
        self._rank = job.dist.mesh("dense", "pp").get_local_rank() if self._ranks > 1 else 0
        self._ties = cut.ties if cut else None
        self._placement = cut.placement if cut else (0,)
        self._parts: dict[int, nn.Module] = dict(zip(cut.parts if cut else (0,), model.parts, strict=True))
        units = (module for part in model.parts for module in part.modules() if module._compiled_call_impl)
        if any(getattr(part, "split_backward", False) for part in model.parts) and any(units):
            raise ConfigError(f"pp.schedule: {compiled(config.schedule)}")
        self._recomputes = any("ac" in enabled.cls.provides for enabled in job.hooks.enabled.values())
        self._channel = Channel(job)
        self._interventions = Interventions.of(model, job)
        self._program = cache(self._make_program)
        self._followed: Timetable | None = None

    def timetable(self, micro_batches: int) -> Timetable:
        """See `forge_train_kit.pipeline.PipelineExecutor`."""
        config = self._config if self._ranks > 1 else type(self._config)()  # a model that was not cut is one part
        return timetable(config, self._ranks, micro_batches)

    def follow(self, timetable: Timetable) -> None:
        """See `forge_train_kit.pipeline.PipelineExecutor`."""
        self._followed = timetable

    def alternatives(self, micro_batches: int) -> Mapping[str, Timetable | str]:
        """See `forge_train_kit.pipeline.PipelineExecutor`."""
        found: dict[str, Timetable | str] = {}
        for name, rule in RULES.items():
            parts = self._config.parts if self._config.parts and not rule.parts[1] else rule.parts[0]
            config = type(self._config)(schedule=name, parts=parts)
            try:
                found[name] = timetable(config, self._ranks, micro_batches)
            except ConfigError as error:
                share = micro_batches * self.job.config.train.micro_batch
                way_out = advice(config, self._ranks, share, micro_batches) if isinstance(error, CountError) else ""
                found[name] = f"{str(error).rstrip('.')}{way_out and ': '}{way_out}."
        return found

    def train(self, batches: Sequence[Batch], scale: Tensor | float) -> Tensor:
        """See `forge_train.Executor`."""
        if self._ties is not None:
            self._ties.refresh()
        operations, last = self._program(len(batches))
        count = len(self._placement)
        step = Step(
            self.model, self.task, self._parts, count, self._channel, batches, scale, recomputes=self._recomputes
        )
        for operation in operations:
            step.do(operation, last=operation in last)
        self._channel.wait()
        return step.loss()

    def evaluate(self, batch: Batch) -> Tensor:
        """See `forge_train.Executor`. The ranks of the first parts start the next batch while others compute."""
        if self._ties is not None:
            self._ties.refresh()
        modes = [part.training for part in self._parts.values()]
        try:
            for part in self._parts.values():
                part.eval()
            with torch.no_grad(), self._interventions.applied():
                return self._forward(batch)
        finally:
            for part, mode in zip(self._parts.values(), modes, strict=True):
                part.train(mode)

    def _forward(self, batch: Batch) -> Tensor:
        given: dict[int, Tensor] = {}
        for number, part in self._parts.items():
            before, after = number - 1, number + 1
            if number == 0:
                x = batch.inputs
            elif before in self._parts:
                x = given.pop(before)
            else:
                x = self._channel.receive(part, batch, self._placement[before]).wait()
            hidden = part(x, **batch.model_inputs())
            if after == len(self._placement):
                return full_tensor(self.task.loss(part, hidden, batch))
            if after in self._parts:
                given[number] = hidden
            else:
                self._channel.send(part, batch, hidden, self._placement[after])
        return torch.zeros((), device=self.job.device)

    def _make_program(self, micro_batches: int) -> tuple[list[Operation], frozenset[Action]]:
        table = self._followed or self.timetable(micro_batches)
        return program(table, self._rank), last_of_each(table, self._rank)
