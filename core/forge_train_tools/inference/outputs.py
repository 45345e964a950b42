"""The outputs of records: those of the head, and those that plugins name."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forge_train import MASKED, Batch, Job
from forge_train.base.errors import ConfigError, PluginError, nearest
from forge_train.contract.model import Model
from forge_train.contract.protocols import Task
from forge_train_kit.model import full_tensor, row_log_probabilities, sum_of_slices, token_log_probabilities

from ..hookspecs import record_outputs
from .batches import ROW
from .forms import shortest
from .layers import layer_outputs, watched
from .reduced import at_last, mean_of

__all__ = ["Chosen", "Collector", "Compute", "at_last", "choose", "mean_of", "plain"]

Compute = Callable[[nn.Module, Tensor, Batch], Mapping[str, Any]]
"""One output: see the hook `record_outputs`."""
LOG_LIKELIHOOD, PER_TOKEN, OTHERS = "log_likelihood", "per_token", "outputs"
REDUCTIONS: Mapping[str, Callable[[Job, Tensor, Batch], Tensor]] = {"hidden": at_last, "hidden_mean": mean_of}
"""Outputs that are vectors of hidden states, of the model or of a layer."""


def choose(job: Job, task: Task, model: Model, names: Sequence[str]) -> Chosen:
    """The outputs with some names, which may be patterns; without names, those of the head.

    Raises:
        ConfigError: for a name or a pattern that fits none.
    """
    named = dict(record_outputs(job, task))
    known: dict[str, Compute] = {name: partial(_reduced, job, name) for name in REDUCTIONS}
    if job.hooks.gives("head") == "token_logits":
        known |= {LOG_LIKELIHOOD: partial(_log_likelihood, job), PER_TOKEN: partial(_per_token, job)}
    for plugin, found in named.items():
        if twice := sorted(known.keys() & found.keys()):
            raise ConfigError(f"{job.hooks.whose('record_outputs', plugin)}: there is another output {twice[0]!r}.")
        known |= found
    usual = [*named.get(job.hooks.provider("head") or "", ())] or [
        LOG_LIKELIHOOD if LOG_LIKELIHOOD in known else OTHERS
    ]
    if usual == [OTHERS]:
        known[OTHERS] = partial(_others, task)
    layers = layer_outputs(model, job, [*REDUCTIONS])
    chosen = [*dict.fromkeys(one for name in names for one in _matching(name, [*known, *layers]))] or usual
    return Chosen(
        {name: known[name] for name in chosen if name in known},
        {name: layers[name] for name in chosen if name in layers},
        tuple(chosen),
    )


def _matching(name: str, known: Sequence[str]) -> list[str]:
    """The outputs that a name or a pattern fits."""
    if found := [name] if name in known else fnmatch.filter(known, name):
        return found
    there = sorted({re.sub(r"^layers\.\d+\.", "layers.*.", one) for one in known})
    raise ConfigError(f"--outputs: this model has no {name!r}, but {', '.join(there)}.{nearest(name, known)}")


@dataclass(frozen=True)
class Chosen:
    """Outputs to write."""

    head: Mapping[str, Compute]
    """Those of the model's last part, by name."""
    layers: Mapping[str, int]
    """Those after a layer: name → its number."""
    names: tuple[str, ...]
    """Both, in the order in which they are written."""


@dataclass
class Collector:
    """Keeps the outputs of records until they are taken.

    Args:
        job: the job.
        chosen: the outputs.
    """

    job: Job
    chosen: Chosen
    found: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Number of a row → output → its fields; of this rank's part of the model."""

    def measure(self, part: nn.Module, hidden: Tensor, batch: Batch) -> None:
        """Take the outputs of the last part for a micro-batch."""
        for output, compute in self.chosen.head.items():
            self._keep(output, compute(part, hidden, batch), batch)

    def watched(self, model: Model) -> AbstractContextManager[None]:
        """Take the outputs of layers, for each micro-batch that passes inside the block."""
        wanted: dict[int, list[str]] = {}
        for name, number in self.chosen.layers.items():
            wanted.setdefault(number, []).append(name)
        return watched(model, self.job, wanted, self._layer)

    def _layer(self, output: str, hidden: Tensor, batch: Batch) -> None:
        reduce = REDUCTIONS[output.rpartition(".")[2]]
        self._keep(output, {output: reduce(self.job, hidden, batch)}, batch)

    def _keep(self, output: str, fields: Mapping[str, Any], batch: Batch) -> None:
        numbers = batch.targets[ROW].tolist()
        for name, values in fields.items():
            if len(values) != len(numbers):
                raise PluginError(
                    f"The output {output!r} gives {len(values)} values of {name!r} for {len(numbers)} rows; it "
                    "must give one for each (record_outputs)."
                )
            for number, value in zip(numbers, _rows(values), strict=True):
                if number >= 0:
                    self.found.setdefault(number, {}).setdefault(output, {})[name] = value


def _log_likelihood(job: Job, part: nn.Module, hidden: Tensor, batch: Batch) -> dict[str, Any]:
    sums, counts = row_log_probabilities(hidden, part.get_submodule("head"), batch.labels, job, gathered=True)
    return {"log_likelihood": sums, "tokens": [int(count) for count in counts.tolist()]}


def _per_token(job: Job, part: nn.Module, hidden: Tensor, batch: Batch) -> dict[str, Any]:
    """The log-probability of each token that is asked for; whoever has the record adds what token that is."""
    each = token_log_probabilities(hidden, part.get_submodule("head"), batch.labels, gathered=True)
    asked = batch.labels != MASKED
    if batch.positions is not None:  # of slices of the sequences: all of their places
        length = batch.positions.numel() * job.dist.layout.cp
        spread = [one.new_zeros(len(one), length).index_copy_(1, batch.positions, one) for one in (each, asked.float())]
        each, asked = sum_of_slices(spread[0], job), sum_of_slices(spread[1], job) > 0
    rows = zip(each.cpu().numpy(), asked.cpu().numpy(), strict=True)
    return {"token_log_probabilities": [values[kept] for values, kept in rows]}


def _reduced(job: Job, name: str, part: nn.Module, hidden: Tensor, batch: Batch) -> dict[str, Any]:
    """Of the hidden states as the head gets them."""
    return {name: REDUCTIONS[name](job, hidden, batch)}


def _others(task: Task, part: nn.Module, hidden: Tensor, batch: Batch) -> dict[str, Any]:
    values = full_tensor(task.outputs(part, hidden, batch))
    if values.dim() > 2 or values.shape[:1] != batch.inputs.shape[:1]:
        raise ConfigError(
            f"--outputs: this task gives {list(values.shape)} for {len(batch.inputs)} records, and not a vector each; "
            "ask for hidden. A plugin can name other outputs (the hook record_outputs)."
        )
    return {"outputs": values}


def plain(values: Any) -> list[Any]:
    """Lists as they are; of tensors, nested lists of the shortest decimals that are the same fp32 numbers."""
    return [shortest(row) if isinstance(row, (np.ndarray, np.generic)) else row for row in _rows(values)]


def _rows(values: Any) -> list[Any]:
    """Lists as they are; of tensors, an array or a number of numpy for each row."""
    if not isinstance(values, Tensor):
        return list(values)
    array = values.detach().cpu()
    return list((array if array.dtype == torch.float64 else array.float()).numpy())
