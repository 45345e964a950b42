"""Measures what a frozen encoder of images costs in a step, and writes benchmarks/results/frozen-encoders.md.

python benchmarks/frozen_encoders.py         # in some minutes
python benchmarks/frozen_encoders.py 1       # so many steps, without writing
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: CPU time is that of one thread

import torch

from forge_train import Axes, Batch, BatchPhase, Job, Model, Plugin, PrepareBatch, hookimpl
from forge_train_kit.modalities import extras_of
from forge_train_tools.testing import run_forge

RESULTS = Path(__file__).parent / "results" / "frozen-encoders.md"
STEPS = 12
BAR = 2.0
"""Percent of a step."""
IMAGES, SIDE, SEQUENCE = 16, 14, 256
ENCODER = "fusion.enter.encoders.image"
CONFIG: dict[str, Any] = {
    "decoder": {"dim": 256, "layers": 4, "heads": 4, "max_sequence": 512},
    "train": {"sequence": SEQUENCE, "global_batch": 8, "micro_batch": 8, "evaluate_every": 0},
    "freeze": {"parameters": [f"{ENCODER}.vision.*"]},
}


class Pictures(Plugin):
    """Puts one of some pictures of noise into each row."""

    api = (1, 0)
    requires = ("image",)

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareBatch:
        drawn = torch.Generator().manual_seed(0)
        pictures = torch.randint(0, 256, (IMAGES, SIDE**2, 768), generator=drawn, dtype=torch.uint8)

        def put(batch: Batch) -> Batch:
            rows = len(batch.inputs)
            places = torch.full_like(batch.inputs, -1)
            places[:, : SIDE**2 // 4] = torch.arange(SIDE**2 // 4)
            of = batch.inputs.sum(1) % IMAGES
            grids = torch.tensor([[[1, SIDE, SIDE]]]).expand(rows, -1, -1).contiguous()
            names = extras_of("image")
            extras = dict(zip(names, (pictures[of], grids, places), strict=True))
            return replace(batch, extras=extras, axes={names[2]: Axes(batch=0, sequence=1)})

        return PrepareBatch(BatchPhase.MAKE, put)


class Watch(Plugin):
    """CPU seconds of each step, and of them those of the vision model or of what stands for it."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.steps: list[float] = []
        self.vision: list[float] = []

    @hookimpl
    def on_start(self, job: Job, model: Model) -> None:
        encoder: Any = model.parts[0].get_submodule(ENCODER)  # `image` starts before this plugin, by its name
        if encoder.once is None:
            encoder.encoded = self._timed(encoder.encoded)
        else:
            encoder.once.features = self._timed(encoder.once.features)
        self._spent, self._at = 0.0, time.process_time()

    @hookimpl
    def on_step(self) -> None:
        now = time.process_time()
        self.steps.append(now - self._at)
        self.vision.append(self._spent)
        self._spent, self._at = 0.0, now

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.process_time()
            out = call(*args)
            self._spent += time.process_time() - began
            return out

        return timed


def measured(steps: int) -> dict[str, tuple[float, float]]:
    """Kind of step → CPU seconds of the vision model, and of the whole step; the step with the least of the latter."""
    found: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory(prefix="forge-frozen-") as folder:
        for what, once in (
            ("in every batch", {}),
            ("once each, the first step", {"once": True, "cache": folder}),
            ("once each, all in the cache", {"once": True, "cache": folder}),
        ):
            count = 1 if "first" in what else steps
            if "all" in what:  # the rows of a run of as many steps, so that it finds every picture
                run_forge((Pictures, "image", "freeze"), {**CONFIG, "image": once}, steps=steps, folder=Path(folder))
            watch: Any = run_forge(
                (Pictures, "image", "freeze", Watch), {**CONFIG, "image": once}, steps=count, folder=Path(folder)
            ).plugin("watch")
            found[what] = min(zip(watch.vision, watch.steps, strict=True), key=lambda pair: pair[1])
    return found


def main() -> int:
    steps = int(sys.argv[1]) if sys.argv[1:] else STEPS
    found = measured(steps)
    spent, whole = found["once each, all in the cache"]
    share = 100 * spent / whole
    where = (
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    rows = "\n".join(
        f"| {what} | {1000 * vision:,.1f} ms | {1000 * step:,.0f} ms | {100 * vision / step:.1f}% |"
        for what, (vision, step) in found.items()
    )
    text = f"""# A frozen encoder in a step

Written by `python benchmarks/frozen_encoders.py`. A step has 8 rows of {SEQUENCE} tokens, each with an image of
224 × 224 pixels, of which 49 positions are. The decoder has 4 layers of width 256; the vision model has 6 of width 192,
and is frozen; the connector is trained. CPU time of one thread; the fastest of {steps} steps counts.

{time.strftime("%Y-%m-%d")}: {where}.

| images are encoded | vision model | step | share |
|---|---|---|---|
{rows}

From the cache it costs {share:.2f}% of a step; {BAR:.0f}% are allowed: pixels are hashed, and features are read.
"""
    if not sys.argv[1:]:
        RESULTS.write_text(text, encoding="utf-8")
    print(text)
    return 0 if share <= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
