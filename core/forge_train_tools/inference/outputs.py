"""The outputs of records: those of the head, and those that plugins name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forge_train import Batch, Job
from forge_train.base.errors import ConfigError, PluginError, nearest
from forge_train.contract.protocols import Task
from forge_train_kit.model import full_tensor, row_log_probabilities, sum_of_slices

from ..hookspecs import record_outputs
from .batches import LAST, RECORD

Compute = Callable[[nn.Module, Tensor, Batch], Mapping[str, Any]]
"""One output: see the hook `record_outputs`."""
LOG_LIKELIHOOD, HIDDEN, OTHERS = "log_likelihood", "hidden", "outputs"


def choose(job: Job, task: Task, names: Sequence[str]) -> dict[str, Compute]:
    """The outputs with some names; without names, those of the head.

    Raises:
        ConfigError: for a name that is none.
    """
    named = dict(record_outputs(job, task))
    known: dict[str, Compute] = {HIDDEN: partial(_hidden, job)}
    if job.hooks.gives("head") == "token_logits":
        known[LOG_LIKELIHOOD] = partial(_log_likelihood, job)
    for plugin, found in named.items():
        if twice := sorted(known.keys() & found.keys()):
            raise ConfigError(f"{job.hooks.whose('record_outputs', plugin)}: there is another output {twice[0]!r}.")
        known |= found
    usual = [*named.get(job.hooks.provider("head") or "", ())] or [
        LOG_LIKELIHOOD if LOG_LIKELIHOOD in known else OTHERS
    ]
    if usual == [OTHERS]:
        known[OTHERS] = partial(_others, task)
    for name in names:
        if name not in known:
            there = sorted(known)
            raise ConfigError(f"--outputs: this model has no {name!r}, but {', '.join(there)}.{nearest(name, there)}")
    return {name: known[name] for name in names or usual}


@dataclass
class Collector:
    """Keeps the outputs of records until they are taken.

    Args:
        outputs: by name.
    """

    outputs: Mapping[str, Compute]
    found: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Number of a record → its fields."""

    def measure(self, part: nn.Module, hidden: Tensor, batch: Batch) -> None:
        """Take the outputs of a micro-batch."""
        numbers = batch.targets[RECORD].tolist()
        for output, compute in self.outputs.items():
            for name, values in compute(part, hidden, batch).items():
                if len(values) != len(numbers):
                    raise PluginError(
                        f"The output {output!r} gives {len(values)} values of {name!r} for {len(numbers)} rows; it "
                        "must give one for each (record_outputs)."
                    )
                for number, value in zip(numbers, plain(values), strict=True):
                    if number >= 0:
                        self.found.setdefault(number, {})[name] = value


def _log_likelihood(job: Job, part: nn.Module, hidden: Tensor, batch: Batch) -> dict[str, Any]:
    sums, counts = row_log_probabilities(hidden, part.get_submodule("head"), batch.labels, job, gathered=True)
    return {"log_likelihood": sums, "tokens": [int(count) for count in counts.tolist()]}


def _hidden(job: Job, part: nn.Module, hidden: Tensor, batch: Batch) -> dict[str, Any]:
    """The hidden state of the last token, as the head gets it."""
    return {"hidden": at_last(job, hidden, batch)}


def _others(task: Task, part: nn.Module, hidden: Tensor, batch: Batch) -> dict[str, Any]:
    values = full_tensor(task.outputs(part, hidden, batch))
    if values.dim() > 2 or values.shape[:1] != batch.inputs.shape[:1]:
        raise ConfigError(
            f"--outputs: this task gives {list(values.shape)} for {len(batch.inputs)} records, and not a vector each; "
            "ask for hidden. A plugin can name other outputs (the hook record_outputs)."
        )
    return {"outputs": values}


def at_last(job: Job, values: Tensor, batch: Batch) -> Tensor:
    """`[batch, sequence, features]` → `[batch, features]` fp32, those of each record's last token.

    Args:
        job: the job of `forge infer`.
        values: of this rank's slice of the sequences; may be sharded over features.
        batch: that `forge infer` made.
    """
    weights = batch.targets[LAST].unsqueeze(-1)
    return sum_of_slices((full_tensor(values).float() * weights).sum(1), job)


def plain(values: Any) -> list[Any]:
    """Lists as they are; of tensors, nested lists of the shortest decimals that are the same fp32 numbers."""
    if not isinstance(values, Tensor):
        return list(values)
    import numpy as np

    array = values.detach().to(torch.float32).cpu().numpy()
    shortest = np.array([float(str(one)) for one in array.ravel()], np.float64)
    found: Any = shortest.reshape(array.shape).tolist()
    return list(found)
