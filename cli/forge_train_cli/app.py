"""The `forge` command: its subcommands, and how each of them ends."""

from __future__ import annotations

import io
import os
import shutil
import sys
from typing import Any

import click

from .failures import ending
from .lazy import LazyGroup

COMMANDS = {
    "train": (".train:train", "Train a model."),
    "launch": (".launch:launch", "Train on a cluster."),
    "plan": (".plan:plan", "Show what would be composed, without allocating it."),
    "trace": (".trace:trace", "Show one step of every rank as a timeline."),
    "verify": (".verify:verify", "Show that a parallel layout computes what one process does."),
    "presets": (".presets:presets", "List the presets, in the order to learn them."),
    "plugins": (".plugins:plugins", "List, describe, check, write and install plugins."),
    "config": (".config:config", "Show or write a configuration."),
    "data": (".data:data", "Prepare data, and look at it."),
    "checkpoint": (".checkpoint:checkpoint", "Look at checkpoints; exchange weights with Hugging Face."),
    "generate": (".generate:generate", "Continue texts with a trained model."),
    "chat": (".chat:chat", "Chat with a trained model."),
    "eval": (".evaluate:evaluate", "Evaluate a trained model as its run does, or on tasks."),
    "infer": (".infer:infer", "Write what a trained model gives for each record of a data set."),
    "runs": (".runs:runs", "Look at past runs, and compare them."),
    "debug": (".debug:debug", "Look into a run."),
    "bench": (".bench:bench", "Measure this machine."),
    "describe": (".everything:describe", "Describe commands, hooks, plugins and configurations as JSON."),
    "doctor": (".doctor:doctor", "Check what this machine has and lacks."),
}
"""Name → module and attribute, and its line in `forge --help`."""

SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
if (columns := shutil.get_terminal_size().columns) < 52:  # click would write 50 columns
    SETTINGS["terminal_width"] = columns - 2
if os.environ.get("NO_COLOR"):
    SETTINGS["color"] = False


def _version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted:
        from forge_train import __version__

        click.echo(f"forge-train {__version__}")
        ctx.exit()


@click.group(cls=LazyGroup, table=COMMANDS, outside=True, context_settings=SETTINGS)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def forge() -> None:
    """Train large language models; every technique is a plugin.

    `forge train` trains a small model of Python source in about a minute; `forge train --help` explains how to train
    another model.
    """


def run(arguments: list[str]) -> int:
    """Run a command line; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # in a plain C locale, a curve of question marks is better than none
    return ending(lambda: forge.main(arguments, prog_name="forge", standalone_mode=False))
