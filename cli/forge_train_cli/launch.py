"""`forge launch`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forge_train_tools.sources import PRESET, RUN_DIR

from . import screen
from .lazy import LazyGroup
from .options import hugging_face, named, run_dir_option, run_options

if TYPE_CHECKING:
    from forge_train_tools.configuration.request import Request

COMMANDS = {"slurm": (".launch:slurm", "Write a batch script for Slurm that requeues its job, and submit it.")}
DEADLINE = "signals"
"""The plugin that saves before the time limit."""


@click.group(cls=LazyGroup, table=COMMANDS, short_help="Train on a cluster.")
def launch() -> None:
    """Train on a cluster."""


def _options(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Options of sbatch, by name."""
    if empty := [value for value in values if value.rstrip().endswith("=")]:
        raise click.BadParameter(f"{empty[0]}: a value is missing.", param_hint="--sbatch")
    pairs = (value.partition("=") for value in values)
    return {name.strip().removeprefix("--"): value.strip(" ") for name, _, value in pairs}


@click.command(short_help="Write a batch script for Slurm that requeues its job, and submit it.")
@run_options(default="")
@run_dir_option
@click.option("--name", metavar="NAME", help="The run is DIR/NAME; by default CONFIG's name.")
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True, metavar="K", help="Nodes.")
@click.option("--nproc", type=click.IntRange(min=1), required=True, metavar="N", help="Processes and GPUs per node.")
@click.option(
    "--time", required=True, metavar="LIMIT", help="The time limit of one job, as [days-]hours:minutes:seconds."
)
@click.option("--sbatch", "options", multiple=True, metavar="NAME=VALUE", callback=_options,
              help="Another option of sbatch, like partition=gpu; may be repeated.")  # fmt: skip
@click.option("--output", "-o", metavar="FILE", help="File for the script; NAME.sbatch by default.")
@click.option("--submit", is_flag=True, help="Submit the script with sbatch.")
def slurm(
    request: Request,
    run_dir: str,
    name: str | None,
    nodes: int,
    nproc: int,
    time: str,
    options: dict[str, str],
    output: str | None,
    submit: bool,
) -> None:
    """Check CONFIG as `forge train` would, and write a batch script that trains it on K nodes with N processes each.
    The run saves before the time limit, and the job requeues itself until the run is done. Write the script to a file
    system that all nodes can see.

    \b
    forge launch slurm my.toml --nodes 4 --nproc 8 --time 24:00:00 --sbatch partition=gpu --submit
    """
    from forge_train_tools.configuration.setup import resolve
    from forge_train_tools.launching import slurm as cluster

    request = dataclasses.replace(request, config=request.config or ("" if request.model_from else PRESET))
    if DEADLINE not in request.without:
        request = dataclasses.replace(request, plugins=tuple(dict.fromkeys((*request.plugins, DEADLINE))))
    own = () if name is None else (named(name),)
    wanted = hugging_face(dataclasses.replace(request, set=(*request.set, *own)), run_dir)
    config = resolve(wanted, world=nodes * nproc, measured=False).config
    name = config.run.name or Path(request.model_from).name or config.source
    job = cluster.SlurmJob(
        name=name,
        nodes=nodes,
        tasks=nproc,
        time=time,
        folder=Path.cwd(),
        command=(sys.executable, "-m", "forge_train_cli", "train", *_arguments(request, run_dir, name)),
        gpus=config.run.device != "cpu",
        options=options,
    )
    file = Path(output or f"{name}.sbatch")
    screen.check_own(file, lambda begins: cluster.MARK.encode() in begins, "a script written by forge")
    screen.write(file, job.script())
    click.echo(f"Wrote {file}.")
    if submit:
        click.echo(f"Submitted as job {cluster.submit(file)}.")
    else:
        click.echo(f"Submit it with: sbatch {shlex.quote(str(file))}")


def _arguments(request: Request, run_dir: str, name: str) -> Iterator[str]:
    """The arguments of `forge train` for a request; includes values of FORGE_SET, wherever the job is submitted."""
    from forge_train_tools.configuration.request import split_assignments

    if request.config:
        yield request.config
    if request.model_from:
        yield from ("--from", str(Path(request.model_from).absolute()))
    for option, names in (("--plugins", request.plugins), ("--without", request.without)):
        if names:
            yield from (option, ",".join(names))
    for value in (*split_assignments(request.environment), *request.set):
        yield from ("--set", value)
    if run_dir != RUN_DIR:
        yield from ("--run-dir", run_dir)
    yield from ("--name", name)
