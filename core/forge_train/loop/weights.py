"""Weights from a checkpoint: all of a model's, those that a run starts from, and those that lie beneath a checkpoint
which holds a part of them (`checkpoint.only`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.errors import ConfigError, during
from ..base.format import format_list
from ..checkpoint import checkpoint
from ..checkpoint.reading import take_evaluated
from ..checkpoint.seal import weights_digest
from ..compose.extra import told_of
from ..contract.model import Model
from ..mesh.distributed import DistributedContext
from ..plugin.job import Job
from ..store.tree import MODEL


@dataclass(frozen=True)
class Base:
    """The checkpoint that holds the weights which a run's own checkpoints leave out."""

    path: str
    digest: str
    """Of its tensors: a copy has the same, wherever it lies."""

    @classmethod
    def of(cls, path: Path) -> Base:
        return cls(str(path.absolute()), weights_digest(path))


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


def load_weights(
    model: Model,
    job: Job,
    path: Path,
    *,
    base: str = "",
    missing: Sequence[str] = (),
    unexpected: Sequence[str] = (),
    free: Sequence[str] = (),
) -> Fit:
    """Take only the weights from a checkpoint, those that it is evaluated with.

    Args:
        model: which gets them.
        job: whose processes read.
        path: the checkpoint.
        base: see `base_beneath`.
        missing: patterns of names that the checkpoint need not hold.
        unexpected: patterns of names that it may hold beside the model's.
        free: patterns of names that only the checkpoint, only the model, or neither may have.

    Raises:
        ConfigError: if they are of another model, and for a pattern that fits nothing.
    """
    weights = model.alone().state_dict()
    beside = tuple(f"{name}." for name in checkpoint.read_state(path).get("models", {}))
    found = {name: at for name, at in places(path, job.dist, base).items() if not name.startswith(beside)}
    fit = compare_shapes(path, weights, job.dist, found, missing=missing, unexpected=unexpected, free=free)
    read(weights, fit, job.dist)
    return fit


def new_head_patterns(job: Job) -> tuple[str, ...]:
    """Patterns of parameters that a language model's weights may lack, or have in addition to this model's."""
    spec = job.hooks.specs.get("head")
    return () if spec is None or job.hooks.gives("head") in ("", spec.gives) else ("head.*",)


@during("load")
def load_extra(job: Job, found: Path | None = None, locate: checkpoint.Locate = checkpoint.resolve) -> None:
    """Give extra models the weights that they name; a trained one only where the run begins.

    Args:
        job: whose extra models are composed.
        found: the checkpoint that the run continues from.
        locate: gives the checkpoint that a path means.

    Raises:
        ConfigError: if they are of another model, or are not those that the run began with.
    """
    before = checkpoint.read_state(found).get("models", {}) if found else {}
    for name, extra in job.extra.items():
        saved = before.get(name, {"path": "", "digest": "", "trained": extra.spec.trained})
        if found and extra.spec.trained:
            extra.path, extra.digest = saved["path"], saved["digest"]
            continue
        if extra.spec.weights:
            with told_of(f"The weights of {extra.spec}"):
                path = locate(Path(_same(extra.spec.weights, saved["path"])), job.dist)
                load_weights(extra.model, job, path)
            extra.path, extra.digest = str(path.absolute()), weights_digest(path)
        if name in before and extra.digest != saved["digest"]:
            raise ConfigError(
                f"{found}: the model {name!r} had the weights of {saved['path'] or 'no checkpoint'}; "
                f"{extra.path or 'no checkpoint'} gives others."
            )


def _same(wanted: str, saved: str) -> str:
    """The checkpoint that was taken before, where a whole run is named; it may have newer ones by now."""
    return saved if saved and Path(saved).is_relative_to(Path(wanted).absolute()) else wanted


def read(weights: Mapping[str, Tensor], fit: Fit, dist: DistributedContext, *, but: Path | None = None) -> None:
    """Fill weights in place, with those that are evaluated where a checkpoint holds others too.

    Args:
        weights: of this rank.
        fit: where each lies.
        dist: all processes read together.
        but: a checkpoint that is read elsewhere.
    """
    paths = dist.gather_objects(sorted({str(path) for path in fit.files.values()}))
    for path in sorted({Path(one) for some in paths for one in some} - {but}):
        own = {name: weights[name] for name, where in fit.files.items() if where == path}
        elsewhere = {name.removeprefix(MODEL) for name in checkpoint.shapes(path)} - own.keys()
        with torch.no_grad():
            checkpoint.load(path, {f"{MODEL}{n}": one for n, one in own.items()}, dist, only=MODEL, elsewhere=elsewhere)
            take_evaluated(path, own, dist)


def places(path: Path, dist: DistributedContext, base: str | Base | None = "") -> dict[str, Path]:
    """Return the checkpoint that holds each of a model's tensors: this one, or one beneath it.

    Args:
        path: a checkpoint.
        dist: the processes, which all call this.
        base: what `base_beneath` has found, or takes; it raises what that does.
    """
    own = {name.removeprefix(MODEL): path for name in checkpoint.shapes(path) if name.startswith(MODEL)}
    found = base if isinstance(base, Base) else base_beneath(path, dist, base or "")
    return {**places(Path(found.path), dist), **own} if found else own


