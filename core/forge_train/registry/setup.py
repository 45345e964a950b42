"""From what the user asked for to enabled plugins and a frozen configuration, before anything slow is imported."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, Failure, ForgeError, Problem, describe, during, locate, nearest
from ..base.names import import_module
from ..config import Config, rules
from ..config.sections import CORE_SECTIONS
from ..config.tree import DEFAULT, Origin, Tree, Value
from ..config.validate import Mistake, validate
from ..mesh.world import World
from ..plugin.calls import EnabledPlugin, plugin_note
from ..plugin.inspection import Inspection
from ..plugin.job import Hooks, Job
from ..plugin.plugin import PROJECT, Plugin
from ..run.control import Control
from ..run.run import Recorder
from ..run.start import Claim, claim
from .resolution import Resolution

log = logging.getLogger(PROJECT)

UNKNOWN_STEPS = 10**9
"""Steps that stand in for those of a run whose length is in epochs, until its data was opened."""


def no_second_start(job: Job) -> None:
    """For runs that do not start over in their folder.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(f"{job.run.dir}: this run has no whole checkpoint; choose another run.name.")


def uncounted(config: Config, hooks: Hooks) -> int:
    """For setups that do not open the data to count it.

    Raises:
        ConfigError: always.
    """
    raise ConfigError("train.epochs: this setup counts no data; set train.steps or train.tokens instead.")


@dataclass(frozen=True)
class Setup:
    """A run that could start: its configuration and its plugins."""

    config: Config
    hooks: Hooks
    saver: Callable[[Job], Any] | None = None
    """Gives the `Saver` of a run; by default, that of `forge_train.loop.saver`."""
    weights: Callable[[Job], Any] | None = None
    """Gives the `Weights` of a run; by default, those of `forge_train.loop.weights`."""
    evaluations: Callable[[Any, Any], Any] | None = None
    """Gives the `Evaluations` of a stepper with its held-out data; by default, those of `forge_train.step.forward`."""
    listen: Callable[[Control], AbstractContextManager[Any]] = nullcontext
    """Passes requests from outside, such as signals, to a run while the block lasts."""
    log_to: Callable[[Path], AbstractContextManager[Any]] = nullcontext
    """Keeps this process's log in a file while the block lasts."""
    recorder: type[Recorder] = Recorder
    """Records files that plugins write."""
    environment: Callable[[], Mapping[str, Any]] = dict
    """Gives the content of a run's environment.json."""
    start_over: Callable[[Job], None] = no_second_start
    """Empties the folder of a run that has no checkpoint."""
    meet: Callable[[World, Any, timedelta], None] | None = None
    """Makes the process group of a process on its device; by default, as torch does."""
    check_allowed: Callable[[Job, Path | None], None] = lambda job, path: None
    """Checks the names in `checkpoint.allow_changes`, also against the checkpoint that a run resumes from."""
    tell_changes: Callable[[Job, Path, Sequence[str]], None] = lambda job, path, changes: None
    """Tells what has changed since a checkpoint that a run may resume from, beside the changes that it allows."""
    tell_idle: Callable[[Job, Iterable[str]], None] = lambda job, idle: None
    """Tells of plugins that could transform, and have nothing to do at this size."""
    failure: Callable[[BaseException, int], Failure] = Failure.of
    """Describes the failure of a rank, for outcome.json."""
    claim: Claim = claim
    """Chooses the folder of a run, and keeps it for one job."""


@during("configure")
def make_setup(
    tree: Tree,
    *,
    plugins: Sequence[str] = (),
    without: Sequence[str] = (),
    brought: Sequence[tuple[str, Origin]] = (),
    inspection: Inspection | None = None,
    world: int = 1,
    training: bool = True,
    data: bool = True,
    opened: bool = False,
    count: Callable[[Config, Hooks], int] | None = uncounted,
) -> Setup:
    """Check and freeze everything that can be known without torch.

    Args:
        tree: the configured values; gets those that plugins imply.
        plugins: plugins to enable beside those that the tree names.
        without: plugins to disable.
        brought: plugins that come with values in the tree, each with its origin.
        inspection: finds further mistakes in plugins' classes, which are reported with the others, and in what their
            hooks return.
        world: number of processes the run will have.
        training: whether values are checked against each other, as for a run that is to train. Those of a run whose
            checkpoint is only looked at were checked when it began.
        data: whether it is to train here and now. A run that is planned or shown, and a folder that is opened, may lack
            its data.
        opened: whether the model is only opened, as to generate text: what its data needs of the attention kernel does
            not count then.
        count: counts the steps of `train.epochs`; without, their number stays 0.

    Raises:
        ConfigError: with every mistake that could be found, one a line.
    """
    inspection = inspection or Inspection()
    resolution = Resolution(tree, plugins, without, brought, inspection.mistakes, training, world, tree.mistakes)
    enabled = resolution.enable()
    _raise(resolution.mistakes, resolution.hints)
    sections = _sections(tree, enabled, resolution)
    if not resolution.mistakes and _lay_implied(tree, enabled, sections):
        sections = _sections(tree, enabled, resolution)
    classes: dict[str, type] = dict(CORE_SECTIONS)
    try:
        classes["parallel"] = tree.parallel({key[0] for key in tree.below(("parallel",))}) or classes["parallel"]
    except ConfigError as error:
        tree.mistakes.append(str(error))
        del classes["parallel"]
    core = {name: validate(name, cls, tree.below((name,)), tree.mistakes) for name, cls in classes.items()}
    _raise(resolution.mistakes, resolution.hints)
    made = [(plugin, instance(plugin, sections[plugin.name])) for plugin in enabled]
    hooks = Hooks(made, resolution.defaults, resolution.specs, inspection)
    hooks.opened = opened
    hooks.check_slots(resolution.specs.required)
    config = Config(
        **core,
        sections=sections,
        plugins=tuple(sorted(resolution.asked)),
        without=tuple(sorted(resolution.removed)),
        defaults=resolution.defaults,
        neutral=frozenset(plugin.name for plugin in enabled if plugin.neutral),
        source=tree.source,
        origins={key: value.origin for key, value in tree.values.items()},
        base=tree.base,
    )

    def check(config: Config, filled: Config) -> None:
        problems = [*rules.check(config, world), *inspection.problems(config), *hooks.check_config(filled)]
        _raise(_located(config, problem) for problem in problems if data or not problem.data)

    if training:
        check(config, rules.filled(config, steps=UNKNOWN_STEPS) if config.train.epochs else config)
        _raise(misfits(hooks, config))
    for name, slot in resolution.idle.items():
        log.warning("Plugin %r has nothing to do: nothing requires %r, which it fills.", name, slot)
    config = rules.fill_in(config, world) if training else config
    if config.train.epochs and training and count and not opened:
        config = rules.filled(config, steps=count(config, hooks))
        check(config, config)
    return Setup(config, hooks)


