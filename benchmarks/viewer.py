"""The page of `forge runs report` for 100 runs of a million steps: reading, size, and drawing in headless Chromium.

    python benchmarks/viewer.py

Writes benchmarks/results/viewer.md. The lines of metrics.jsonl are those of a real run, with other losses and with
spikes at random steps, which are then looked for on the page. Runs share a few files by hard links: each is read as if
it were alone. Without Chromium the drawing is left out.
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
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from forge_train_cli.report_page import page
from forge_train_tools.reporting.runs import reported
from forge_train_tools.run_folder import RunFolder
from forge_train_tools.testing import run_forge

RUNS, STEPS, FILES, SPIKES = 100, 1_000_000, 4, 5
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
                out.write(json.dumps({**template, "step": step, "tokens": step * 4096, "loss": loss}) + "\n")
    for number in range(RUNS):
        run = folder / "runs" / f"run-{number:03d}"
        shutil.copytree(real, run, ignore=shutil.ignore_patterns("checkpoints"))
        os.link(files[number % len(files)], run / "metrics.jsonl")
    return spikes


def measured(folder: Path) -> dict[str, Any]:
    """Sizes, seconds, and spikes that are missing on the page."""
    spikes = write_runs(folder)
    paths = sorted((folder / "runs").iterdir())
    found: dict[str, Any] = {"bytes": sum((path / "metrics.jsonl").stat().st_size for path in paths)}
    began, busy = time.perf_counter(), _cpu()
    runs, problems = reported([RunFolder(path) for path in paths])
    found |= {"read": time.perf_counter() - began, "read_cpu": _cpu() - busy, "problems": len(problems)}
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
        found["drawn"] = [_drawn(chromium, folder) for _ in range(3)]
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


def _cpu() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _peak() -> float:
    """MiB of the largest process."""
    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024


def report(found: dict[str, Any]) -> str:
    """The page of results."""
    lines = RUNS * STEPS
    rows = [
        ("metrics.jsonl, all runs together", f"{found['bytes'] / 1e9:.1f} GB, {lines:,} lines", ""),
        ("reading them (wall clock)", f"{found['read']:.0f} s", ""),
        ("reading them (CPU)", f"{found['read_cpu']:.0f} s, {found['read_cpu'] / lines * 1e6:.1f} µs a line", ""),
        ("making the page from what was read", f"{found['made']:.1f} s", ""),
        ("memory of the largest process", f"{found['peak']:.0f} MiB", ""),
        ("the page", f"{found['page'] / 1e6:.1f} MB, {found['points']:,} points of {found['metrics']} metrics", ""),
        ("the page without data", f"{found['frame'] / 1e3:.0f} kB", f"≤ {SMALLEST / 1e3:.0f} kB"),
        (f"spikes that are missing, of {RUNS * SPIKES}", str(found["missing"]), "0"),
    ]
    if "drawn" in found:
        drawn, zoomed = (sorted(times)[1] for times in zip(*found["drawn"], strict=True))
        rows.append(("opened and drawn in Chromium", f"{drawn:.2f} s", f"≤ {LIMIT:.0f} s"))
        rows.append(("a zoom with smoothing", f"{zoomed:.2f} s", ""))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"""# A report of {RUNS} runs of {STEPS:,} steps

`python benchmarks/viewer.py`, on {len(os.sched_getaffinity(0))} shared cores.
Drawing is the median of three starts of headless Chromium without a GPU, from the request for the page until the pixels
of all its canvases are there. Reading is timed apart: it happens once, when the page is written. The runs share
{min(FILES, RUNS)} files by hard links, so that a disk has to deliver less than it says; each run is parsed all the same.

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
    slow = [drawn for drawn, _ in found.get("drawn", ()) if drawn > LIMIT]
    return int(len(slow) > 1 or found["frame"] > SMALLEST or found["missing"] > 0 or found["problems"] > 0)


if __name__ == "__main__":
    sys.exit(main())
