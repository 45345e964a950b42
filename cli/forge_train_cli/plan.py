"""`forge plan`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forge_train.base.errors import ConfigError
from forge_train.base.strict_json import dumps
from forge_train_kit.format import format_plural
from forge_train_tools.configuration.request import Request
from forge_train_tools.messages import waiting
from forge_train_tools.planning import DEVICES, FLOPS_CONVENTION
from forge_train_tools.planning.meshes import grid

from . import collectives, pipeline, screen, search
from .options import json_option, run_options
from .plan_screen import show

if TYPE_CHECKING:
    from forge_train_tools.planning import Plan


@click.command(short_help="Show what would be composed, without allocating it.")
@run_options()
@click.option("--world", default=1, show_default=True, type=click.IntRange(min=1), metavar="N", help="Number of ranks.")
@click.option("--nodes", type=click.IntRange(min=1), metavar="K", help="Number of nodes; by default, 8 ranks on each.")
@click.option(
    "--device", metavar="NAME|FILE", help=f"Estimate speed on a device: {', '.join(DEVICES)}, or a cluster file."
)
@search.options
@click.option("--schedules", is_flag=True, help="Compare the schedules that a pipeline could follow.")
@click.option("--check-collectives", is_flag=True, help="Check that all ranks call the same collectives, in one order.")
@click.option("--svg", metavar="FILE", callback=screen.picture, help="Draw a pipeline's timeline to a file.")
@json_option
def plan(
    request: Request,
    world: int,
    nodes: int | None,
    device: str | None,
    schedules: bool,
    svg: str | None,
    check_collectives: bool,
    as_json: bool,
    **searched: Any,
) -> int:
    """Compose CONFIG for N ranks and rehearse a step of one of them, without memory, devices or other processes: what
    each plugin matched, meshes, parameters, memory, communication and FLOPs. For a pipeline, rehearse one rank of each
    stage, and show the timeline of all. Nothing is allocated, and only --svg and --write write a file.

    \b
    forge plan big.toml --world 512 --device h100             does it fit, and what bounds it?
    forge plan big.toml --world 512 --device h100 --search    choose a layout
    forge plan big.toml --world 512 --check-collectives       would any rank wait for ever?
    """
    if check_collectives:
        others = {"search": searched["search"], "schedules": schedules, "svg": svg, "device": device}
        return collectives.run(request, world, nodes, others, as_json=as_json)
    if search.wanted(searched, {"schedules": schedules, "svg": svg, "nodes": nodes}):
        search.run(request, world, device, **searched, as_json=as_json)
        return 0
    with waiting(f"planning for {format_plural(world, 'rank')}"):
        from forge_train_tools.configuration.setup import resolve
        from forge_train_tools.planning import plan as make

        setup = resolve(request, world=world, data=False)
        made = make(setup, world=world, nodes=nodes or 0, device=device, schedules=schedules)
    if made.pipeline is None and (schedules or svg):
        option, pp = "--schedules" if schedules else "--svg", setup.config.parallel.pp
        raise ConfigError(f"{option} needs a pipeline whose executor declares what its ranks do; parallel.pp is {pp}.")
    if made.pipeline is not None and svg:
        from forge_train_tools.planning.drawing import svg as drawn

        screen.write(Path(svg), drawn(made.pipeline.timeline, f"{setup.config.source} on {world} processes"))
    if as_json:
        click.echo(dumps(_as_json(made), indent=1))
    else:
        show(made, setup, request, world)
        if svg:
            click.echo(f"Wrote {svg}.")
    return 0


def _as_json(made: Plan) -> dict[str, object]:
    plain = dataclasses.asdict(dataclasses.replace(made, pipeline=None))
    plain["pipeline"] = None if made.pipeline is None else pipeline.as_json(made.pipeline)
    plain["grids"] = {domain: grid(axes) for domain, axes in made.meshes.items()}
    plain["flops_convention"] = FLOPS_CONVENTION
    return plain
