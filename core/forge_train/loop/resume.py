"""Taking a run's whole state apart for a checkpoint, and putting it together again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..base.errors import ConfigError, during
from ..base.names import canonical
from ..checkpoint import checkpoint
from ..checkpoint.state import (
    all_random_states,
    by_group,
    follow_new_curve,
    keep_rates,
    load_optimizer_state,
    merged_groups,
    optimizer_state,
    random_states_like,
    set_random_state_from,
)
from ..config import MAY_DIFFER, differences
from ..plugin.job import Job
from ..step.step import Progress, Stepper
from ..store.placement import describe_odd
from ..store.tree import split
from .describe import plugin_list
from .weights import Weights, compare_shapes


@runtime_checkable
class Stateful(Protocol):
    """A plugin with state: tensors and JSON."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def capture(stepper: Stepper, progress: Progress, weights: Weights | None = None) -> dict[str, Any]:
    """Everything that decides how the run continues.

    Args:
        stepper: what takes the run's steps.
        progress: how far it is.
        weights: says which of the weights a checkpoint holds; by default, all of them.
    """
    job = stepper.job
    optimizer = optimizer_to_save(stepper, weights)
    stages = job.dist.gather_stages(describe_odd(optimizer, stepper.model))
    return {
        **stepper.kept,  # first: a slot's name must not replace what a resume needs
        **(weights.saved(stepper.model) if weights else {"model": stepper.model.state_dict()}),
        "optimizer": optimizer,
        "odd": {kind: sorted({name for odd in stages for name in odd[kind]}) for kind in stages[0]},
        "schedule": stepper.schedule.state_dict(),
        "loss_scale": stepper.loss_scale.state_dict() if stepper.loss_scale else None,
        "data": stepper.loader.state_dict(),
        "random": all_random_states(job.dist),
        "models": {name: extra.described() for name, extra in job.extra.items()},
        "plugins": {name: plugin.state_dict() for name, plugin in stateful(job)},
        "metrics": stepper.metrics.state_dict(),
        "progress": {"step": progress.step, "tokens": progress.tokens},
        "left_out": [list(pair) for pair in progress.left_out],
        "config": job.config.values(volatile=False),
        "enabled": [entry for entry in plugin_list(job.hooks) if entry["name"] not in job.config.neutral],
        "providers": _providers(job),
    }


def optimizer_to_save(stepper: Stepper, weights: Weights | None = None) -> dict[str, Any]:
    """The optimizer's state, once it was seen that all of it can be saved.

    Raises:
        PluginError: naming what can't.
    """
    job = stepper.job
    state = optimizer_state(stepper.optimizer, stepper.model)
    tensors: dict[str, Tensor] = {}
    split(state, "optimizer", tensors)
    if state["state"] and weights:
        weights.check_state(stepper.model, tensors)
    job.hooks.inspection.check_state(job, stepper.model, state)
    state["param_groups"] = merged_groups(job.dist.gather_stages(state["param_groups"]))
    return state


def restore(stepper: Stepper, progress: Progress, path: Path, source: Weights) -> list[str]:
    """Put a run where a checkpoint was taken; gives the changes that were allowed, in words.

    Args:
        stepper: what takes the run's steps.
        progress: gets how far it is.
        path: the checkpoint.
        source: says where its weights lie.

    Raises:
        ConfigError: if the checkpoint is of another model, other plugins or another configuration.
    """
    job = stepper.job
    changes = compare(job, path)
    weights = stepper.model.state_dict()
    fit = compare_shapes(path, weights, job.dist, source.places(path))
    like = {f"model.{name}": weights[name] for name, where in fit.files.items() if where == path}
    like["random"] = random_states_like(checkpoint.shapes(path)["random"][0], job.dist)
    like |= _sharded(stepper, path)
    like |= stepper.metrics.like(checkpoint.read_state(path).get("metrics"), checkpoint.shapes(path))
    with torch.no_grad():
        state = checkpoint.load(path, like, job.dist, elsewhere=fit.ignored)
    source.read(weights, fit, but=path)
    progress.step, progress.tokens = state["progress"]["step"], state["progress"]["tokens"]
    progress.left_out = [(first, last) for first, last in state.get("left_out", ())]
    same = {slot for slot, name in _providers(job).items() if state["providers"][slot] == name}
    kept = "optimizer" in same and state["providers"]["optimizer"] not in {key.partition(".")[0] for key in changes}
    if "optimizer" in same:
        load_optimizer_state(stepper.optimizer, stepper.model, state["optimizer"], keep_settings=not kept)
    if "lr_schedule" in same:
        schedule = state["schedule"]
        if "optimizer" in same:
            schedule = by_group(schedule, state["optimizer"], stepper.optimizer, stepper.model)
        stepper.schedule.load_state_dict(schedule)
        if not kept:
            keep_rates(stepper.optimizer, stepper.schedule, state["optimizer"])
        now = job.config.values()
        if changes or any(state["config"].get(key) != now[key] for key in ("train.steps", "train.tokens")):
            follow_new_curve(stepper.schedule)
    else:
        for _ in range(progress.step):
            stepper.schedule.step()
    if stepper.loss_scale is not None and "loss_scale" in same:
        stepper.loss_scale.load_state_dict(state["loss_scale"])
    stepper.loader.load_state_dict(state["data"] if "build_data" in same else {"sequences": state["data"]["sequences"]})
    for name, plugin in stateful(job):
        if name in state["plugins"]:
            plugin.load_state_dict(state["plugins"][name])
    stepper.metrics.load_state_dict(state.get("metrics"))
    set_random_state_from(state["random"], job.dist, job.seed, progress.step)
    return changes


