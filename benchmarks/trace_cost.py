"""What `forge trace` adds to a step, and that it changes no number: traced and plain steps in turns, on gloo ranks.

    python benchmarks/trace_cost.py

Prints CPU seconds of a step (the median of several, all ranks together, so that other work on the machine counts less),
and compares losses and weights with a run of plain steps alone.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from forge_train.contract.events import StepResult
from forge_train.mesh.tensors import local
from forge_train.mesh.world import World
from forge_train.run.run import Run
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.process import prepared
from forge_train_tools.testing import Pool
from forge_train_tools.tracing.steps import Steps
from forge_train_tools.verification.fingerprints import hash_of

LAYOUTS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "one process": (1, (), ()),
    "fsdp2": (2, ("fsdp2",), ()),
    "tp": (2, ("tp",), ("parallel.tp=2",)),
    "ep": (2, ("moe", "ep"), ("parallel.ep=2", "moe.experts=4")),
    "pp": (2, ("pp",), ("parallel.pp=2", "train.micro_batch=4")),
}
WARM_UP, TURNS = 3, 8
LIMIT = 0.10
"""Share of a step that tracing may add."""


class Timed(Steps):
    """Measures the CPU seconds of each step."""

    def take(self) -> StepResult:
        began = time.process_time()
        result = super().take()
        self.cpu = time.process_time() - began
        return result


def steps(folder: str, plugins: tuple[str, ...], sets: tuple[str, ...], traced: bool) -> dict[str, Any]:
    """On one rank: CPU seconds of plain and of traced steps, losses, and a hash of all weights."""
    request = Request(config="quickstart", plugins=tuple(plugins), set=(*sets, "train.steps=1000", "run.device=cpu"))
    spent: dict[str, list[float]] = {"plain": [], "traced": []}
    losses = []
    with prepared(resolve(request, world=World.here().size), Run(Path(folder) / f"{traced}")) as job:
        running = Timed(job)
        for _ in range(WARM_UP):
            running.take()
        for turn in range(2 * TURNS):
            watched = traced and turn % 2
            job.dist.barrier()
            losses.append(running.traced().loss if watched else float(running.take().loss))
            spent["traced" if watched else "plain"].append(running.cpu)
        weights = {name: hash_of(local(tensor)) for name, tensor in running.model.state_dict().items()}
    return {"spent": spent, "losses": losses, "weights": weights}


def main() -> int:
    """Measure all layouts; 1 if one is over the limit, or a number changed."""
    wrong = 0
    print(f"{'layout':<14}{'plain':>10}{'traced':>10}{'added':>8}  numbers")
    with tempfile.TemporaryDirectory() as folder, Pool(Path(folder), 2) as pool:
        for name, (world, plugins, sets) in LAYOUTS.items():
            given = {"folder": folder, "plugins": plugins, "sets": sets}
            plain = pool.run("trace_cost:steps", world, timeout=600, traced=False, **given)
            traced = pool.run("trace_cost:steps", world, timeout=600, traced=True, **given)
            same = all(a[key] == b[key] for a, b in zip(plain, traced, strict=True) for key in ("losses", "weights"))
            without, with_it = (
                sum(statistics.median(rank["spent"][kind]) for rank in traced) for kind in ("plain", "traced")
            )
            added = with_it / without - 1
            wrong += added > LIMIT or not same
            words = "equal" if same else "DIFFERENT"
            print(f"{name:<14}{without:>8.3f} s{with_it:>8.3f} s{added:>+8.1%}  {words}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
