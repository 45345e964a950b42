"""From a user's request to a run that could start."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from forge_train.base.errors import ConfigError, during
from forge_train.base.names import canonical, is_file, split
from forge_train.config import Config
from forge_train.config.tree import Origin, Tree, Value
from forge_train.plugin.job import Hooks, Job
from forge_train.registry.discovery import discover, dotted, in_file, is_name, plugin_name
from forge_train.registry.setup import Setup, make_setup
from forge_train_kit.artifacts import Recorder
from forge_train_kit.axes import tell_idle
from forge_train_kit.blame import note_plugin
from forge_train_kit.covering import covering
from forge_train_kit.extra import compose_extra
from forge_train_kit.failures import failure_of
from forge_train_kit.fingerprint import fingerprint
from forge_train_kit.stores.elsewhere import CheckpointCopies, CopiesOf, no_copies
from forge_train_kit.unused import note_idle

from ..hookspecs import checkpoint_copies
from ..launching.changes import check_allowed, tell_changes
from ..launching.claim import claimed
from ..launching.environment import environment
from ..launching.log_file import log_to
from ..launching.meeting import meet
from ..launching.signals import signals
from .epochs import count_steps
from .fitting import named
from .inspection import Inspection
from .request import Request, UnknownPresetError, lay, prefer_epochs
from .selection import selection

if TYPE_CHECKING:
    from forge_train.contract.protocols import Loader
    from forge_train.step.forward import Forward
    from forge_train_kit.evaluators import Evaluations
    from forge_train_kit.starting import Weights

    from ..saver import Saver


class Purpose(TypedDict, total=False):
    """The keywords of `make_setup` that say what a setup is for."""

    world: int
    training: bool
    data: bool
    opened: bool


@during("configure")
def resolve(request: Request, *, measured: bool = True, **purpose: Unpack[Purpose]) -> Setup:
    """Read, check and freeze everything that can be known without torch, and the steps of a run's epochs.

    Args:
        request: the user's request.
        measured: whether the data is opened to count the steps of `train.epochs`; without, their number stays 0.
        purpose: see `make_setup`.

    Raises:
        ConfigError: with every mistake that could be found, one a line.
    """
    try:
        tree = lay(request)
    except UnknownPresetError as error:
        if canonical(error.name) not in {found.name for found in discover()}:
            raise
        raise ConfigError(f"{error} It is a plugin: use --plugins {error.name}.") from None
    prefer_epochs(tree)
    if request.foreign:
        _refuse_code(tree, request)
    origin = Origin("file", request.sections_from)
    try:
        setup = make_setup(
            tree,
            plugins=request.plugins,
            without=request.without,
            brought=[(name, origin) for name in request.brought],
            inspection=Inspection(),
            count=count_steps if measured else None,
            **purpose,
        )
    except ConfigError as error:
        error.args = (named(str(error)),)
        raise
    hooks = setup.hooks
    hooks.fingerprint, hooks.covering, hooks.compose_extra = fingerprint, covering, compose_extra
    hooks.at_stage, hooks.note_plugin, hooks.selection = note_idle, note_plugin, selection
    copies = partial(copies_of, hooks)
    return replace(
        setup,
        saver=partial(_saver, copies),
        weights=_weights,
        evaluations=_evaluations,
        log_to=log_to,
        recorder=Recorder,
        environment=partial(environment, request),
        listen=signals,
        start_over=_start_over,
        meet=meet,
        check_allowed=check_allowed,
        tell_changes=tell_changes,
        tell_idle=tell_idle,
        failure=failure_of,
        claim=partial(claimed, copies),
    )


def _evaluations(forward: Forward, held_out: Loader) -> Evaluations:
    from forge_train_kit.evaluators import Evaluations  # which imports torch

    return Evaluations(forward, held_out)


def _weights(job: Job) -> Weights:
    from forge_train_kit.starting import Weights  # which imports torch

    return Weights(job)


def _start_over(job: Job) -> None:
    from ..launching.starting_over import start_over  # of use to few runs

    start_over(job)


def _saver(copies: CopiesOf, job: Job) -> Saver:
    from ..saver import Saver  # which imports torch

    return Saver(job, copies)


def copies_of(hooks: Hooks, config: Config, run: Path) -> CheckpointCopies:
    """The copies of a run's checkpoints that a plugin keeps."""
    found = hooks.only(checkpoint_copies, {"config": config, "run": run})
    return no_copies(config, run) if found is None else found


def _refuse_code(tree: Tree, request: Request) -> None:
    """Take out of a configuration what would run code that came with its folder, and note each as a mistake."""
    folder = Path(request.foreign).resolve()
    asked = tree.values.get(("plugins",))
    if asked is not None and isinstance(asked.value, list) and asked.origin.kind in ("file", "preset"):
        refused = [spec for spec in asked.value if _came_with(folder, spec, asked.origin, request)]
        tree.values["plugins",] = Value([spec for spec in asked.value if spec not in refused], asked.origin)
        tree.mistakes += [_refusal(asked.origin, spec) for spec in refused]
    mapped = tree.values.get(("train", "init_map"))
    if mapped is not None and mapped.origin.kind == "file" and is_file(str(mapped.value)):
        file = Path(split(str(mapped.value))[0])
        if not file.is_absolute() or file.resolve().is_relative_to(folder):
            tree.mistakes.append(_refusal(mapped.origin, str(mapped.value)))


def _came_with(folder: Path, spec: Any, origin: Origin, request: Request) -> bool:
    """Return True if a plugin is inside a folder, or is named relative to the folder's configuration."""
    if not isinstance(spec, str) or is_name(spec) or plugin_name(spec) in map(canonical, request.without):
        return False
    if is_file(spec) and not Path(split(spec)[0]).is_absolute():
        return True
    try:
        file = (in_file(spec, origin.folder) if is_file(spec) else dotted(spec)).file
    except (ConfigError, ValueError):  # reported as the plugin is looked for
        return False
    return file is not None and file.resolve().is_relative_to(folder)


def _refusal(where: Origin, spec: str) -> str:
    return (
        f"{where}: {spec!r} came with this folder, and no code of it is run. If you trust that file, put it "
        "elsewhere and name it here by its absolute path."
    )
