"""A task and an observer of third parties that add tensors to a step. As `step_tensors:Weighing` and the like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_train import (
    MASKED,
    Axes,
    Batch,
    BatchPhase,
    Job,
    Metric,
    Model,
    Plugin,
    PrepareBatch,
    PrepareStep,
    Update,
    hookimpl,
)
from forge_train_kit import metrics
from forge_train_kit.model import gather_samples

WEIGHTS, MEAN = "weighing.weights", "weighing.mean"
"""Of each token the weight of its document, `[batch, sequence]`, and the mean that these are relative to."""
DOCUMENTS = "weighing.documents"
"""How many documents a micro-batch has."""
LOSSES = "weighing.losses"
"""Of each token, as the loss found it."""
LEFT = "leaving.norms"
"""A feature of what the final norm gives."""
FIRST = "leaving.first"
"""The same of the first layer, which a pipeline has on its first stage."""
TOKENS, WHOLE = Axes(batch=0, sequence=1), Axes(batch=None)


class Weighing(Plugin):
    """Weighs each document by its mean token, relative to the mean over the documents of the global batch."""

    api = (1, 0)
    everywhere = True

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareStep:
        def weigh(batches: Sequence[Batch]) -> list[Batch]:
            pairs = [(_by_document(batch), _begins(batch)) for batch in batches]
            sums = torch.stack([torch.stack([(w * b).sum(), b.sum().float()]) for w, b in pairs]).sum(0)
            if self.everywhere:
                job.dist.all_reduce(sums, axis="dp")
            mean = sums[0] / sums[1]
            return [
                batch.with_targets({WEIGHTS: w / mean}, TOKENS).with_targets({MEAN: mean, DOCUMENTS: b.sum()}, WHOLE)
                for batch, (w, b) in zip(batches, pairs, strict=True)
            ]

        return PrepareStep(weigh)

    @hookimpl
    def task(self, job: Job) -> WeighingTask:
        return WeighingTask()


class WeighingHere(Weighing):
    """Relative to the documents of the rank alone, which are others on another layout."""

    everywhere = False


def _begins(batch: Batch) -> Tensor:
    """Where documents begin, `[batch, sequence]`."""
    begins = torch.zeros_like(batch.inputs, dtype=torch.bool)
    begins[:, 0] = True
    if batch.document_ids is not None:
        begins[:, 1:] = batch.document_ids[:, 1:] != batch.document_ids[:, :-1]
    return begins


def _by_document(batch: Batch) -> Tensor:
    """The mean token of the document of each token."""
    documents = _begins(batch).flatten().cumsum(0) - 1
    sums = torch.zeros(int(documents[-1]) + 1).index_add(0, documents, batch.inputs.flatten().float())
    return (sums / documents.bincount())[documents].view(batch.inputs.shape)


class WeighingTask:
    def weight(self, batch: Batch) -> float:
        return float((batch.targets[WEIGHTS] * (batch.labels != MASKED)).sum())

    def loss(self, part: Any, hidden: Tensor, batch: Batch) -> Tensor:
        logits = self.outputs(part, hidden, batch).float().flatten(0, 1)
        each = F.cross_entropy(logits, batch.labels.flatten(), ignore_index=MASKED, reduction="none")
        each = each.view(batch.labels.shape)
        batch.intermediates[LOSSES] = each.detach()
        return (each * batch.targets[WEIGHTS]).sum()

    def outputs(self, part: Any, hidden: Tensor, batch: Batch) -> Tensor:
        outputs: Tensor = part.get_submodule("head")(hidden)
        return outputs


class Leaving(Plugin):
    """Leaves in the forward pass what is read after the backward passes."""

    api = (1, 0)

    @hookimpl
    def on_start(self, model: Model, job: Job) -> None:
        def leave(key: str) -> Any:
            def hook(module: Any, args: Any, out: Tensor) -> None:
                if (batch := job.step.batch) is not None:
                    batch.intermediates[key] = out.detach().float()[..., 0]

            return hook

        for name, module in model.named_modules():
            if name in ("norm", "layers.0"):
                module.register_forward_hook(leave(LEFT if name == "norm" else FIRST))


class Watching(Plugin):
    """Measures what was kept, when the step's gradients are there; and where what was kept is kept."""

    api = (1, 0)

    @hookimpl
    def metrics(self, job: Job) -> Mapping[str, Metric]:
        self.job, self.seen = job, list[dict[str, bool]]()
        self.loss, self.worst, self.documents, self.left = metrics.Mean(), metrics.Max(), metrics.Sum(), metrics.Sum()
        self.mean, self.ordered = metrics.Mean(), metrics.Sum()
        return {
            "loss": self.loss,
            "worst": self.worst,
            "documents": self.documents,
            "left": self.left,
            "mean": self.mean,
            "ordered": self.ordered,
        }

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        batches, layout = self.job.step.batches, self.job.dist.layout
        for batch in batches:
            self.documents.update(batch.targets[DOCUMENTS] / (layout.pp * layout.cp))  # which all of these ranks know
        self.mean.update(batches[0].targets[MEAN])
        first = layout.pp == 1 or self.job.dist.mesh("dense", "pp").get_local_rank() == 0
        assert (FIRST in batches[0].intermediates) == first
        if LOSSES not in batches[0].intermediates:  # an earlier stage of a pipeline
            return
        losses = torch.cat([batch.intermediates[LOSSES] for batch in batches])
        self.loss.update(losses, torch.cat([batch.targets[WEIGHTS] for batch in batches]))
        self.worst.update(losses)
        self.ordered.update(self._in_order(LOSSES))
        self.left.update(self._in_order(LEFT))

    def _in_order(self, key: str) -> Tensor:
        """A sum over the global batch that shows the order of what is gathered; this rank's share."""
        train, layout = self.job.config.train, self.job.dist.layout
        values = [batch.intermediates[key] for batch in self.job.step.batches]
        whole = gather_samples(values, self.job).double()
        assert list(whole.shape) == [train.global_batch, train.sequence]
        places = torch.arange(whole.numel()).view(whole.shape) % 97 - 48
        return ((whole - whole.mean()) * places).sum() / (layout.dp * layout.cp)


class Peeking(Plugin):
    """Looks for batches when the step, or the evaluation, is over."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Job) -> None:
        self.job, self.found = job, list[int]()

    @hookimpl
    def on_step(self, step: Any) -> None:
        step.add("documents", sum(batch.targets[DOCUMENTS] for batch in self.job.step.batches))

    @hookimpl
    def on_log(self, record: Any) -> None:
        self._ask()

    def _ask(self) -> None:
        assert self.job.step.batch is None
        self.found.append(len(self.job.step.batches))


class HandCut(Plugin):
    """Cuts every sequence itself, and forgets where its positions are."""

    api = (1, 0)

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareBatch:
        return PrepareBatch(BatchPhase.SLICE, lambda batch: Batch(batch.inputs[:, :8], batch.labels[:, :8]))
