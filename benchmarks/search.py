"""The search for a layout: its time at 10,240 ranks, and how far its memory is from that of a rehearsal.

    python benchmarks/search.py scale                 CPU seconds, memory and layouts, for Llama 3 70B
    python benchmarks/search.py memory 8 200          errors over 200 layouts of a small model on 8 ranks

Both print a row of a table. The first counts layouts, those that fit, rehearsed points, CPU seconds and GB; the second
compares layouts, and gives the median, the ninth decile and the largest of the errors.
"""

from __future__ import annotations

import random
import resource
import sys
import time
from statistics import median, quantiles

from forge_train.base.errors import ConfigError
from forge_train_tools.configuration.request import Request
from forge_train_tools.planning import plan
from forge_train_tools.planning.clusters import cluster
from forge_train_tools.searching.search import Space, chosen, search, setup_of

WORLD = 10_240
SMALL = ("decoder.layers=6", "train.global_batch=32", "train.precision=bf16", "train.sequence=256")


def scale() -> None:
    """Rank every layout of Llama 3 70B."""
    request = Request(config="llama3-70b", without=("compile",), set=("train.global_batch=20480", "parallel.cp=1"))
    began = time.process_time()
    made = search(request, world=WORLD, cluster=cluster("h100"))
    seconds, peak = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"| Llama 3 70B, {WORLD:,} ranks | {made.legal:,} | {len(made.ranked):,} | {made.rehearsed} "
        f"| {seconds:.0f} | {peak:.1f} |"
    )


def memory(world: int, count: int) -> None:
    """Compare closed forms with rehearsals."""
    request = Request(config="quickstart", set=SMALL)
    space = Space(request, world, cluster("h100"))
    some = list(space.candidates())
    errors: list[float] = []
    for one in random.Random(0).sample(some, len(some)):
        if len(errors) == count:
            break
        if space.legality.verdict(one):
            continue
        try:
            made = plan(setup_of(chosen(space.request, one), world), world=world, device="h100")
        except ConfigError as error:
            print(f"refused: {one}: {error}", file=sys.stderr)
            continue
        if made.memory.peak is not None:
            errors.append(space.forms.memory(one).peak / made.memory.peak - 1)
            print(f"{errors[-1]:+.3f} {one}", file=sys.stderr, flush=True)
    size = [abs(error) for error in errors]
    print(f"| {world} | {len(size)} | {median(size):.1%} | {quantiles(size, n=10)[-1]:.1%} | {max(size):.1%} |")


if __name__ == "__main__":
    if sys.argv[1] == "scale":
        scale()
    else:
        memory(int(sys.argv[2]), int(sys.argv[3]))
