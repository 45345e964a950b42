"""A plugin's role in a run, derived from its location and its source; nothing is imported."""

from __future__ import annotations

import tomllib

from forge_train.base.names import PluginRef, canonical
from forge_train_kit.source import Source
from forge_train_tools.configuration.presets import base_preset

ROOMS = {
    "models": "model",
    "attention": "attention",
    "feed_forward": "feed-forward",
    "fusions": "fusion",
    "experts": "experts",
    "modalities": "modality",
    "parallel": "parallelism",
    "memory": "memory",
    "precision": "precision",
    "optimizers": "optimizer",
    "schedules": "schedule",
    "data": "data",
    "tasks": "task",
    "resilience": "resilience",
    "observers": "observer",
}
"""Folder of a package of plugins → the role of the plugins in it."""
PHASES = {
    "PIPELINE": "parallelism",
    "TENSOR": "parallelism",
    "CONTEXT": "parallelism",
    "EXPERT": "parallelism",
    "SHARD": "parallelism",
    "ADAPT": "model",
    "FLOAT8": "precision",
    "RECOMPUTE": "memory",
    "COMPILE": "memory",
}
HOOKS = {
    "build_model": "model",
    "attention": "attention",
    "attention_kernel": "attention",
    "feed_forward": "feed-forward",
    "token_dispatch": "experts",
    "modalities": "modality",
    "fusion": "modality",
    "executor": "parallelism",
    "loss_scale": "precision",
    "optimizer": "optimizer",
    "lr_schedule": "schedule",
    "build_data": "data",
    "tokenizer": "data",
    "prepare_batch": "data",
    "task": "task",
    "loss": "task",
    "intervene": "model",
    "around": "observer",
}
"""Hook → the role of a plugin that implements it and is in none of the folders above; with `on_…` alone it observes."""
OTHER = "other"
ROLES = (*ROOMS.values(), OTHER)
"""The order in which they are listed: from the model outwards."""


def role(plugin: PluginRef) -> str:
    """A plugin's role: by its folder, else by its transform's phase, else by the first hook that has a role."""
    _, *folders = plugin.module.split(".")
    if rooms := [ROOMS[name] for name in folders if name in ROOMS]:
        return rooms[0]
    source = Source(plugin)
    hooks = source.hooks
    found = [
        *(PHASES[name] for name in source.phases if name in PHASES),
        *(name for hook, name in HOOKS.items() if hook in hooks),
        *("observer" for _ in hooks[:1] if all(hook.startswith("on_") for hook in hooks)),
    ]
    return next(iter(found), OTHER)


def defaults() -> dict[str, list[str]]:
    """Plugin → the slots it fills if no other plugin does, and `plugins` if every run has it.

    A slot with a condition is prefixed with its table: `distributed.data_parallel`.
    """
    base = base_preset()
    written = tomllib.loads(base.read_text(encoding="utf-8")) if base else {}
    found: dict[str, list[str]] = {canonical(name): ["plugins"] for name in written.get("plugins", ())}
    for slot, value in written.get("defaults", {}).items():
        slots = {slot: value} if isinstance(value, str) else {f"{slot}.{key}": name for key, name in value.items()}
        for key, name in slots.items():
            found.setdefault(canonical(name), []).append(key)
    return found
