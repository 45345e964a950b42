"""Commands to try after a run. They are derived from this run, and none of them would be refused."""

from __future__ import annotations

import logging
import shlex
from typing import TYPE_CHECKING

from forge_train.ground.errors import ConfigError, describe
from forge_train.ground.failure import Failure
from forge_train.ground.world import World

if TYPE_CHECKING:
    from forge_train.contract.events import Finished
    from forge_train.registry.setup import Setup

log = logging.getLogger("forge_train")

PROMPT = "prompt.txt"
"""The artifact in which a data plugin stores a prompt from the run's held-out text."""


def next_commands(finished: Finished, setup: Setup) -> list[tuple[str, str]]:
    """What each command is for, and the command; called in the process that trained the run.

    Args:
        finished: how the run ended.
        setup: its configuration and plugins, bound to its job.
    """
    run, world = shlex.quote(str(finished.run)), World.here()
    rows = [("its numbers", f"forge runs show {run}")]
    if (prompt := _prompt(finished, setup)) is not None:
        rows.insert(0, ("write with it", f"forge generate {run}{prompt}"))
    if world.launcher in ("none", "forge"):
        rows.append(("train further", f"forge train --resume {run} -s {_longer(setup)}{_nproc(world)}"))
    if _exports(setup):
        rows.append(("Hugging Face", f"forge checkpoint export {run} {shlex.quote(f'{finished.run.name}-hf')}"))
    if world.launcher == "forge" and world.size > 1:
        config = shlex.quote(str(finished.run / "config.toml"))
        rows.append(("is it right?", f"forge verify {config}{_nproc(world)}"))
    return rows


def _nproc(world: World) -> str:
    return f" --nproc {world.size}" if world.size > 1 else ""


def _prompt(finished: Finished, setup: Setup) -> str | None:
    """The option that sets a prompt; empty if none is needed, None if this run's model can't generate."""
    if not finished.generates:
        return None
    file = finished.run / "artifacts" / PROMPT
    if file.is_file() and (prompt := file.read_text(encoding="utf-8")):
        return f" --prompt {shlex.quote(prompt)}"
    tokenizer = setup.hooks.tokenizer()
    return "" if tokenizer.begin or tokenizer.end is not None else None


def _longer(setup: Setup) -> str:
    """Twice the run's length, in the unit in which it was given."""
    train = setup.config.train
    return f"train.tokens={2 * train.tokens}" if train.tokens else f"train.steps={2 * train.steps}"


def _exports(setup: Setup) -> bool:
    """Whether the run's model can be written in Hugging Face layout."""
    try:
        return setup.hooks.export_hf() is not None
    except ConfigError:  # the plugin says that this model has no such layout
        return False
    except Exception as error:  # the run is done and saved, so a suggestion must not fail it
        found = Failure.of(error)
        whose = f"Plugin {found.plugin!r}" if found.plugin else "A plugin"
        log.warning("%s failed in export_hf, so its model can't be exported as it is: %s", whose, describe(error))
        return False
