"""Plugins that a command adds to a model that is only asked."""

from __future__ import annotations

from collections.abc import Iterable

from forge_train.base.errors import ConfigError
from forge_train.plugin.calls import implemented
from forge_train.registry.discovery import plugin_name
from forge_train.registry.setup import Setup

_TRAINING = {
    *("on_start", "on_gradients", "on_step", "on_log", "on_checkpoint", "on_end", "around", "metrics", "evaluators"),
    *("optimizer", "lr_schedule", "loss_scale", "check_config", "build_data", "data_stages", "initial_weights"),
    "checkpoint_copies",
}
"""Hooks that matter to a run, and not to a model that is only asked."""


def check_asked(setup: Setup, specs: Iterable[str]) -> None:
    """Check plugins of `--plugins`; values of a run were checked when it began.

    Raises:
        ConfigError: for one that has no effect here, or values of its section that it refuses.
    """
    enabled = setup.hooks.enabled
    asked = {name for name in map(plugin_name, specs) if name in enabled}
    for name in sorted(asked):
        if implemented(enabled[name].cls) <= _TRAINING:
            raise ConfigError(f"--plugins: {name} takes part in training alone, and has no effect here; leave it out.")
    problems = setup.hooks.check_config(setup.config) if asked else ()
    if found := [one for one in problems if one.key.partition(".")[0] in asked and not one.data]:
        raise ConfigError("\n".join(f"{one.key}: {one.message}" for one in found), key=found[0].key)
