"""One forward of a model that generates, whole or in the parts of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from forge_train.contract.batch import MASKED, Batch
from forge_train.contract.model import Model
from forge_train.contract.protocols import Executor, Task
from forge_train.mesh.tensors import full_tensor
from forge_train.plugin import hookspecs
from forge_train.plugin.job import Job
from forge_train_kit.activations import Interventions
from forge_train_kit.model import whole_rows

from ..offline.read_only import ReadOnlyRun


@dataclass
class Call:
    """Arguments of a forward."""

    ids: Tensor
    """`[batch, sequence]` int64."""
    positions: Tensor | None = None
    """The same; None if the model counts from what its cache holds."""
    caches: Mapping[int, Any] | None = None
    """Part of this rank → its cache."""
    rows: int = 1
    """Rows that count."""
    then: Callable[[Tensor], None] | None = None
    """Is given the hidden states, where the head is."""
    items: Mapping[str, Tensor] = field(default_factory=dict)
    """Extras of a batch, for a model that takes more than text."""


def replica_of(job: Job) -> tuple[int, int]:
    """The number of this rank's copy of the model, and how many there are: each generates other rows.

    Ranks of context parallelism hold all layers too, and are given whole rows.
    """
    dist, ranks = job.dist, job.dist.layout.cp
    mine = dist.mesh("dense", "cp").get_local_rank() if ranks > 1 else 0
    return dist.data_rank * ranks + mine, dist.data_ranks * ranks


class Forwards:
    """Runs the model; gives the logits after the last token of each row on ranks that have the head."""

    def __init__(self, job: Job, model: Model) -> None:
        self._task: Task = hookspecs.task(job)
        self._parts = model.parts
        self._interventions = Interventions.of(model, job)
        self.sees_logits = any(getattr(part, "head", None) is not None for part in model.parts)
        """True if this rank gets logits."""
        self.only_reads = job.dist.world == 1 and isinstance(job.run, ReadOnlyRun) and not self._interventions
        """True if one process reads a run, and does nothing else with the model."""
        self.mode: Callable[[], AbstractContextManager[Any]] = (
            torch.inference_mode if self.only_reads else _of_whole_rows if job.dist.layout.cp > 1 else torch.no_grad
        )
        """A block without gradients, of whole rows. Inference mode costs less, but nothing that is made in it can be
        trained with: gathered weights, for one, and an intervention may compute gradients."""
        self._executor: Executor | None = None
        self._found: Tensor | None = None
        self._call = Call(torch.empty(0))
        if job.dist.layout.pp > 1:
            self._executor = hookspecs.executor(model, _Looking(self), job)

    def __call__(self, call: Call) -> Tensor | None:
        """`[rows, vocabulary]` fp32 on the CPU, or None on a rank without the head."""
        with self.mode():
            return self._found_by(call)

    def _found_by(self, call: Call) -> Tensor | None:
        if self._executor is None:
            (part,) = self._parts
            more: dict[str, Any] = {**call.items}
            if call.positions is not None:
                more["position_ids"] = call.positions
            if call.caches is not None:
                more["cache"] = call.caches[0]
            with self._interventions.applied():
                hidden = part(call.ids, **more)
                logits = self.logits(part, hidden, call.rows)
            if call.then is not None:
                call.then(hidden)
            return logits
        self._call, self._found = call, None
        labels = torch.full_like(call.ids, MASKED)
        self._executor.evaluate(Batch(call.ids, labels, position_ids=call.positions, extras=call.items))
        return self._found

    def logits(self, part: nn.Module, hidden: Tensor, rows: int) -> Tensor:
        """Those for the last position of each row."""
        hidden = hidden[:, -1:]
        ids = torch.full(hidden.shape[:2], MASKED, device=hidden.device)
        outputs = full_tensor(self._task.outputs(part, hidden, Batch(inputs=ids, labels=ids)))
        return outputs[:rows, 0].float().cpu()

    @contextmanager
    def ready(self) -> Iterator[None]:
        """A block in which the parts of a pipeline are given their caches."""
        pairs = [] if self._executor is None else enumerate(self._parts)
        hooks = [part.register_forward_pre_hook(self._giving(number), with_kwargs=True) for number, part in pairs]
        try:
            yield
        finally:
            for one in hooks:
                one.remove()

    def look(self, part: nn.Module, hidden: Tensor) -> None:
        """Take the logits that the executor has come to."""
        self._found = self.logits(part, hidden, self._call.rows)
        if self._call.then is not None:
            self._call.then(hidden)

    def _giving(self, number: int) -> Callable[..., Any]:
        """A hook that gives a part its cache: a pipeline's executor passes on tensors only."""

        def give(_: nn.Module, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            caches = self._call.caches
            return args, keywords if caches is None else {**keywords, "cache": caches[number]}

        return give


@contextmanager
def _of_whole_rows() -> Iterator[None]:
    with torch.no_grad(), whole_rows():
        yield


@dataclass
class _Looking:
    """A task that takes logits in the place of a loss: executors run it as they run any."""

    forwards: Forwards

    def weight(self, batch: Batch) -> int:
        return 0

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        self.forwards.look(part, hidden)
        return torch.zeros((), device=hidden.device)

    def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        return hidden
