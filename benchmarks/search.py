"""The search for a layout: its time at 10,240 ranks, and how far its memory is from that of a rehearsal.

    python benchmarks/search.py scale             # Llama 3 70B: CPU seconds, memory and layouts
    python benchmarks/search.py memory 8 200      # 200 layouts of a small model on 8 ranks: errors of the peak

Each replaces its rows of benchmarks/results/search.md.
"""

from __future__ import annotations

import random
import re
import resource
import sys
import time
from pathlib import Path
from statistics import median, quantiles

from run import Row, table

from forge_train.base.errors import ConfigError
from forge_train_tools.configuration.request import Request
from forge_train_tools.planning import plan
from forge_train_tools.planning.clusters import cluster
from forge_train_tools.searching.search import chosen, search, setup_of
from forge_train_tools.searching.space import Space

RESULTS = Path(__file__).parent / "results" / "search.md"
WORLD = 10_240
LARGE = Request(config="llama3-70b", without=("compile",), set=("train.global_batch=20480", "parallel.cp=1"))
SMALL = Request(
    config="quickstart",
    set=("decoder.layers=6", "train.global_batch=32", "train.precision=bf16", "train.sequence=256"),
)
NOTE = (
    "CPU seconds are those of one thread. The memory of closed forms is compared with `forge plan` of the same layout."
)


def scale() -> list[Row]:
    """Rank every layout of a large model."""
    began = time.process_time()
    made = search(LARGE, world=WORLD, cluster=cluster("h100"))
    seconds, peak = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    what = f"{LARGE.config}, {WORLD:,} ranks"
    seen = len(made.ranked) + made.unchecked + made.too_large
    return [
        Row(
            f"{what}: legal layouts ranked, of {seen:,} seen",
            f"{len(made.ranked):,}",
            "≥ 1,000",
            len(made.ranked) >= 1e3,
        ),
        Row(f"{what}: CPU seconds, {made.rehearsed} points rehearsed", f"{seconds:.0f}", "≤ 60", seconds <= 60),
        Row(f"{what}: peak memory", f"{peak:.1f} GB", "≤ 2 GB", peak <= 2),
    ]


def memory(world: int, count: int) -> list[Row]:
    """Compare closed forms with rehearsals of whole layouts, drawn at random."""
    space = Space(SMALL, world, cluster("h100"))
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
    what = f"{SMALL.config}, {world} ranks, {len(size)} layouts: error of memory"
    return [
        Row(f"{what}, median", f"{median(size):.1%}", "≤ 5 %", median(size) <= 0.05),
        Row(f"{what}, ninth decile", f"{quantiles(size, n=10)[-1]:.1%}", "none", ok=True),
        Row(f"{what}, largest", f"{max(size):.1%}", "none", ok=True),
    ]


def record(rows: list[Row]) -> str:
    """The results with new rows in place of those of the same command."""
    old = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else ""
    known = re.findall(r"^\| (.+) \| (.+) \| (.+) \| (yes|\*\*no\*\*) \|$", old, re.MULTILINE)
    config = rows[0].what.split(",", 1)[0]
    kept = [Row(what, is_, bar, met == "yes") for what, is_, bar, met in known if what.split(",", 1)[0] != config]
    return table([*kept, *rows], "The search for a layout", "python benchmarks/search.py", NOTE)


if __name__ == "__main__":
    found = scale() if sys.argv[1] == "scale" else memory(int(sys.argv[2]), int(sys.argv[3]))
    RESULTS.write_text(record(found), encoding="utf-8")
    print(RESULTS.read_text(encoding="utf-8"))
