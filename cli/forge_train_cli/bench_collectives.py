"""`forge bench collectives`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forge_train.base.errors import ConfigError
from forge_train.base.format import format_bytes
from forge_train.base.strict_json import dumps
from forge_train_kit.format import format_count, format_seconds
from forge_train_tools.configuration.request import Request
from forge_train_tools.messages import waiting

from . import screen
from .options import json_option, nproc_option, run_options

if TYPE_CHECKING:
    from forge_train_tools.measuring.cluster_file import ClusterFile


@click.command(short_help="Measure collectives and products, and write a cluster file.")
@run_options()
@nproc_option()
@click.option(
    "--largest",
    default=64.0,
    show_default=True,
    type=click.FloatRange(min=0.125),
    metavar="MIB",
    help="The largest message; others have 1/8, 1/64, … of it, and 4 KiB at least.",
)
@click.option(
    "--repeat",
    default=5,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="How often each is timed; the shortest time counts.",
)
@click.option("--out", metavar="FILE", help="Write a cluster file for `forge plan --device FILE`.")
@json_option
def collectives(
    request: Request, nproc: int | None, largest: float, repeat: int, out: str | None, as_json: bool
) -> None:  # fmt: skip
    """Measure the ranks of this job, or N local ones: all-reduce, all-gather, reduce-scatter, all-to-all and sends over
    message and group sizes, the matrix products of CONFIG, and memory. Latency and bandwidth of each level of the
    network are fitted to the times.

    \b
    forge bench collectives llama3-8b --nproc 8 --out here.toml
    forge plan llama3-8b --world 64 --device here.toml --search
    """
    from forge_train_tools.configuration.setup import resolve
    from forge_train_tools.launching.once import launch_once
    from forge_train_tools.launching.world import here
    from forge_train_tools.measuring.cluster_file import ClusterFile, products_of
    from forge_train_tools.measuring.timing import worker

    place = here()
    if nproc is not None and place.size > 1:
        raise ConfigError(f"--nproc {nproc} starts processes, and these are {place.size} already: leave it out.")
    if (nproc or place.size) < 2:
        raise ConfigError("Collectives need two ranks or more: add --nproc N, or start this command with torchrun.")
    if out is not None and place.rank == 0:
        if Path(out).exists():
            raise ConfigError(f"{out} exists; name another file.")
        if not (folder := Path(out).absolute().parent).is_dir():
            raise ConfigError(f"--out {out}: the folder {folder} does not exist.")
    setup = resolve(request, data=False, measured=False)
    products = products_of(setup)
    arguments: dict[str, Any] = {
        "device": setup.config.run.device, "largest": int(largest * 2**20), "repeat": repeat, "shapes": list(products),
    }  # fmt: skip
    with waiting("measuring"):
        call = f"{worker.__module__}:{worker.__name__}"
        found = launch_once(call, arguments, nproc) if nproc else worker(**arguments)
    if place.rank:
        return
    made = ClusterFile(found, products)
    precision = setup.config.train.precision
    precision = "bf16" if precision == "fp16" else precision
    if out is not None:
        screen.write(Path(out), made.text(precision, setup.config.source))
    if as_json:
        click.echo(dumps(_as_json(made, precision), indent=1))
        return
    _show(made, precision)
    if out is not None:
        click.echo(f"Wrote {out}.")


def _as_json(made: ClusterFile, precision: str) -> dict[str, object]:
    fits = [
        {"level": one.level, "kind": one.kind, "bandwidth": one.rate.bandwidth, "latency": one.rate.latency,
         "worst": one.worst, "samples": one.samples}
        for one in made.fits
    ]  # fmt: skip
    return {
        **{key: made.found[key] for key in ("device", "backend", "world", "bandwidth", "memory", "samples")},
        "devices": made.found["local"],
        "peak": made.peaks,
        "efficiency": made.efficiency(precision),
        "fits": fits,
    }


def _show(made: ClusterFile, precision: str) -> None:
    found = made.found
    screen.line(f"{found['world']} ranks of {found['device']}, {found['backend']}", "bold")
    rows = [
        (one.level if one.kind == "all" else "", one.kind.replace("_", "-"), f"{format_count(one.rate.bandwidth)}B/s",
         format_seconds(one.rate.latency), f"{one.worst:.0%}")
        for one in made.fits
    ]  # fmt: skip
    screen.table(("level", "collective", "bandwidth", "latency of a step", "largest error"), rows, right=(2, 3, 4))
    screen.heading("Products")
    for name, peak in made.peaks.items():
        share = f", {made.efficiency(name):.0%} by those of the model" if name == precision else ""
        screen.line(f"  {format_count(peak)}FLOP/s in {name}{share}")
    screen.line(f"  {format_count(found['bandwidth'])}B/s of memory, {format_bytes(found['memory'])} of a rank")
