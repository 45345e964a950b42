"""Layouts of small models on two ranks of this machine, timed side by side, and scores of a forecast of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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

WORLD = 2
MODELS = {
    "wide": ("decoder.dim=512", "decoder.layers=4", "decoder.heads=8", "decoder.vocabulary=2048"),
    "deep": ("decoder.dim=256", "decoder.layers=12", "decoder.heads=4", "decoder.vocabulary=512"),
}
SHARED = ("train.global_batch=8", "train.sequence=256", "decoder.max_sequence=256", "synthetic.isolate=false",
          "synthetic.vocabulary=512", "train.evaluate_every=0", "checkpoint.every=0", "run.device=cpu")  # fmt: skip
LAYOUTS = {
    "ddp, 4 at a time": (("ddp",), ("parallel.dp_shard=2", "train.micro_batch=4")),
    "ddp, 1 at a time": (("ddp",), ("parallel.dp_shard=2", "train.micro_batch=1")),
    "ddp, recomputed": (("ddp", "ac"), ("parallel.dp_shard=2", "train.micro_batch=4")),
    "zero1, 2 at a time": (("zero1",), ("parallel.dp_shard=2", "train.micro_batch=2")),
    "fsdp2, 4 at a time": (("fsdp2",), ("parallel.dp_shard=2", "train.micro_batch=4")),
    "fsdp2, 1 at a time": (("fsdp2",), ("parallel.dp_shard=2", "train.micro_batch=1")),
    "fsdp2, reduced each": (("fsdp2",), ("parallel.dp_shard=2", "train.micro_batch=1", "fsdp2.reduce=each")),
    "fsdp2, recomputed": (("fsdp2", "ac"), ("parallel.dp_shard=2", "train.micro_batch=1")),
    "tp, 8 at a time": (("tp",), ("parallel.tp=2", "train.micro_batch=8")),
    "tp, 1 at a time": (("tp",), ("parallel.tp=2", "train.micro_batch=1")),
    "cp, 8 at a time": (("fsdp2", "cp"), ("parallel.cp=2", "train.micro_batch=8")),
    "pp, 2 micro-batches": (("pp",), ("parallel.pp=2", "train.micro_batch=4")),
    "pp, 8 micro-batches": (("pp",), ("parallel.pp=2", "train.micro_batch=1")),
}


def request(model: str, layout: str) -> Request:
    plugins, settings = LAYOUTS[layout]
    return Request(config="quickstart", plugins=("synthetic", *plugins), set=(*SHARED, *MODELS[model], *settings))


def timed(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Model → layout → the least seconds of a step by the wall, and by the CPUs of all ranks together."""
    return {model: launch_once("live:worker", {"model": model, "rounds": rounds}, WORLD)["found"] for model in MODELS}


def worker(model: str, rounds: int) -> Mapping[str, Any]:
    """Take a step of every layout in turn, so that other load on the machine meets all alike."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        outer = stack.enter_context(DistributedContext.join(Layout(dp_shard=WORLD), "cpu", meet=meet))
        steppers = {}
        for layout in LAYOUTS:
            setup = resolve(request(model, layout), world=WORLD)
            own = stack.enter_context(DistributedContext.join(Layout.of(setup.config.parallel, WORLD), "cpu"))
            job = Job.of(setup.config, setup.hooks, Run(folder), own)
            prepare_process(job)
            steppers[layout] = (assemble(job), Progress())
        wall: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
        busy: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
        for _ in range(rounds + 1):
            for layout, (stepper, progress) in steppers.items():
                outer.barrier()
                began, cpu = time.perf_counter(), time.process_time()
                stepper.run(progress)
                spent = time.process_time() - cpu
                outer.barrier()
                wall[layout].append(max(outer.gather_objects(time.perf_counter() - began)))
                busy[layout].append(sum(outer.gather_objects(spent)))
        found = {
            layout: {"wall": min(wall[layout][1:]), "cpu": min(busy[layout][1:])} for layout in LAYOUTS
        }  # the first step allocates
    return {"code": 0, "found": found}


def kendall(ones: Sequence[float], others: Sequence[float]) -> float:
    """Kendall's τ: pairs in the same order less those in the other, over all."""
    signs = [(a - b) * (c - d) for (a, c), (b, d) in combinations(zip(ones, others, strict=True), 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs)


def loss_of_pick(measured: Mapping[str, float], forecast: Mapping[str, float]) -> float:
    """By how much the layout with the best forecast is slower than the best one."""
    return measured[min(forecast, key=lambda one: forecast[one])] / min(measured.values()) - 1
