"""Weights stored in checkpoints: those beneath a checkpoint that holds a part of them (`checkpoint.only`), and those
that a checkpoint is evaluated with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_train.base.errors import ConfigError, PluginError
from forge_train.base.strict_json import dumps
from forge_train.checkpoint import checkpoint
from forge_train.contract.model import Model
from forge_train.loop.weights import Fit, compare_shapes, stored
from forge_train.mesh.distributed import DistributedContext
from forge_train.plugin import hookspecs
from forge_train.plugin.job import Job
from forge_train.store import tensors
from forge_train.store.manifest import INDEX, SHARDS, inspect
from forge_train.store.tree import MODEL

from .contract import EvaluatedWeights
from .returns import kind_of


def weights_digest(path: Path) -> str:
    """A hash of a checkpoint's tensors, from its manifest: copies have the same."""
    sealed = inspect(path)
    if isinstance(sealed, str):
        raise ConfigError(f"{path}: not a whole checkpoint: {sealed}.")
    files = sorted((n, e.hash) for n, e in sealed.files.items() if n == INDEX or n.endswith(SHARDS))
    return hashlib.sha256(repr(files).encode()).hexdigest()


@dataclass(frozen=True)
class Base:
    """The checkpoint that holds the weights which a run's own checkpoints leave out."""

    path: str
    digest: str
    """Of its tensors: a copy has the same, wherever it lies."""

    @classmethod
    def of(cls, path: Path) -> Base:
        return cls(str(path.absolute()), weights_digest(path))


def load_weights(
    model: Model,
    job: Job,
    path: Path,
    *,
    base: str = "",
    missing: Sequence[str] = (),
    unexpected: Sequence[str] = (),
    free: Sequence[str] = (),
    starts: bool = False,
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
        starts: whether a run starts from them, so that the options in `train` are named where they would help.

    Raises:
        ConfigError: if they are of another model, and for a pattern that fits nothing.
    """
    weights = model.alone().state_dict()
    beside = tuple(f"{name}." for name in checkpoint.read_state(path).get("models", {}))
    found = {name: at for name, at in places(path, job.dist, base).items() if not name.startswith(beside)}
    may_lack = Patterns("train.init_missing", missing, free)
    may_exceed = Patterns("train.init_unexpected", unexpected, free)
    ways = list[str]()

    def spare(less: Sequence[str], more: Sequence[str]) -> tuple[list[str], list[str]]:
        lack, exceed, both = may_lack.take(less), may_exceed.take(more), found.keys() - {*more}
        if starts:
            ways.extend(_way("To start them anew", may_lack.key, {*less} - {*lack}, both))
            ways.extend(_way("To leave them out", may_exceed.key, {*more} - {*exceed}, both))
        return lack, exceed

    try:
        fit = compare_shapes(path, weights, job.dist, found, spare)
    except ConfigError as error:
        raise ConfigError("\n".join([str(error), *ways])) from error
    may_lack.check(f"{path} lacks")
    may_exceed.check(f"{path} holds beside the model")
    read(weights, fit, job.dist)
    return fit


def _way(what: str, key: str, names: Set[str], both: Set[str]) -> Iterator[str]:
    """The option for parts of a model that only one of two has, such as modules that a plugin adds."""
    roots = {name.partition(".")[0] for name in names}
    if roots and roots.isdisjoint(name.partition(".")[0] for name in both):
        yield f"{what}: -s '{key}={dumps([f'{root}.*' for root in sorted(roots)])}'"


def new_head_patterns(job: Job) -> tuple[str, ...]:
    """Patterns of parameters that a language model's weights may lack, or have in addition to this model's."""
    spec = job.hooks.specs.get("head")
    return () if spec is None or job.hooks.gives("head") in ("", spec.gives) else ("head.*",)


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
    found = base if isinstance(base, Base) else base_beneath(path, dist, base or "")
    return {**places(Path(found.path), dist), **stored(path)} if found else stored(path)


def same(wanted: str, saved: str) -> str:
    """The checkpoint that was taken before, where a whole run is named; it may have newer ones by now."""
    return saved if saved and Path(saved).is_relative_to(Path(wanted).absolute()) else wanted


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
        beneath = checkpoint.resolve(Path(same(named, saved.path) if named else saved.path), dist)
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


# -- weights that are evaluated ---------------------------------------------------------------------------------------


def evaluation_sums(path: Path) -> dict[str, dict[str, float]]:
    """Name of a parameter → tensors of a checkpoint and their factors, without parameters that are evaluated as they
    are, such as frozen ones."""
    declared: Mapping[str, float] = checkpoint.read_state(path).get("evaluation") or {}
    known = checkpoint.shapes(path) if declared else {}
    names = [key.removeprefix(MODEL) for key in known if key.startswith(MODEL)]
    found = {name: {pattern.replace("{name}", name): by for pattern, by in declared.items()} for name in names}
    return {name: terms for name, terms in found.items() if terms.keys() <= known.keys()}


def take_evaluated(path: Path, weights: Mapping[str, Tensor], dist: DistributedContext) -> None:
    """Turn weights that were read from a checkpoint into those that are evaluated, in place. All processes call this.

    Args:
        path: the checkpoint.
        weights: parameters by name (this rank's shards of them).
        dist: all processes.
    """
    if not (everywhere := evaluation_sums(path)):  # on all ranks, as it is of the checkpoint
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


def evaluated_weights(job: Job) -> tuple[str, EvaluatedWeights] | None:
    """The plugin whose span `evaluate` puts other weights in and says which, and that span. Plugins are asked for
    it unless they were before.

    Raises:
        ConfigError: if several plugins do.
        PluginError: if terms are not numbers by name.
    """
    hooks = job.hooks
    if "evaluate" not in hooks.spans:
        hookspecs.around("evaluate", job)
    telling = [(name, one) for name, one in hooks.spans["evaluate"] if isinstance(one, EvaluatedWeights)]
    given = hooks.one(telling, lambda names: f"Plugins {names} both evaluate other weights than those trained")
    kind = kind_of(Mapping[str, float])
    if given and (text := kind.problem(given[1].terms)):
        raise PluginError(f"{hooks.whose('around', given[0])}: `terms` must be {kind.words}, {text}.")
    return given


def check_evaluation(declared: Mapping[str, float], held: Mapping[str, Tensor], whose: str) -> None:
    """Check that the tensors a plugin declares for evaluations exist.

    Args:
        declared: the terms of `EvaluatedWeights`.
        held: tensors of the model, the optimizer and the plugins, by their names in a checkpoint.
        whose: the plugin and its hook.

    Raises:
        PluginError: naming what does not exist.
    """
    names = [key.removeprefix(MODEL) for key in held if key.startswith(MODEL)]
    for pattern in declared:
        if not any(pattern.replace("{name}", name) in held for name in names):
            raise PluginError(f"{whose}: {pattern!r} names no tensor of a checkpoint, whatever parameter {{name}} is.")