def base_beneath(path: Path, dist: DistributedContext, named: str = "") -> Base | None:
    """Find the base of a checkpoint that holds only part of the weights; None for others.

    Args:
        path: the checkpoint.
        dist: the processes, which all call this.
        named: the run or checkpoint that it is; by default, where it was when the checkpoint was saved.

    Raises:
        ConfigError: if the base is missing or has changed.
    """
    if (saved := base_of(checkpoint.read_state(path))) is None:
        return None
    told = f"{path} holds a part of the weights, and the others are those of {saved.path}"
    way = "Name a copy of it with train.init_from." if named else "Put it back there."
    try:
        beneath = checkpoint.resolve(Path(_same(named, saved.path) if named else saved.path), dist)
    except ConfigError as error:
        raise ConfigError(f"{told}.\n{error}\n{way}") from error
    if weights_digest(beneath) != saved.digest:
        raise ConfigError(f"{told}; {beneath} holds others. {way}")
    return replace(saved, path=str(beneath.absolute()))


def base_of(state: Mapping[str, Any]) -> Base | None:
    """Return the base of a checkpoint that holds only part of the weights; None for others."""
    return Base(found["path"], found["digest"]) if (found := state.get("base")) else None


@dataclass
class Patterns:
    """Patterns of names; one that fits nothing is a mistake."""

    key: str
    given: Sequence[str]
    free: Sequence[str] = ()
    """Further patterns, which may match nothing."""
    fitting: set[str] = field(default_factory=set)

    def take(self, names: Iterable[str]) -> list[str]:
        """The names that fit one."""
        taken = []
        for name in names:
            if hits := [one for one in (*self.given, *self.free) if fnmatchcase(name, one)]:
                self.fitting.update(hits)
                taken.append(name)
        return taken

    def check(self, where: str) -> None:
        """Raises ConfigError for patterns that fitted nothing."""
        if idle := [one for one in self.given if one not in self.fitting]:
            raise ConfigError(f"{self.key}: {', '.join(map(repr, idle))} fits nothing that {where}.")


def compare_shapes(
    path: Path,
    weights: Mapping[str, Tensor],
    dist: DistributedContext,
    found: Mapping[str, Path],
    *,
    missing: Sequence[str] = (),
    unexpected: Sequence[str] = (),
    free: Sequence[str] = (),
) -> Fit:
    """Check that a checkpoint holds the weights of all stages of a pipeline.

    Args:
        path: the checkpoint.
        weights: those of this rank.
        dist: the processes, which all call this.
        found: see `places`; checkpoints other than `path` may hold more than the model.
        missing: see `load_weights`, also for `unexpected` and `free`.

    Raises:
        ConfigError: naming the weights that differ.
    """
    shapes = {where: checkpoint.shapes(where) for where in set(found.values())}
    stages = dist.gather_stages({name: tuple(tensor.shape) for name, tensor in weights.items()})
    here = {name: shape for stage in stages for name, shape in stage.items()}
    saved = {name: shapes[where][f"{MODEL}{name}"][0] for name, where in found.items() if where == path or name in here}
    may_lack = Patterns("train.init_missing", missing, free)
    may_exceed = Patterns("train.init_unexpected", unexpected, free)
    lacking, exceeding = (sorted(names) for names in (here.keys() - saved.keys(), saved.keys() - here.keys()))
    lack, exceed = may_lack.take(lacking), may_exceed.take(exceeding)
    lines = [
        f"{name}: {_shape(saved.get(name))} in the checkpoint, {_shape(here.get(name))} in this model"
        for name in sorted((saved.keys() | here.keys()) - {*lack, *exceed})
        if saved.get(name) != here.get(name)
    ]
    if lines:
        added = base_of(checkpoint.read_state(path)) and len(exceeding) - len(exceed) == len(lines)
        merge = f"Merge what its run added into a model first: forge checkpoint export {path} NEW"
        way = merge if added else f"To train that model further: forge train --from {path}"
        raise ConfigError(f"{path}: holds another model:\n  " + format_list(lines, 5, "\n  ") + f"\n{way}")
    may_lack.check(f"{path} lacks")
    may_exceed.check(f"{path} holds beside the model")
    files = {name: found[name] for name in weights if name in found}
    return Fit(files, frozenset(found.keys() - files.keys()), tuple(lack), tuple(exceed))


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else " × ".join(map(str, shape)) or "a single number"


# -- checkpoints that hold a part -------------------------------------------------------------------------------------


def kept(model: Model, job: Job) -> dict[str, Tensor]:
    """The weights that go into this rank's checkpoints: buffers, and the parameters that `checkpoint.only` names."""
    weights, only = model.state_dict(), job.config.checkpoint.only
    parameters = {name for name, _ in model.named_parameters()}
    chosen = {*Patterns("checkpoint.only", only).take(parameters)} if only else parameters
    return {name: tensor for name, tensor in weights.items() if name not in parameters or name in chosen}


def check_kept(model: Model, job: Job, base: Base | None) -> None:
    """Check that a run can resume from the checkpoints that `checkpoint.only` leaves.

    Raises:
        ConfigError: for a pattern that matches nothing, and for parameters that would be lost.
    """
    if not (only := job.config.checkpoint.only):
        return
    if base is None:
        raise ConfigError(
            "checkpoint.only: this run continues from checkpoints that hold all weights; start a new run."
        )
    stages = job.dist.gather_stages([(name, one.requires_grad) for name, one in model.named_parameters()])
    patterns = Patterns("checkpoint.only", only)
    chosen = {*patterns.take(name for stage in stages for name, _ in stage)}
    patterns.check("is a parameter of this model")
    if lost := sorted({name for stage in stages for name, trained in stage if trained} - chosen):
        raise ConfigError(
            f"checkpoint.only leaves out {lost[0]!r}{f' and {len(lost) - 1} more' if lost[1:] else ''}, which this run "
            "trains: it would be lost. Add a pattern for it, or freeze it."
        )
    beneath = places(Path(base.path), job.dist)
    if lost := sorted({name for stage in stages for name, _ in stage} - chosen - beneath.keys()):
        raise ConfigError(
            f"checkpoint.only leaves out {lost[0]!r}, and {base.path} does not hold it either. Add a pattern for it."
        )
