"""The weights that evaluations take, where a checkpoint holds others to train on with (`EvaluatedWeights`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..base.errors import PluginError
from ..mesh.distributed import DistributedContext
from ..store import tensors
from ..store.tree import MODEL as MODEL  # noqa: PLC0414  # what this module offers too
from . import checkpoint


def sums(path: Path) -> dict[str, dict[str, float]]:
    """Name of a parameter → tensors of a checkpoint and their factors, without parameters that are evaluated as they
    are, such as frozen ones."""
    declared: Mapping[str, float] = checkpoint.read_state(path).get("evaluation") or {}
    known = checkpoint.shapes(path) if declared else {}
    names = [key.removeprefix(MODEL) for key in known if key.startswith(MODEL)]
    found = {name: {pattern.replace("{name}", name): by for pattern, by in declared.items()} for name in names}
    return {name: terms for name, terms in found.items() if terms.keys() <= known.keys()}


def put_in(path: Path, weights: Mapping[str, Tensor], dist: DistributedContext) -> None:
    """Turn weights that were read from a checkpoint into those that are evaluated, in place. All processes call this.

    Args:
        path: the checkpoint.
        weights: parameters by name (this rank's shards of them).
        dist: all processes.
    """
    if not (everywhere := sums(path)):  # on all ranks, as it is of the checkpoint
        return
    wanted = {name: terms for name, terms in everywhere.items() if name in weights}
    saved = checkpoint.shapes(path)
    others = {
        term: torch.empty_like(weights[name], dtype=saved[term][1])
        for name, terms in wanted.items()
        for term in terms
        if term != f"{MODEL}{name}"
    }
    tensors.read(path, others, dist)
    with torch.no_grad():
        for name, terms in wanted.items():
            weight = weights[name]
            weight.mul_(terms.get(f"{MODEL}{name}", 0.0))
            for term, by in terms.items():
                if term in others:
                    weight.add_(others[term], alpha=by)


def check(declared: Mapping[str, float], tensors: Mapping[str, Tensor], whose: str) -> None:
    """Check that the tensors a plugin declares for evaluations exist.

    Args:
        declared: the terms of `EvaluatedWeights`.
        tensors: of the model, the optimizer and the plugins, by their names in a checkpoint.
        whose: the plugin and its hook.

    Raises:
        PluginError: naming what does not exist.
    """
    names = [key.removeprefix(MODEL) for key in tensors if key.startswith(MODEL)]
    for pattern in declared:
        if not any(pattern.replace("{name}", name) in tensors for name in names):
            raise PluginError(f"{whose}: {pattern!r} names no tensor of a checkpoint, whatever parameter {{name}} is.")
