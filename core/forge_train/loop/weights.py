"""Weights from a checkpoint: which checkpoint holds each, and whether they are those of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from ..base.errors import ConfigError
from ..base.format import format_list
from ..checkpoint import checkpoint
from ..contract.model import Model
from ..mesh.distributed import DistributedContext
from ..plugin.job import Job
from ..store.tree import MODEL

Spare = Callable[[Sequence[str], Sequence[str]], tuple[Sequence[str], Sequence[str]]]
"""Names that a checkpoint lacks, and names that it has beside the model's → those that are allowed."""


@dataclass(frozen=True)
class Fit:
    """Match between a model and the weights of a checkpoint and its base."""

    files: Mapping[str, Path]
    """Name → the checkpoint that holds it, for what this rank has to read."""
    ignored: frozenset[str]
    """Weights that exist and are not this rank's."""
    missing: tuple[str, ...] = ()
    """Of all stages: keep the values they start with."""
    unexpected: tuple[str, ...] = ()
    """Of all stages: in the checkpoint, and not in the model."""


class Weights:
    """The weights of a run: its own checkpoints hold all of them, and no other is read; a subclass (`Setup.weights`)
    knows more.

    Args:
        job: the run.

    Raises:
        ConfigError: if the configuration asks for more.
    """

    unknown: ClassVar[str] = "train.init_from train.init_missing train.init_unexpected train.init_map checkpoint.only"
    """Keys without effect."""

    def __init__(self, job: Job) -> None:
        self._job = job
        values = job.config.values()
        for key in self.unknown.split():
            if values[key]:
                raise ConfigError(f"{key}: this setup begins with initial weights, and saves all; remove the key.")

    def start_extra(self, found: Path | None) -> None:
        """Give extra models the weights that they name; `found` is the checkpoint that the run continues from."""

    def start(self, model: Model) -> Mapping[str, Any] | None:
        """Fill the model of a run that begins. Returns the fields of the event `initialised`, if it did."""
        return None

    def check(self, model: Model) -> None:
        """Check that the run can resume from the checkpoints that it is about to save."""

    def check_state(self, model: Model, optimizer: Mapping[str, Tensor]) -> None:
        """Check what a checkpoint would say of the weights, once an optimizer's state is there, by name."""

    def saved(self, model: Model) -> dict[str, Any]:
        """Return the entries of a checkpoint about weights: those that it holds are `model`."""
        return {"model": model.state_dict()}

    def places(self, path: Path) -> dict[str, Path]:
        """The checkpoint that holds each of a model's tensors, for one to resume from; all processes call this."""
        return stored(path)

    def read(self, weights: Mapping[str, Tensor], fit: Fit, *, but: Path) -> None:
        """Fill weights of this rank that another checkpoint than `but` holds; all processes call this."""


def stored(path: Path) -> dict[str, Path]:
    """Names of a model's tensors in a checkpoint, each with its path."""
    return {name.removeprefix(MODEL): path for name in checkpoint.shapes(path) if name.startswith(MODEL)}


def compare_shapes(
    path: Path,
    weights: Mapping[str, Tensor],
    dist: DistributedContext,
    found: Mapping[str, Path],
    spare: Spare = lambda lacking, exceeding: ((), ()),
) -> Fit:
    """Check that a checkpoint holds the weights of all stages of a pipeline.

    Args:
        path: the checkpoint.
        weights: those of this rank.
        dist: the processes, which all call this.
        found: see `Weights.places`; checkpoints other than `path` may hold more than the model.
        spare: says which names the checkpoint may lack, and which it may hold beside the model.

    Raises:
        ConfigError: naming the weights that differ.
    """
    shapes = {where: checkpoint.shapes(where) for where in set(found.values())}
    stages = dist.gather_stages({name: tuple(tensor.shape) for name, tensor in weights.items()})
    here = {name: shape for stage in stages for name, shape in stage.items()}
    saved = {name: shapes[where][f"{MODEL}{name}"][0] for name, where in found.items() if where == path or name in here}
    lacking, exceeding = (sorted(names) for names in (here.keys() - saved.keys(), saved.keys() - here.keys()))
    lack, exceed = spare(lacking, exceeding)
    lines = [
        f"{name}: {_shape(saved.get(name))} in the checkpoint, {_shape(here.get(name))} in this model"
        for name in sorted((saved.keys() | here.keys()) - {*lack, *exceed})
        if saved.get(name) != here.get(name)
    ]
    if lines:
        added = checkpoint.read_state(path).get("base") and len(exceeding) - len(exceed) == len(lines)
        merge = f"Merge what its run added into a model first: forge checkpoint export {path} NEW"
        way = merge if added else f"To train that model further: forge train --from {path}"
        raise ConfigError(f"{path}: holds another model:\n  " + format_list(lines, 5, "\n  ") + f"\n{way}")
    files = {name: found[name] for name in weights if name in found}
    return Fit(files, frozenset(found.keys() - files.keys()), tuple(lack), tuple(exceed))


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else " × ".join(map(str, shape)) or "a single number"