def misfits(hooks: Hooks, config: Config) -> Iterator[str]:
    """Yield a sentence for each reason why the plugin of a slot does not suit the run, by the slot's declarer."""
    for slot, spec in hooks.specs.items():
        if spec.suits and hooks.provider(slot):
            yield from import_module(spec.suits).suits(hooks, config)


def _lay_implied(tree: Tree, enabled: list[EnabledPlugin], sections: dict[str, Any]) -> bool:
    """Lay the values that plugins imply beneath those that were set; return True if there were any."""
    found = False
    for plugin in enabled:
        try:
            values = plugin.cls.implied_values(sections[plugin.name])
        except Exception as error:
            locate(error, plugin=plugin.name, hook="implied_values")
            if not isinstance(error, ForgeError):
                error.add_note(plugin_note(plugin.ref, "implied_values"))
            raise
        for name, value in values.items():
            key = tuple(name.split("."))
            if key[0] not in sections and key[0] not in CORE_SECTIONS:
                continue  # of a plugin that is not enabled
            if tree.aliases.get(key, key) not in tree.values:
                tree.put(key, Value(value, Origin("plugin", f"plugin {plugin.name}")))
                found = True
    return found


def instance(plugin: EnabledPlugin, section: Any) -> Plugin:
    """A plugin with its section; a failure names it."""
    try:
        return plugin.cls(section)
    except Exception as error:
        locate(error, plugin=plugin.name, hook="__init__")
        if not isinstance(error, ForgeError):
            error.add_note(plugin_note(plugin.ref, "__init__"))
        raise


def _located(config: Config, problem: Problem) -> str:
    origin = config.origin(tuple(problem.key.split(".")))
    where = "" if origin is DEFAULT else f"{origin}: "
    return Mistake(f"{where}{problem.key}: {problem.message}", problem.key)


def _raise(mistakes: Iterable[str], hints: Iterable[str] = ()) -> None:
    if lines := list(dict.fromkeys(mistakes)):
        raise ConfigError("\n".join((*lines, *hints)), key=getattr(lines[0], "key", ""))


def _sections(tree: Tree, enabled: list[EnabledPlugin], resolution: Resolution) -> dict[str, Any]:
    """The section of every enabled plugin; sections that nobody reads are mistakes."""
    names = {plugin.name for plugin in enabled}
    for name, origin in tree.sections().items():
        if name in names or name in CORE_SECTIONS:
            continue
        left_out = resolution.removed | resolution.sometimes
        if name in left_out or (name in resolution.known.keys() | resolution.displaced and origin.kind == "preset"):
            log.info("%s: section [%s] is left out, because its plugin is not enabled.", origin, name)
            tree.drop(name)
        elif other := resolution.displaced.get(name):
            way_out = f"remove it, or keep it with --without {name}" if origin.kind == "file" else "leave it out"
            resolution.mistakes.append(
                f"{origin}: section [{name}] has no effect, because {other!r} takes the place of {name!r}: {way_out}."
            )
        elif name in resolution.known:
            resolution.mistakes.append(
                f"{origin}: section [{name}] belongs to a plugin that is not enabled: add --plugins {name}."
            )
        else:
            hint = nearest(name, [*names, *CORE_SECTIONS])
            resolution.mistakes.append(f"{origin}: there is no section [{name}].{hint}")
    sections = {}
    for plugin in enabled:
        try:
            own = tree.below((plugin.name,))
            sections[plugin.name] = validate(plugin.name, plugin.cls.Config, own, resolution.mistakes)
        except Exception as error:  # whatever a stranger's class does to its validation
            reason = str(error) if isinstance(error, ForgeError) else describe(error)
            resolution.mistakes.append(f"Plugin {plugin.ref.label}: its Config is not a section: {reason}.")
    return sections
