"""The values with which another model was made, where they are not the run's; and a saved model as an extra one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError
from forge_train.base.format import format_list
from forge_train.config import differences

from .contract import ExtraModel

if TYPE_CHECKING:
    from forge_train import Job

log = logging.getLogger("forge_train")

OF_MODEL = ("build_model", "attention", "feed_forward", "head", "tail")
"""Slots of what a model computes; layers may differ in who fills one."""


def model_plugins(job: Job) -> set[str]:
    """The enabled plugins that decide what a model computes from its weights."""
    return {name for slot in OF_MODEL for name in job.hooks.implementers(slot)}


def own_sections(job: Job, weights: str, given: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The sections of an extra model: those that were saved with its weights, and over them those that are given.

    Many values change what a model computes and no shape, such as the base of rotary positions, so weights alone do not
    tell that one is missing.

    Args:
        job: the run.
        weights: a run or a checkpoint; where there is none, which loading it tells, nothing was saved.
        given: values by plugin, which count more.
    """
    saved = job.dist.on_main(lambda: _saved(weights))
    known = model_plugins(job)
    own: dict[str, dict[str, Any]] = {}
    for key, then, now in differences(saved, job.config.values(volatile=False)):
        plugin, _, name = key.partition(".")
        if plugin in known and then is not None and now is not None:
            own.setdefault(plugin, {})[name] = then
    if own and job.dist.main:
        keys = [f"{plugin}.{name}" for plugin, values in own.items() for name in values]
        log.info("The model of %s keeps its own %s.", weights, format_list(keys, 4))
    return {name: _over(own.get(name, {}), given.get(name, {})) for name in own.keys() | given.keys()}


def saved_model(job: Job, name: str, weights: str, *, head: str, key: str) -> ExtraModel:
    """An extra model as a checkpoint has it: its values, its layers and its head, on the run's layout.

    Args:
        job: the run.
        name: of the extra model.
        weights: a run or a checkpoint.
        head: what its head has to give.
        key: the option that names it, for messages.

    Raises:
        ConfigError: it is no checkpoint, or one of another head.
    """
    from forge_train.plugin.calls import EnabledPlugin
    from forge_train.plugin.dispatch import gives
    from forge_train.registry.discovery import discover, load

    from .facts import tuners

    specs, (names, values) = job.hooks.specs, job.dist.on_main(lambda: _described(Path(weights), key))
    made = [EnabledPlugin(ref, load(ref), specs=specs) for ref in discover() if ref.name in names]
    theirs = {one.name: one for one in made if one.provides & {*OF_MODEL, "classes"}}
    given = next((gives(one, "head", specs) for one in theirs.values() if "head" in one.provides), "")
    if given != head:
        raise ConfigError(
            f"{key}: the head of the model in {weights} gives {given or 'nothing that is known'}, and not {head}; name "
            "another run or checkpoint."
        )
    sections: dict[str, dict[str, Any]] = {plugin: {} for plugin in theirs}
    for found, value in values.items():
        plugin, _, option = found.partition(".")
        if plugin in theirs:
            sections[plugin][option] = value
    brought = {plugin: one for plugin, one in theirs.items() if plugin not in job.hooks.enabled}
    filled = {slot for one in brought.values() for slot in one.provides if slot in specs and specs[slot].kind == "slot"}
    instead = model_plugins(job) | {other for slot in filled for other in job.hooks.implementers(slot)}
    without = (*sorted(instead - theirs.keys()), *tuners(job))
    return ExtraModel(name, sections, weights, without=without, plugins=brought, keys=key)


def _described(weights: Path, key: str) -> tuple[set[str], dict[str, Any]]:
    """Names of the plugins in a checkpoint, and its configuration."""
    from forge_train.checkpoint import checkpoint  # which imports torch

    from .foreign import resolve

    try:
        saved = checkpoint.read_state(resolve(weights))
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    return {one["name"] for one in saved["enabled"]}, saved["config"]


def _saved(weights: str) -> dict[str, Any]:
    """The configuration in a checkpoint."""
    from forge_train.checkpoint import checkpoint  # which imports torch

    if not weights:
        return {}
    try:
        found: dict[str, Any] = checkpoint.read_state(checkpoint.resolve(Path(weights))).get("config") or {}
    except ConfigError:
        return {}
    return found


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        before = merged.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            merged[name] = _over(before, value)
        else:
            merged[name] = value
    return merged
