"""Captures every module of each model on each layout, compares with one process, and writes
benchmarks/results/captured.md.

    python benchmarks/captured.py             # everything, in some minutes
    python benchmarks/captured.py moe         # some models, without writing
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: the processes would otherwise take every core each

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "captured.md"
sys.path[:0] = [str(HERE.parent / "tests" / "dist"), str(HERE.parent / "tests")]

import capture_cases  # noqa: E402
from forge_train_tools.testing import Pool, PoolError  # noqa: E402
from test_capture_layouts import LAYOUTS  # noqa: E402

NEAR = 1e-4
"""The largest difference by an activation's largest value that still counts as rounding."""
SETTINGS = {"capture.steps": [1], "cross_entropy.chunk": 8}


def cells(models: list[str], folder: Path) -> Iterator[tuple[str, str, int, float, str]]:
    """Model, layout, number of activations, the largest difference, and what is wrong or why it is refused."""
    with Pool(folder, size=max(world for world, _, _ in LAYOUTS.values())) as pool:
        for model in models:
            given = {"model": model, "plugins": [], "config": SETTINGS}
            (one,) = pool.run(capture_cases.train, 1, folder=str(folder / model), **given)
            right, _ = capture_cases.captured(one["run"], "step-00000001")
            for layout, (world, plugins, config) in LAYOUTS.items():
                own = {"model": model, "plugins": plugins, "config": {**SETTINGS, **config}}
                try:
                    ranks = pool.run(capture_cases.train, world, folder=str(folder / f"{model}-{layout}"), **own)
                except PoolError as error:
                    yield model, layout, 0, 0.0, refusal(str(error))
                    continue
                found, _ = capture_cases.captured(ranks[0]["run"], "step-00000001")
                apart = capture_cases.differences(found, right)
                wrong = sorted(name for name, difference in apart.items() if not difference <= NEAR)
                yield model, layout, len(found), max(apart.values()), ", ".join(wrong)


def refusal(text: str) -> str:
    """The sentence of a refusal.

    Raises:
        RuntimeError: for a failure that is none.
    """
    found = [line.partition("ConfigError: ")[2] for line in text.splitlines() if "ConfigError: " in line]
    if not found:
        raise RuntimeError(text)
    return f"refused: {found[-1]}"


def main() -> int:
    models = sys.argv[1:] or list(capture_cases.SHAPES)
    lines = ["| model | layout | activations | largest difference | |", "|---|---|---|---|---|"]
    agree = True
    with tempfile.TemporaryDirectory(prefix="forge-captured-") as folder:
        for model, layout, count, worst, wrong in cells(models, Path(folder)):
            agree &= not wrong or wrong.startswith("refused: ")
            known = (str(count), f"{worst:.1e}") if count else ("", "")
            lines.append(f"| {model} | {layout} | {known[0]} | {known[1]} | {wrong} |")
            print(lines[-1], flush=True)
    where = (
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    text = (
        "# Captured activations against one process\n\n"
        "Written by `python benchmarks/captured.py`. Every module of each model is captured in fp32 over gloo, in a "
        "step of 8 samples in micro-batches of 2, with logits in chunks, and compared with one process: names, shapes, "
        f"whole numbers to the bit, others by the largest value of the activation. Up to {NEAR:g} is rounding.\n\n"
        f"{time.strftime('%Y-%m-%d')}: {where}.\n\n"
    )
    if not sys.argv[1:]:
        RESULTS.write_text(text + "\n".join(lines) + "\n", encoding="utf-8")
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
