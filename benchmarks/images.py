"""Images in rows: padding, work of ranks, and waiting for what is decoded. Writes benchmarks/results/images.md.

    python benchmarks/images.py            # in some minutes
    python benchmarks/images.py --small    # a tenth of it, without writing

Images and texts are drawn here.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from PIL import Image

from forge_train_kit.data.balance import spread
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.offline.opening import lone_job

RESULTS = Path(__file__).parent / "results" / "images.md"
SMALL = "--small" in sys.argv
RECORDS, STEPS, TRAINED = (600, 4, 10) if SMALL else (6000, 40, 60)
SEQUENCE = 2048
PADDING, LOPSIDED, WAITING = 0.05, 1.1, 0.02
"""What is allowed."""
LAYOUTS = (
    *((2, 1, 64), (4, 1, 64), (8, 1, 64), (8, 1, 256), (8, 2, 64), (8, 2, 128), (8, 8, 64)),
    *((6, 1, 96), (3, 2, 96)),
)
"""Data-parallel ranks, micro-batch and global batch."""
LARGE = f"""plugins = ["multimodal", "image"]
[train]
steps = {STEPS}
global_batch = 64
micro_batch = 1
sequence = {SEQUENCE}
[multimodal]
path = "records.jsonl"
cache = "cache"
held_out = 0.0
[image]
size = 896
patch = 14
merge = 2
fit = "keep"
dim = 1024
layers = 24
heads = 16
positions = "rotary"
[decoder]
max_sequence = {SEQUENCE}
"""
LITTLE = f"""plugins = ["multimodal", "image"]
[train]
steps = {TRAINED}
global_batch = 8
micro_batch = 8
sequence = 256
[log]
every = 1
[multimodal]
path = "little.jsonl"
cache = "cache"
[image]
size = 64
patch = 8
merge = 1
dim = 64
layers = 2
heads = 4
[decoder]
dim = 96
layers = 2
heads = 4
max_sequence = 256
"""


def write(folder: Path) -> None:
    """Records of a caption of log-normal length and an image of log-normal sides; every fifth is a text."""
    draws = np.random.default_rng(0)
    (folder / "images").mkdir()
    with (folder / "records.jsonl").open("w", encoding="utf-8") as file:
        for number in range(RECORDS):
            record: dict[str, Any] = {"text": "a" * int(np.clip(draws.lognormal(4, 1), 4, 900))}
            if number % 5:
                width, height = np.clip(draws.lognormal(5.6, 0.6, 2), 28, 2000).astype(int).tolist()
                name = f"images/{number}.png"
                Image.new("RGB", (width, height), (number % 256, 80, 90)).save(folder / name, compress_level=1)
                record = {"text": f"<image>{record['text']}", "images": [name]}
            file.write(json.dumps(record) + "\n")


def write_little(folder: Path) -> None:
    """Captions of images of 64 × 64 pixels."""
    draws = np.random.default_rng(0)
    with (folder / "little.jsonl").open("w", encoding="utf-8") as file:
        for number in range(2000):
            values = np.kron(draws.integers(0, 256, (4, 4, 3), np.uint8), np.ones((16, 16, 1), np.uint8))
            Image.fromarray(values).save(folder / "images" / f"little-{number}.png")
            record = {"text": f"<image>{number % 4} red circles", "images": [f"images/little-{number}.png"]}
            file.write(json.dumps(record) + "\n")


def job(config: str) -> Any:
    Path("run.toml").write_text(config, encoding="utf-8")
    return lone_job(resolve(Request(config="run.toml")), Path(), "cpu")


def lopsided(costs: Any, shares: Any) -> tuple[float, float]:
    """The largest share by the mean, and the same where ranks wait for each other in each micro-batch."""
    each = costs[shares].sum(2)
    share = each.sum(1)
    return float(share.max() / share.mean()), float(each.max(0).sum() / share.mean())


def balance() -> Iterator[str]:
    """Padding, and the work of ranks."""
    stream = job(LARGE).hooks.build_data("train")._stream
    rows = stream.rows
    padding = 1 - rows.pieces.length.sum() / (rows.count * SEQUENCE)
    yield (
        f"{RECORDS:,} records, four fifths of which have an image with log-normal sides (median 270 pixels, σ = 0.6, "
        f"28 to 2,000) and all a caption of log-normal length, in rows of {SEQUENCE:,} tokens (`best_fit`). A vision "
        "transformer of 24 layers and 1,024 features encodes patches of 14 pixels, of up to 896² pixels an image.\n"
    )
    yield f"{told(padding, PADDING)} of the rows' positions are padding.\n"
    places = stream.places(np.arange(max(batch for *_, batch in LAYOUTS) * STEPS) % rows.count)
    rows.costs(places[:1])  # builds the encoder, without memory
    began = time.process_time()
    costs = rows.costs(places)
    looking = (time.process_time() - began) / len(places)
    began = time.process_time()
    for _ in range(10):
        spread(costs[:256], 1, 8)
    dividing = (time.process_time() - began) / 10
    yield (
        f"Operations of the rank with most in the encoder, divided by the mean, over {STEPS} steps. Of a row they have "
        f"a standard deviation of {costs.std() / costs.mean():.0%} of the mean. *In turn*: the same where ranks wait "
        "for each other in each micro-batch.\n"
    )
    yield "| ranks | micro-batch | global batch | in order | by cost | largest step | in turn, in order | by cost |"
    yield "|---|---|---|---|---|---|---|---|"
    for ranks, micro_batch, batch in LAYOUTS:
        steps = costs[: batch * STEPS].reshape(-1, batch)
        plain = np.arange(batch).reshape(-1, ranks, micro_batch).swapaxes(0, 1)
        before = [lopsided(one, plain) for one in steps]
        after = [lopsided(one, spread(one, micro_batch, ranks)) for one in steps]
        largest = mean(one for one, _ in after)
        yield (
            f"| {ranks} | {micro_batch} | {batch} | {mean(one for one, _ in before):.3f} | "
            f"{told(largest, LOPSIDED, '.3f')} | {max(one for one, _ in after):.3f} | "
            f"{mean(one for _, one in before):.3f} | {mean(one for _, one in after):.3f} |"
        )
    yield (
        f"\nEvery rank looks up a row in {1e3 * looking:.2f} ms of a core, and divides 256 rows among 8 ranks in "
        f"{1e3 * dividing:.1f} ms.\n"
    )


def waiting() -> Iterator[str]:
    """Time of reading images of 64 pixels, and its share of a step."""
    loader = job(LITTLE).hooks.build_data("train")
    best, items = 1.0, 0
    for _ in range(5):
        began = time.process_time()
        batches = [next(loader) for _ in range(10)]
        best = min(best, (time.process_time() - began) / 10)
        items = sum(int((one.extras["image_grids"].prod(-1) > 0).sum()) for one in batches) // 10
    yield (
        f"Eight rows of 256 tokens with {items} images of 64 × 64 pixels (PNG) are read in {1e3 * best:.1f} ms of a "
        f"core, {1e6 * best / items:.0f} µs an image. Two layers and 64 features encode patches of 8 pixels, for a "
        "decoder of two layers and 96 features.\n"
    )
    yield "| `multimodal.prefetch.workers` | wait, share of a step | step |\n|---|---|---|"
    for workers in (0, 1):
        command = [sys.executable, "-m", "forge_train_cli", "train", "run.toml", "--name", f"w{workers}", "--quiet"]
        subprocess.run([*command, "-s", f"multimodal.prefetch.workers={workers}"], check=True, capture_output=True)
        lines = [json.loads(line) for line in Path(f"runs/w{workers}/metrics.jsonl").read_text().splitlines()]
        found = [line for line in lines if "data_wait" in line][5:]
        share, step = (mean(one[name] for one in found) for name in ("data_wait", "step_seconds"))
        yield f"| {workers} | {told(share, WAITING if workers else 1.0)} | {1e3 * step:.0f} ms |"


MISSED: list[str] = []


def told(value: float, most: float, form: str = ".2%") -> str:
    """A figure that must not be larger."""
    text = f"{value:{form}}"
    if value > most:
        MISSED.append(f"{text}, where {most:{form}} is allowed")
    return text


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="forge-images-") as name:
        os.chdir(name)
        write(Path(name))
        write_little(Path(name))
        text = (
            "# Images in rows\n\n"
            f"Written by `python benchmarks/images.py` on {time.strftime('%Y-%m-%d')}: {os.cpu_count()} cores, "
            f"{platform.system()}, Python {platform.python_version()}. Allowed are {PADDING:.0%} of padding, "
            f"{LOPSIDED} times the mean of ranks' operations, and, where a worker reads ahead, a wait for data of "
            f"{WAITING:.0%} of a step.\n\n"
        )
        text += "\n".join(["## Balance\n", *balance(), "## Waiting\n", *waiting()]) + "\n"
    print(text, *MISSED, sep="\n")
    if not SMALL:
        RESULTS.write_text(text, encoding="utf-8")
    return bool(MISSED)


if __name__ == "__main__":
    raise SystemExit(main())
