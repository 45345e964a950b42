"""Changes since the checkpoint that a run resumes from, of what may change."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forge_train.base.errors import ConfigError, nearest
from forge_train.base.names import canonical
from forge_train.config import differences
from forge_train.loop.describe import plugin_list
from forge_train.mesh.axes import CONFIGURED, Axis
from forge_train.mesh.layout import Layout
from forge_train.plugin.job import Job
from forge_train.registry.discovery import discover
from forge_train.run import records
from forge_train.run.run import load

log = logging.getLogger("forge_train")


def check_allowed(job: Job, path: Path | None) -> None:
    """Check that `checkpoint.allow_changes` names only known sections, keys and plugins.

    Args:
        job: the run.
        path: the checkpoint that it resumes from.

    Raises:
        ConfigError: for a name that is not in this run or the checkpoint, nor an installed plugin.
    """
    if not job.config.checkpoint.allow_changes:
        return
    from forge_train.checkpoint.checkpoint import read_state  # which imports torch

    saved = read_state(path) if path else {}
    mine, plugins = job.config.everything(), {entry["name"] for entry in saved.get("enabled", ())}
    plugins |= {one.name for one in discover()}
    known = {*mine, *plugins, *job.config.values(), *saved.get("config", ()), *job.hooks.keepers}
    for name in job.config.checkpoint.allow_changes:
        section, dot, _ = canonical(name).partition(".")
        if canonical(name) not in known and (section in mine or section not in plugins):
            what = "key" if dot else "section or plugin"
            raise ConfigError(
                f"checkpoint.allow_changes: there is no {what} {name!r}.{nearest(canonical(name), known)}"
            )


def tell_changes(job: Job, path: Path, changes: Sequence[str]) -> None:
    """Warn of plugins whose code is another one, of another layout or length, and of weights that are not taken.

    Args:
        job: the run.
        path: a checkpoint that it may resume from.
        changes: those that its configuration allows, as `compare` returns them.
    """
    from forge_train.checkpoint.checkpoint import read_state  # which imports torch

    saved = read_state(path)
    names = sorted({canonical(name) for name in job.config.checkpoint.allow_changes})
    if unused := [name for name in names if not any(one.startswith((f"{name}:", f"{name}.")) for one in changes)]:
        log.info("checkpoint.allow_changes names %s, which did not change.", ", ".join(unused))
    _warn_of_changed_code(job, path)
    if moved := changed_layout(path, saved["config"], job.dist.layout):
        log.warning("The layout changed: %s. The run continues within rounding of the one before.", moved)
    then = saved["config"].get("train.steps")
    if then and then != job.config.train.steps:
        length, now = job.config.train.length, job.steps
        what = "train.steps" if length == "train.steps" else f"The number of steps ({length})"
        log.warning("%s was %s and is %s: the learning-rate schedule is laid over the new length.", what, then, now)
    base, other = saved["config"].get("train.init_from"), job.config.train.init_from
    if base and other and Path(base) != Path(other) and not job.config.checkpoint.only:
        log.warning(
            "train.init_from was %s and is %s: the run continues from its checkpoint, and takes no weights from there.",
            base,
            other,
        )


def _warn_of_changed_code(job: Job, path: Path) -> None:
    """Name every plugin that is not the one which the checkpoint was saved with."""
    saved = {entry["name"]: entry for entry in saved_plugins(path)}
    for now in plugin_list(job.hooks):
        name = now["name"]
        if name not in saved or job.hooks.enabled[name].observer:
            continue
        then = saved[name]
        if then["version"] != now["version"]:
            log.warning(
                "Plugin %r is %s now; the checkpoint was saved with %s.",
                name,
                now["version"] or "without a version",
                then["version"] or "one without a version",
            )
        elif now["hash"] and then["hash"] != now["hash"]:
            log.warning(
                "Plugin %r: code changed, same version (%s): its files are %.8s now, and were %.8s in the checkpoint.",
                name,
                now["version"] or "none",
                now["hash"],
                then["hash"],
            )


def changed_layout(checkpoint: Path, saved: Mapping[str, Any], now: Layout) -> str:
    """`dp_shard 2 then, 1 now` for every axis whose size differs from that of the run's last attempt; empty if none
    does, or if the folder does not say it."""
    events = checkpoint.parent.parent / "events.jsonl"
    begun = [one for one in records.read(events, strict=False) if one.get("event") == "run_started"]
    axes = {key.removeprefix("parallel."): size for key, size in saved.items() if key.startswith("parallel.")}
    try:
        others = tuple(Axis(name) for name in axes if name not in CONFIGURED)
        then = Layout.of(SimpleNamespace(**axes, __axes__=others), begun[-1]["world"])
    except (ConfigError, AttributeError, IndexError, KeyError, TypeError):
        return ""
    sizes = (then.axes(), now.axes())
    names = {axis: 1 for layout in sizes for axis in layout}
    changed = differences(*({**names, **layout} for layout in sizes))
    return ", ".join(f"{axis} {before} then, {after} now" for axis, before, after in changed)


def saved_plugins(checkpoint: Path) -> list[dict[str, str]]:
    """The plugins of a checkpoint's run; empty where they were not kept."""
    found: list[dict[str, str]] | None = load(checkpoint / "plugins.json", links=False)
    return found or []
