"""Layouts of small models for tests of the search, and what a composition says of them."""

from __future__ import annotations

import math
from pathlib import Path

from forge_train.base.errors import ConfigError
from forge_train.compose.compose import compose
from forge_train.mesh.layout import Layout
from forge_train.mesh.world import World
from forge_train.plugin.job import Job
from forge_train.run.run import Run
from forge_train_tools.configuration.request import Request
from forge_train_tools.planning.imagined import imagined
from forge_train_tools.searching.candidates import SIZES, Candidate
from forge_train_tools.searching.search import chosen, setup_of
from forge_train_tools.searching.space import Space

SMALL = (
    "decoder.layers=4",
    "decoder.dim=48",
    "decoder.heads=6",
    "decoder.kv_heads=3",
    "decoder.hidden=96",
    "train.sequence=48",
    "train.global_batch=24",
    "train.precision=bf16",
    "train.steps=1",
)


def request(*settings: str, plugins: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> Request:
    return Request(config="quickstart", plugins=plugins, without=without, set=(*SMALL, *settings))


def every_candidate(space: Space) -> list[Candidate]:
    """Candidates whether or not the model can have them: each size of each axis that tiles the world."""
    axes = space.points.options.axes
    space.__dict__["_allowed"] = lambda axis: [
        one
        for one in range(1, space.world + 1)
        if one == 1 or (space.world % one == 0 and (axis.startswith("dp_") or axis.replace("etp", "ep") in axes))
    ]
    space.__dict__["_differs"] = lambda *_: True
    return list(space.candidates())


def composes(space: Space, candidate: Candidate) -> str:
    """Why a composition refuses a candidate; empty if it does not."""
    world = math.prod(candidate.sizes[axis] for axis in SIZES)
    try:
        setup = setup_of(chosen(space.request, candidate), world)
        layout = Layout.of(setup.config.parallel, world)
        matched: dict[str, int] = {}
        for rank in {0, world - world // candidate.pp}:  # of the first stage, and of the last
            with imagined(layout, World(rank=rank, size=world, local_rank=rank, local_size=world)) as context:
                made = compose(Job.of(setup.config, setup.hooks, Run(Path("runs/plan")), context), allocate=False)
            for entry in made.report:
                matched[entry["plugin"]] = matched.get(entry["plugin"], 0) + len(entry["matched"])
        if none := [plugin for plugin, count in matched.items() if not count]:
            return f"{none[0]} matched nothing"
    except ConfigError as error:
        return str(error)
    return ""


def verdict(space: Space, candidate: Candidate) -> str:
    """Why the search refuses a candidate; empty if it does not."""
    for axes in (("tp",), ("cp",), ("pp",), ("ep",), ("tp", "etp")):
        sizes = tuple((axis, 2 if axis == "pp" else candidate.sizes[axis]) for axis in axes)
        if candidate.sizes[axes[-1]] > 1 and (reason := space.legality.of_axis(*sizes)):
            return reason
    return space.legality.verdict(candidate)
