"""The page of `forge runs report` for 100 runs of a million steps: reading, size, and drawing in headless Chromium.

    python benchmarks/viewer.py

Writes benchmarks/results/viewer.md. The lines of metrics.jsonl are those of a real run, with other losses and with
spikes at random steps, which are then looked for on the page. A few files are written and read, and each stands for
several runs: the page is that of all runs, and reading is stated for each file. Without Chromium the drawing is left
out.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from forge_train_cli.report_page import page
from forge_train_tools.reporting.metrics import Metrics, read_all
from forge_train_tools.reporting.runs import ReportedRun, buckets_of
from forge_train_tools.testing import run_forge

RUNS, STEPS, FILES, SPIKES, STARTS = 100, 1_000_000, 4, 5, 9
LIMIT = 2.0
"""Seconds in which the page is to be drawn."""
SMALLEST = 300_000
"""Bytes of a page without data."""
TARGET = Path(__file__).parent / "results" / "viewer.md"
BROWSER = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
           "--disable-component-update", "--disable-sync", "--window-size=1200,900", "--dump-dom")  # fmt: skip
CLOCK = """<script>
const canvases = document.querySelectorAll("canvas");
const settle = () => canvases.forEach((one) => one.getContext("2d").getImageData(0, 0, 1, 1));
settle();
const drawn = performance.now();
state.smooth = 30; state.zoom = [span[0] + (span[1] - span[0]) * 0.4, span[0] + (span[1] - span[0]) * 0.6];
now(); settle();
document.title = `${drawn} ${performance.now() - drawn}`;
</script>"""
"""Reads a pixel of each canvas, which waits until it is drawn; then zooms and smooths."""


def write_runs(folder: Path) -> list[set[tuple[int, float]]]:
    """Write the runs; returns the spikes of the loss of each file: step and value."""
    real = run_forge(steps=3, folder=folder, name="real").run
    template = json.loads((real / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    (real / "metrics.jsonl").unlink()
    draw, spikes, files = np.random.default_rng(0), [], []
    for number in range(min(FILES, RUNS)):
        losses = 2 + 9 * np.exp(-np.arange(STEPS) / (STEPS / 20 * (number + 1))) + draw.normal(size=STEPS) / 10
        places = draw.choice(STEPS, SPIKES, replace=False)
        losses[places] = 20 + draw.random(SPIKES)
        spikes.append({(int(place) + 1, float(losses[place])) for place in places})
        files.append(folder / f"{number}.jsonl")
        with files[-1].open("w", encoding="utf-8") as out:
            for step, loss in enumerate(losses.tolist(), 1):
                others = {key: value * (1 + loss % 0.1) for key, value in template.items() if isinstance(value, float)}
                line = {**template, **others, "step": step, "tokens": step * 4096, "loss": loss}
                out.write(json.dumps(line) + "\n")
    for number in range(RUNS):
        shutil.copytree(real, folder / "runs" / f"run-{number:03d}", ignore=shutil.ignore_patterns("checkpoints"))
    return spikes


def measured(folder: Path) -> dict[str, Any]:
    """Sizes, seconds, and spikes that are missing on the page."""
    spikes = write_runs(folder)
    files = sorted(folder.glob("*.jsonl"))
    began, busy = time.perf_counter(), _cpu()
    read = [one for one in read_all(files, buckets_of(RUNS)) if isinstance(one, Metrics)]
    found: dict[str, Any] = {"read": time.perf_counter() - began, "read_cpu": (_cpu() - busy) / len(files)}
    found |= {"bytes": files[0].stat().st_size, "files": len(files)}
    paths = sorted((folder / "runs").iterdir())
    runs = [ReportedRun(path, read[at % len(read)]) for at, path in enumerate(paths)]
    began = time.perf_counter()
    text = page(runs, folder / "page.html")
    found |= {"made": time.perf_counter() - began, "page": len(text), "peak": _peak()}
    begin = text.index('id="data">') + len('id="data">')
    end = text.index("</script>", begin)
    data = json.loads(text[begin:end])
    found |= {"frame": len(page([], folder / "empty.html")), "metrics": len(data["metrics"])}
    found["missing"] = sum(len(spikes[one["run"] % len(spikes)] - _points(one)) for one in data["metrics"]["loss"])
    found["points"] = sum(len(one["x"]) for curves in data["metrics"].values() for one in curves)
    (folder / "page.html").write_text(text.replace("</body>", f"{CLOCK}</body>"), encoding="utf-8")
    if chromium := shutil.which("chromium") or shutil.which("google-chrome"):
        found["drawn"] = [_drawn(chromium, folder) for _ in range(STARTS)]
    return found


def _points(curve: dict[str, Any]) -> set[tuple[int, float]]:
    values = (value for (value,) in struct.iter_unpack("<d", base64.b64decode(curve["y"])))
    return set(zip(accumulate(curve["x"]), values, strict=True))


def _drawn(chromium: str, folder: Path) -> tuple[float, float]:
    """Seconds until the page was drawn from when it was asked for, and of a zoom with smoothing."""
    command = [chromium, *BROWSER, f"--user-data-dir={folder / 'profile'}", (folder / "page.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    drawn, zoomed = dom.partition("<title>")[2].partition("</title>")[0].split()
    return float(drawn) / 1e3, float(zoomed) / 1e3


def _both(seconds: Sequence[float]) -> str:
    return f"{seconds[0]:.2f} s, in the median {seconds[len(seconds) // 2]:.2f} s"


def _cpu() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _peak() -> float:
    """MiB of the largest process."""
    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024


def report(found: dict[str, Any]) -> str:
    """The page of results."""
    rows = [
        (f"a metrics.jsonl of {STEPS:,} lines", f"{found['bytes'] / 1e6:.0f} MB", ""),
        ("reading it (CPU)", f"{found['read_cpu']:.1f} s, {found['read_cpu'] / STEPS * 1e6:.1f} µs a line", ""),
        (f"reading {found['files']} of them on a busy machine (wall clock)", f"{found['read']:.0f} s", ""),
        (f"so, reading {RUNS} of them (CPU, reckoned)", f"{found['read_cpu'] * RUNS / 60:.0f} min", ""),
        ("making the page from what was read", f"{found['made']:.1f} s", ""),
        ("memory of the largest process", f"{found['peak']:.0f} MiB", ""),
        ("the page", f"{found['page'] / 1e6:.1f} MB, {found['points']:,} points of {found['metrics']} metrics", ""),
        ("the page without data", f"{found['frame'] / 1e3:.0f} kB", f"≤ {SMALLEST / 1e3:.0f} kB"),
        (f"spikes that are missing, of {RUNS * SPIKES}", str(found["missing"]), "0"),
    ]
    if "drawn" in found:
        drawn, zoomed = (sorted(times) for times in zip(*found["drawn"], strict=True))
        rows.append(("opened and drawn in Chromium", f"{_both(drawn)}", f"≤ {LIMIT:.0f} s"))
        rows.append(("a zoom with smoothing", f"{_both(zoomed)}", ""))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"""# A report of {RUNS} runs of {STEPS:,} steps

`python benchmarks/viewer.py`, on {len(os.sched_getaffinity(0))} shared cores with a load of {os.getloadavg()[0]:.0f}.
Drawing is the least of {STARTS} starts of headless Chromium without a GPU, from the request for the page until the
pixels of all its canvases are there; other work on the cores makes it longer. Reading happens once, when the page is
written, and is timed apart: {found["files"]} files are read, and each stands for {RUNS // found["files"]} of the runs
on the page.

| | measured | limit |
|---|---|---|
{table}
"""


def main() -> int:
    """Measure, and write the page; 1 if a limit is not met."""
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder))
    print(text := report(found))
    TARGET.write_text(text, encoding="utf-8")
    drawn = min((seconds for seconds, _ in found.get("drawn", ())), default=0.0)
    return int(drawn > LIMIT or found["frame"] > SMALLEST or found["missing"] > 0)


if __name__ == "__main__":
    sys.exit(main())