def _providers(job: Job) -> dict[str, str | None]:
    """Return the provider of each slot whose state is saved."""
    return {slot: job.hooks.provider(slot) for slot in ("optimizer", "lr_schedule", "loss_scale", "build_data")}


def _sharded(stepper: Stepper, path: Path) -> dict[str, Tensor]:
    """The present state of plugins and the optimizer, sharded as on this layout, for the saved state to be read into.
    Tensors that they do not have yet come whole, or as their parameter lies."""
    tensors: dict[str, Tensor] = {}
    split({name: plugin.state_dict() for name, plugin in stateful(stepper.job)}, "plugins", tensors)
    split(optimizer_state(stepper.optimizer, stepper.model), "optimizer", tensors)
    saved = checkpoint.shapes(path)
    return {
        name: torch.empty_like(tensor, dtype=saved[name][1])
        for name, tensor in tensors.items()
        if hasattr(tensor, "device_mesh") and name in saved and saved[name][0] == tuple(tensor.shape)
    }


def stateful(job: Job) -> Iterable[tuple[str, Stateful]]:
    return [(name, plugin) for name, plugin in sorted(job.hooks.plugins.items()) if isinstance(plugin, Stateful)]


@during("load")
def compare(job: Job, path: Path) -> list[str]:
    """Return the differences between a checkpoint and this run, if all are allowed.

    Args:
        job: this run.
        path: the checkpoint.

    Raises:
        ConfigError: if a difference is not allowed, or no run can resume from the checkpoint.
    """
    saved = checkpoint.read_state(path)
    if "optimizer" not in saved:
        raise ConfigError(f"{path}: holds weights only; start from it with -s train.init_from={path}")
    if (step := saved["progress"]["step"]) > job.steps:
        length = job.config.train.length
        raise ConfigError(f"{path}: is of step {step}, and the run would end at step {job.steps} ({length}).")
    allowed = {canonical(name) for name in job.config.checkpoint.allow_changes}
    changes, refused = list[str](), list[str]()

    def note(key: str, text: str) -> None:
        names = {key, key.partition(".")[0]}
        (changes if names & allowed else refused).append(text)

    old = {entry["name"]: entry for entry in saved["enabled"]}
    new = {entry["name"]: entry for entry in plugin_list(job.hooks) if entry["name"] not in job.config.neutral}
    for name in sorted(old.keys() ^ new.keys()):
        note(name, f"{name}: plugin {'no longer enabled' if name in old else 'not enabled then'}")
    for slot, keeper in job.hooks.keepers.items():
        if saved.get(slot) != keeper.digest(job):
            note(slot, f"{slot}: another one, or its files have changed")
    lone = old.keys() ^ new.keys()
    for key, before, after in differences(saved["config"], job.config.values(volatile=False)):
        section, _, option = key.partition(".")
        added = key not in saved["config"] and not any(one[:2] == (section, option) for one in job.config.origins)
        if key not in MAY_DIFFER and section != "parallel" and section not in lone and not added:
            note(key, f"{key}: {before!r} in the checkpoint, {after!r} now")
    if refused:
        keys = ", ".join(f'"{text.partition(":")[0]}"' for text in refused)
        raise ConfigError(
            f"{path}: this run differs from the one that saved the checkpoint:\n  "
            + "\n  ".join(refused)
            + f"\nIf that is meant: checkpoint.allow_changes = [{keys}]; else use --resume never."
        )
    return changes
