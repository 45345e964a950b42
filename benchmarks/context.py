"""What context parallelism costs: tokens per CPU-second of one process, and of two that share every sequence.

    python benchmarks/context.py    # writes benchmarks/results/context.md

The machine may be shared: CPU seconds are counted, not time. Each way has its turn in every round.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: the processes would otherwise take every core each

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "context.md"
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])  # the ranks find this file

from forge_train import Plugin, StepResult, hookimpl  # noqa: E402
from forge_train_tools.testing import Pool, run_forge  # noqa: E402

ROUNDS, STEPS, WARM_UP = 3, 3, 1
SEQUENCE, BATCH = 4096, 2
SHAPE = {
    "decoder.dim": 256,
    "decoder.layers": 4,
    "decoder.heads": 8,
    "decoder.kv_heads": 4,
    "decoder.hidden": 704,
    "decoder.max_sequence": SEQUENCE,
    "train.sequence": SEQUENCE,
    "train.global_batch": BATCH,
    "train.micro_batch": 1,
}
WAYS: dict[str, tuple[int, tuple[str, ...], dict[str, object]]] = {
    "one process": (1, (), {}),
    "a sequence each": (2, ("ddp",), {}),
    "`gather`": (2, ("cp", "ddp"), {"parallel.cp": 2, "cp.method": "gather"}),
    "`ulysses`": (2, ("cp", "ddp"), {"parallel.cp": 2, "cp.method": "ulysses"}),
}
DATA: dict[str, dict[str, object]] = {"one text": {"text.isolate": False}, "packed documents": {}}
PAGE = """\
# Context parallelism

Written by `python benchmarks/context.py` on {date}: {where}.

A decoder of 4 layers, 256 wide, 8 heads and 4 of keys and values; sequences of {sequence:,} tokens, {batch} a step,
fp32, two gloo ranks with `ddp`. Tokens per CPU-second of all processes together, the median of {rounds} rounds of
{steps} steps, and by those of one process; the kernel is `sdpa`. Two
ranks with a sequence each show what it costs on this machine that two processes run at once.

{table}

Packed documents are lines of a small corpus.
"""


def measure(plugins: list[str], config: dict[str, object], folder: str) -> float:
    """This process's CPU seconds, all its threads together, from the end of the warm-up to the last step."""
    seconds = 0.0

    class Timed(Plugin):
        """Looks at the clock."""

        api = (1, 0)

        @hookimpl
        def on_step(self, step: StepResult) -> None:
            nonlocal seconds
            if step.step == WARM_UP:
                seconds = -time.process_time()
            if step.step == STEPS:
                seconds += time.process_time()

    run_forge([*plugins, Timed], config, steps=STEPS, folder=Path(folder))
    return seconds


def main() -> None:
    found: dict[tuple[str, str], list[float]] = {}
    tokens = BATCH * SEQUENCE * (STEPS - WARM_UP)
    with tempfile.TemporaryDirectory(prefix="forge-context-") as folder, Pool(Path(folder)) as pool:
        for turn in range(ROUNDS):
            for data, more in DATA.items():
                for way, (world, plugins, config) in WAYS.items():
                    here = Path(folder) / f"{turn} {data} {way}".replace("`", "")
                    here.mkdir()
                    arguments = {"plugins": plugins, "config": {**SHAPE, **config, **more}, "folder": str(here)}
                    seconds = sum(pool.run("context:measure", world, timeout=600, **arguments))
                    found.setdefault((data, way), []).append(tokens / seconds)
                    print(f"{turn + 1}/{ROUNDS} {data}, {way}: {tokens / seconds:,.0f}", flush=True)
                    RESULTS.write_text(page(found), encoding="utf-8")
    print(page(found))


def page(found: dict[tuple[str, str], list[float]]) -> str:
    """The results so far."""
    rows = ["| data | | tokens per CPU-second | of one process |", "|---|---|---|---|"]
    for (data, way), speeds in found.items():
        alone = median(found[data, "one process"])
        rows.append(f"| {data} | {way} | {median(speeds):,.0f} | {median(speeds) / alone:.2f} |")
    return PAGE.format(
        date=time.strftime("%Y-%m-%d"),
        where=f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}",
        sequence=SEQUENCE,
        batch=BATCH,
        rounds=len(found["one text", "one process"]),
        steps=STEPS - WARM_UP,
        table="\n".join(rows),
    )


if __name__ == "__main__":
    main()
