"""Commands to try after a run. They are derived from this run, and none of them would be refused."""

from __future__ import annotations

import itertools
import json
import logging
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from forge_train.base.errors import ConfigError, ForgeError, describe
from forge_train.run.run import is_checkpoint
from forge_train_kit.failures import failure_of
from forge_train_tools.launching.world import here

if TYPE_CHECKING:
    from forge_train.contract.events import Finished
    from forge_train.plugin.job import Job
    from forge_train.registry.setup import Setup

log = logging.getLogger("forge_train")

PROMPT = "prompt.txt"
"""The artifact in which a data plugin stores a prompt from the run's held-out text."""

MESSAGE = "message.txt"
"""The artifact in which a data plugin stores a user's message, if the run's model learned to answer in a chat."""


ITEM = "item.json"
"""The artifact in which a data plugin stores the path of an item of the run's data, by modality."""
OPTIONS = {"image": "--image "}
"""Shorter options than `--item`, by modality."""


def next_commands(finished: Finished, setup: Setup, nproc: int = 1) -> list[tuple[str, str]]:
    """Return each suggested command with its purpose.

    Args:
        finished: the end of the run.
        setup: its configuration and plugins.
        nproc: number of processes that this one started to train it.
    """
    run, alone = shlex.quote(str(finished.run)), here().launcher == "none"
    rows = [("its numbers", f"forge runs show {run}")]
    job = _opened(finished.run)
    if job is not None and (prompt := _prompt(finished, job)) is not None:
        rows.insert(0, ("write with it", f"forge generate {run}{prompt}"))
    if job is not None and alone:
        rows.append(("train further", resume_command(finished.run, nproc, _longer(setup))))
    if job is not None and _exports(job):
        rows.append(("Hugging Face", f"forge checkpoint export {run} {shlex.quote(_unused(finished.run.name))}"))
    if alone and nproc > 1:
        config = shlex.quote(str(finished.run / "config.toml"))
        rows.append(("is it right?", f"forge verify {config} --nproc {nproc}"))
    return rows


def resume_command(run: Path, nproc: int, setting: str = "") -> str:
    """The command that continues a run on as many local processes as before."""
    further = f" -s {setting}" if setting else ""
    return f"forge train --resume {shlex.quote(str(run))}{further}{f' --nproc {nproc}' if nproc > 1 else ''}"


def activation() -> str:
    """The command to type first if `forge` is not on the PATH, but in the environment that runs it; else empty."""
    script = Path(sys.prefix) / "bin" / "activate"
    if shutil.which("forge") or not script.is_file():
        return ""
    here = Path.cwd()
    return f"source {shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))}"


def _unused(name: str) -> str:
    """A folder for an export that is not there yet."""
    names = itertools.chain([f"{name}-hf"], (f"{name}-hf-{number}" for number in itertools.count(2)))
    return next(one for one in names if not Path(one).exists())


def _opened(run: Path) -> Job | None:
    """A job of one process with the run's newest checkpoint, as later commands open it; None if they would not."""
    from forge_train.checkpoint import checkpoint
    from forge_train_tools.offline.opening import lone_job, setup_of

    saved = [path for path in sorted((run / "checkpoints").glob("step-*")) if is_checkpoint(path)]
    try:
        return lone_job(setup_of(saved[-1], checkpoint.read_state(saved[-1])), saved[-1], "cpu") if saved else None
    except ForgeError:  # the command would say why
        return None


def _prompt(finished: Finished, job: Job) -> str | None:
    """The options that set a prompt; empty if none is needed, None if this run's model can't generate."""
    if not (finished.generates and job.hooks.provider("tokenizer")) or job.hooks.gives("head") != "token_logits":
        return None
    for name, chat in ((MESSAGE, " --chat"), (PROMPT, "")):
        file = finished.run / "artifacts" / name
        if file.is_file() and (prompt := file.read_text(encoding="utf-8")):
            return f"{chat} --prompt {shlex.quote(prompt)}"
    from forge_train_kit.hookspecs import tokenizer

    made = tokenizer(job)
    return _item(finished.run) if made.begin or made.end is not None else None


def _item(run: Path) -> str:
    """The option that shows the model an item of the run's data; empty without one."""
    file = run / "artifacts" / ITEM
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return "".join(f" {OPTIONS.get(name, f'--item {name}=')}{shlex.quote(file)}" for name, file in found.items())


def _longer(setup: Setup) -> str:
    """Twice the run's length, in the unit in which it was given."""
    train = setup.config.train
    if train.epochs:
        return f"train.epochs={2 * train.epochs:g}"
    return f"train.tokens={2 * train.tokens}" if train.tokens else f"train.steps={2 * train.steps}"


def _exports(job: Job) -> bool:
    """Return True if the run's model can be written in Hugging Face layout."""
    from forge_train_kit.hf.start import exported

    try:
        return exported(job) is not None
    except ConfigError:  # the plugin says that this model has no such layout
        return False
    except Exception as error:  # the run is done and saved, so a suggestion must not fail it
        found = failure_of(error)
        whose = f"Plugin {found.plugin!r}" if found.plugin else "A plugin"
        log.warning("%s failed in export_hf, so its model can't be exported as it is: %s", whose, describe(error))
        return False
