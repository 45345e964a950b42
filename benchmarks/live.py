"""Layouts that a search found for small models, timed side by side on two ranks, and scores of its forecast."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from forge_train.loop.assembly import assemble, prepare_process
from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Layout
from forge_train.plugin.job import Job
from forge_train.run.run import Run
from forge_train.step.step import Progress
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.launching.meeting import meet
from forge_train_tools.launching.once import launch_once
from forge_train_tools.measuring.cluster_file import ClusterFile, products_of
from forge_train_tools.planning.clusters import cluster
from forge_train_tools.searching.search import chosen, search

WORLD, COUNT = 2, 16
MODELS = {
    "wide": ("decoder.dim=512", "decoder.layers=4", "decoder.heads=8", "decoder.vocabulary=2048"),
    "deep": ("decoder.dim=256", "decoder.layers=12", "decoder.heads=4", "decoder.vocabulary=512"),
}
SHARED = ("train.global_batch=8", "train.sequence=256", "decoder.max_sequence=256", "synthetic.isolate=false",
          "synthetic.vocabulary=512", "train.evaluate_every=0", "checkpoint.every=0", "run.device=cpu")  # fmt: skip
LARGEST, REPEAT = 16 << 20, 5
"""Bytes of the largest collective that is measured, and how often each is."""


@dataclass
class Timed:
    """A layout with its forecast and its measurement."""

    layout: str
    forecast: float
    """Seconds of a step."""
    wall: float = 0.0
    """The least seconds of a step."""
    cpu: float = 0.0
    """The same of both ranks' CPUs, halved."""


def request(model: str) -> Request:
    """The configuration that is searched."""
    return Request(config="quickstart", plugins=("synthetic",), set=(*SHARED, *MODELS[model]))


def measured(model: str, file: Path) -> None:
    """Write the cluster file of this machine as `forge bench collectives` does."""
    products = products_of(resolve(request(model), data=False, measured=False))
    arguments = {"device": "cpu", "largest": LARGEST, "repeat": REPEAT, "shapes": list(products)}
    found = launch_once("forge_train_tools.measuring.timing:worker", arguments, WORLD)
    file.write_text(ClusterFile(found, products).text("fp32", model), encoding="utf-8")


def timed(model: str, file: Path, rounds: int) -> tuple[int, list[Timed]]:
    """Search, and time the best layout and others, spread evenly over all in the order of their forecasts.

    Args:
        model: of `MODELS`.
        file: the cluster file.
        rounds: steps of each.
    """
    ranked = search(request(model), world=WORLD, cluster=cluster(str(file))).ranked
    some = [ranked[round(at * (len(ranked) - 1) / (COUNT - 1))] for at in range(COUNT)]
    made = []
    for one in some:
        asked = chosen(request(model), one.candidate)
        layout = {"plugins": asked.plugins, "without": asked.without, "set": asked.set}
        took = launch_once("live:worker", {"layout": layout, "rounds": rounds}, WORLD)
        made.append(Timed(str(one.candidate), one.speed.step, took["wall"], took["cpu"]))
    return len(ranked), made


def worker(layout: Mapping[str, Sequence[str]], rounds: int) -> Mapping[str, Any]:
    """Take steps in processes of their own: threads of the process groups of other layouts take time, too."""
    setup = resolve(Request("quickstart", **{key: tuple(some) for key, some in layout.items()}), world=WORLD)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        layout_here = Layout.of(setup.config.parallel, WORLD)
        own = stack.enter_context(DistributedContext.join(layout_here, "cpu", meet=meet))
        job = Job.of(setup.config, setup.hooks, Run(folder), own)
        prepare_process(job)
        stepper, progress = assemble(job), Progress()
        wall, busy = [], []
        for _ in range(rounds + 1):
            own.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            stepper.run(progress)
            spent = time.process_time() - cpu
            own.barrier()
            wall.append(max(own.gather_objects(time.perf_counter() - began)))
            busy.append(sum(own.gather_objects(spent)) / WORLD)
    return {"code": 0, "wall": min(wall[1:]), "cpu": min(busy[1:])}  # the first step allocates


def kendall(ones: Sequence[float], others: Sequence[float]) -> float:
    """Kendall's τ: pairs in the same order less those in the other, over all."""
    signs = [(a - b) * (c - d) for (a, c), (b, d) in combinations(zip(ones, others, strict=True), 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs)


def loss_of_pick(measured: Sequence[float], forecast: Sequence[float]) -> float:
    """By how much the layout with the best forecast is slower than the best one."""
    return measured[min(range(len(forecast)), key=lambda one: forecast[one])] / min(measured) - 1
