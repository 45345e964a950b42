"""Batches of a third party: labels that are distributions, `[batch, sequence, vocabulary]`, a target with its axes
exchanged, and plugins whose names are in the wrong order. As `soft_targets:SoftTask`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import Axes, Batch, BatchPhase, Job, Plugin, PrepareBatch, hookimpl
from forge_train_kit import hookspecs

WINDOW = 4
"""Tokens ahead that a soft label is made of: at the end of a slice they come from beyond it."""


class SoftTask(Plugin):
    """Predicts a distribution at each position; positions are weighted by the target `weights`, `[sequence, batch]`."""

    api = (1, 0)
    gives = {"task": "distributions"}

    @hookimpl
    def task(self, job: Job) -> Any:
        return Distributions()


class Distributions:
    def weight(self, batch: Batch) -> float:
        return float(batch.targets["weights"].sum())

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        losses = -(batch.labels * self.outputs(part, hidden, batch).float().log_softmax(-1)).sum(-1)
        return (losses * batch.targets["weights"].T).sum()

    def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        logits: Tensor = part.get_submodule("head")(hidden)
        return logits


class Soften(Plugin):
    """Makes labels of the tokens that follow."""

    api = (1, 0)

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareBatch:
        vocabulary = hookspecs.tokenizer(job).vocabulary

        def soften(batch: Batch) -> Batch:
            following = F.pad(batch.labels, (0, WINDOW - 1)).clamp(min=0).unfold(1, WINDOW, 1)
            return replace(batch, labels=F.one_hot(following, vocabulary).float().mean(2))

        return PrepareBatch(BatchPhase.MAKE, soften)


class Weigh(Plugin):
    """Leaves out a third of the tokens."""

    api = (1, 0)

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareBatch:
        def weigh(batch: Batch) -> Batch:
            weights = (batch.inputs % 3 > 0).float().T
            return batch.with_targets({"weights": weights}, Axes(batch=1, sequence=0))

        return PrepareBatch(BatchPhase.MASK, weigh)


class Shorten(Plugin):
    """Keeps the first half of every sequence."""

    api = (1, 0)

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareBatch:
        half = job.config.train.sequence // 2
        return PrepareBatch(BatchPhase.SLICE, lambda batch: batch.slice("sequence", (0, half)))


class AShorten(Shorten):
    """Comes first by name."""


class ZSoften(Soften):
    """Comes last by name."""


class Misshapen(Plugin):
    """A target whose axes are not said."""

    api = (1, 0)

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareBatch:
        return PrepareBatch(BatchPhase.MASK, lambda batch: replace(batch, targets={"weights": torch.ones(32, 5)}))
