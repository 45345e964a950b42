"""`--export` of `forge train`: the trained model in Hugging Face layout, in the run's folder."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forge_train.base.errors import ConfigError
from forge_train.run.run import Run
from forge_train_kit.artifacts import Recorder
from forge_train_tools.messages import folded, waiting

if TYPE_CHECKING:
    from forge_train.registry.setup import Setup

FOLDER = "export"
"""The folder of the export inside the run."""


def check_exportable(setup: Setup) -> None:
    """Refuse before a run starts if its model can't be exported.

    Raises:
        ConfigError: if no plugin can write it.
    """
    if not setup.hooks.implementers("export_hf"):
        raise ConfigError("--export: no enabled plugin can write the model in Hugging Face layout (export_hf).")


def export_trained(run: Path, *, quiet: bool) -> None:
    """Export the model of a completed run, replacing an earlier export. Other runs are left alone."""
    from forge_train_tools.offline.huggingface import export_checkpoint

    if Run(run).outcome().get("outcome") != "done":
        return
    target, new = run / FOLDER, run / f".{FOLDER}.new"
    shutil.rmtree(new, ignore_errors=True)
    with waiting(f"exporting {run}"):
        done = export_checkpoint(run, new)
    shutil.rmtree(target, ignore_errors=True)
    new.replace(target)
    recorder = Recorder(run)
    for file in done.files:
        recorder.record(target / file, "forge train --export", "exports")
    recorder.settle()
    if not quiet:
        click.echo(f"\nExported to {target}: {done.parameters:,} parameters in Hugging Face layout.")
        for note in done.notes:
            click.secho(folded(f"Note: {note}", sys.stderr), fg="yellow", err=True)
