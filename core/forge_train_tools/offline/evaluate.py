"""The evaluations of a run, on a checkpoint: on one process or several, without training or writing anything."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_train.compose.compose import compose
from forge_train.step.forward import Forward
from forge_train_kit.evaluators import Evaluations
from forge_train_kit.starting import load_extra
from forge_train_kit.stored import evaluated_weights

from ..launching.once import launch_once
from ..launching.world import here
from ..process import prepared
from .opening import Wanted, find, run_folder
from .read_only import ReadOnlyRun


@dataclass(frozen=True)
class Evaluated:
    """Results of a checkpoint's evaluations."""

    checkpoint: str
    step: int
    world: int
    loss: float
    """Mean over the unmasked tokens of the held-out batches."""
    tokens: int
    metrics: dict[str, float] = field(default_factory=dict)
    """`name.metric`, as in events.jsonl."""
    unlike_training: tuple[str, ...] = ()
    """Plugins that use other weights for evaluations during training; here the checkpoint's own are evaluated."""


def evaluate(path: Path, *, wanted: Wanted | None = None, nproc: int = 1) -> Evaluated:
    """Evaluate a checkpoint, or a run's newest, as its run does.

    Args:
        path: a run, a checkpoint, or a folder in Hugging Face layout, which gets the configuration for fine-tuning.
        wanted: plugins and values in addition to the run's own.
        nproc: local processes to use, including this one.

    Raises:
        ConfigError: for a path that is none of these, or an invalid configuration.
        ForgeError: with the message of the rank that failed first.
    """
    wanted = wanted or Wanted()
    if nproc == 1:
        return _evaluate(path, wanted)
    find(path, world=nproc, wanted=wanted)  # so that a mistake is reported only once
    arguments = {"path": str(path), "wanted": dataclasses.asdict(wanted)}
    found = launch_once(f"{__name__}:worker", arguments, nproc)["evaluated"]
    return Evaluated(**{**found, "unlike_training": tuple(found["unlike_training"])})


def worker(path: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """The work of each process."""
    found = _evaluate(Path(path), Wanted(tuple(wanted["plugins"]), tuple(wanted["set"])))
    return {"code": 0, "evaluated": dataclasses.asdict(found)}


def _evaluate(path: Path, wanted: Wanted) -> Evaluated:
    """Evaluate on this process alone, or on one of those that a launcher started."""
    world = here().size
    source = find(path, world=world, wanted=wanted)
    path, hooks, own = source.path, source.setup.hooks, (source.saved or {}).get("plugins", {})
    with prepared(source.setup, ReadOnlyRun(run_folder(path))) as job:
        model = compose(job).model
        load_extra(job)
        source.load(model, job)
        found = Evaluations(Forward(job, model), hooks.build_data("validation")).run(source.step)
        hooks.on_log(found)
        known, _ = evaluated_weights(job) or ("", None)
        unlike = [name for name in hooks.implementers("around") if name in own and name != known]
        return Evaluated(str(path), found.step, world, found.loss, found.tokens, found.metrics, tuple(unlike))
