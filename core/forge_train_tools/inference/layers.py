"""Hidden states after each layer of a model, on whichever pipeline stage it lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forge_train import Batch, Job
from forge_train.base.errors import ConfigError
from forge_train.contract.model import Model

_BESIDE = ("tail.", "fusion.")
"""Modules that take part in training alone, or beside the layers."""


def layers_of(model: Model) -> dict[int, nn.Module]:
    """The layers of this rank, by number: those that the model declares as its units, in a list."""
    found: dict[int, nn.Module] = {}
    for part in model.parts:
        for unit in getattr(part, "units", ()):
            number = unit.rpartition(".")[2]
            if number.isdigit() and not unit.startswith(_BESIDE):
                found[int(number)] = part.get_submodule(unit)
    return found


def layer_outputs(model: Model, job: Job, kinds: Sequence[str]) -> dict[str, int]:
    """`layers.3.hidden` → 3, for each kind of output of each layer of all pipeline stages, in order."""
    numbers = sorted({number for part in job.dist.gather_objects([*layers_of(model)]) for number in part})
    return {f"layers.{number}.{kind}": number for kind in kinds for number in numbers}


@contextmanager
def watched(
    model: Model, job: Job, wanted: Mapping[int, Sequence[str]], tell: Callable[[str, Tensor, Batch], None]
) -> Iterator[None]:
    """Tell of what this rank's layers give for each micro-batch, inside the block.

    Args:
        model: composed.
        job: of the model.
        wanted: a layer's number → outputs to name.
        tell: is given an output's name, the hidden states `[batch, sequence, dim]` after the layer, and the batch.
    """

    def hook(names: Sequence[str], module: nn.Module, given: Sequence[Any], found: Any) -> None:
        batch = job.step.batch
        hidden = found[0] if isinstance(found, tuple) else found
        if batch is None:
            raise ConfigError("--outputs: this executor does not say which micro-batch passes; ask for hidden alone.")
        for name in names:
            tell(name, hidden, batch)

    here = layers_of(model)
    # A layer may be compiled with its hooks.
    apart: Any = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    handles = [here[at].register_forward_hook(partial(apart, names)) for at, names in wanted.items() if at in here]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
