"""Token shards: how fast they are read beside other libraries' loaders, how fast they are made, and in what memory.

    python benchmarks/data.py              # writes benchmarks/results/data.md; prints its rows as one line of JSON
    python benchmarks/data.py --small      # the same on a twentieth of the data, to see that it runs; writes nothing
    python benchmarks/data.py rates        # a part of it: rates, start, making, waiting, slow
    python benchmarks/data.py page FILE …  # the page, of what the parts printed

The text is all Python source of this installation, its standard library's and its packages'.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from loaders import SCALE, SEQUENCE, Row, anonymous, loader, rates, sparse, start

RESULTS = Path(__file__).parent / "results" / "data.md"
FORGE = [sys.executable, "-m", "forge_train_cli"]


def python_files() -> Iterator[str]:
    """All Python source of this installation."""
    import sysconfig

    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    files = {file for root in roots for file in root.rglob("*.py")}
    for file in sorted(files):
        text = file.read_bytes().decode("utf-8", errors="replace")
        if text:
            yield text


def write_text(file: Path, wanted: int) -> int:
    """Documents in a .jsonl file, over and over until it is as large as wanted; returns the bytes of their text."""
    size = 0
    with file.open("w", encoding="utf-8") as out:
        while True:
            for text in python_files():
                if out.tell() >= wanted:
                    return size
                out.write(json.dumps({"text": text}) + "\n")
                size += len(text.encode())


def family(pid: int) -> int:
    """Bytes of memory of a process and its children; shared pages are counted once."""
    total, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        try:
            waiting += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue
    return total


def prepared(source: Path, out: Path, *options: str) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds and peak memory of `forge data prepare`."""
    command = [*FORGE, "data", "prepare", str(source), "--out", str(out), *options]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began, most = time.perf_counter(), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            most = max(most, family(process.pid))
            time.sleep(0.05)
    wall = time.perf_counter() - began
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} exited {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, most


def by_library(source: Path, tokenizer: Path) -> None:
    """In a process of its own: encode all documents of a .jsonl file, 16 MB at a time; the reading is not counted."""
    import tokenizers

    made = tokenizers.Tokenizer.from_file(str(tokenizer))
    wall = cpu = 0.0
    size, waiting = 0, []
    with source.open(encoding="utf-8") as lines:
        for line in [*lines, ""]:
            if line:
                waiting.append(json.loads(line)["text"])
                size += len(waiting[-1])
            if size >= 16 << 20 or not line:
                began, spent = time.perf_counter(), time.process_time()
                made.encode_batch_fast(waiting, add_special_tokens=False)
                wall, cpu = wall + time.perf_counter() - began, cpu + time.process_time() - spent
                size, waiting = 0, []
    print(json.dumps({"wall": wall, "cpu": cpu}))


def making(folder: Path) -> Iterator[Row]:
    """`forge data prepare` beside the tokenizers library, in turn; its memory at two sizes; packing of what it made."""
    from forge_train_kit.data.manifest import open_prepared

    little, large = folder / "little.jsonl", folder / "large.jsonl"
    sizes = {file: write_text(file, size // SCALE) for file, size in ((little, 30_000_000), (large, 120_000_000))}
    *_, trained_peak = prepared(little, folder / "first", "--train-tokenizer", "8192")
    tokenizer = folder / "first" / "tokenizer"
    command = [sys.executable, __file__, "library", str(little), str(tokenizer / "tokenizer.json")]
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    peaks = {}
    for file in (little, large):
        done = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        theirs.append({key: sizes[little] / seconds for key, seconds in done.items()})
        wall, cpu, peaks[file] = prepared(file, folder / f"of-{file.stem}", "--tokenizer", str(tokenizer))
        ours.append({"wall": sizes[file] / wall, "cpu": sizes[file] / cpu})
    cores = f"{os.cpu_count()} cores"
    for key, of in (("cpu", "MB per CPU-second of all processes"), ("wall", f"MB per second on {cores}")):
        mine, best = (max(one[key] for one in every) for every in (ours, theirs))
        what = f"`forge data prepare`, the whole command on {sizes[large] / 1e6:.0f} MB of text in a .jsonl: {of}"
        measured = f"{mine / best:.2f} ({mine / 1e6:.1f} / {best / 1e6:.1f})"
        yield f"{what}, over `encode_batch_fast`'s", measured, "≥ 0.85", mine >= 0.85 * best
    peak = peaks[large]
    what = f"its peak memory, all processes on {cores}, MB ({peaks[little] / 1e6:.0f} on a quarter of the text)"
    yield what, f"{peak / 1e6:.0f}", "≤ 500", peak <= 500e6
    what = f"the same with `--train-tokenizer 8192` on {sizes[little] / 1e6:.0f} MB of text"
    yield what, f"{trained_peak / 1e6:.0f}", "≤ 500", trained_peak <= 500e6
    yield from packing(open_prepared(folder / "first", key="").sides["train"].lengths())


def packing(lengths: Any) -> Iterator[Row]:
    """Best fit of real documents."""
    from forge_train_kit.data.packing import best_fit, cut

    many = np.tile(lengths, max(1, 300_000 // SCALE // len(lengths)))
    seconds, used = float("inf"), 0.0
    for _ in range(3):
        began = time.process_time()
        pieces = cut(many, SEQUENCE)[2]
        packed = best_fit(pieces, SEQUENCE, seed=0)
        seconds = min(seconds, time.process_time() - began)
        used = int(pieces.sum()) / (len(packed.row_ends) * SEQUENCE)
    rate = len(many) / seconds
    of = f"{len(many):,} Python files, mean {many.mean():,.0f} tokens, cut into {len(pieces):,} pieces"
    yield f"best fit at {SEQUENCE:,} of {of}: documents per CPU-second", f"{rate:,.0f}", "≥ 150,000", rate >= 150e3
    yield "the same: share of the rows' tokens that is used", f"{used:.2%}", "≥ 99 %", used >= 0.99


def waiting(folder: Path) -> Iterator[Row]:
    """The quickstart's `data_wait`."""
    command = [*FORGE, "train", "--run-dir", str(folder), "--name", "q", "--quiet", "-s", "log.every=1"]
    command += ["-s", "train.steps=60", "-s", "train.evaluate_every=0"] if SCALE > 1 else []
    subprocess.run(command, check=True, capture_output=True)
    lines = [json.loads(line) for line in (folder / "q" / "metrics.jsonl").read_text().splitlines()]
    share = mean(line["data_wait"] for line in lines if "data_wait" in line)
    yield "quickstart, share of the steps' time waited for data", f"{share:.2%}", "≤ 1 %", share <= 0.01


def slow(folder: Path) -> Iterator[Row]:
    """Memory where the consumer takes 100 times as long as the loader."""
    sparse(folder, 64_000_000 // SCALE, 80_000 // SCALE, 2)
    batches = loader(folder, held_out=0.0)
    began = time.perf_counter()
    for _ in range(100):
        next(batches)
    pause, before, most = time.perf_counter() - began, anonymous(), 0  # 100 batches take as long as one consumer's step
    seconds = 60 / SCALE
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        next(batches)
        time.sleep(pause)
        most = max(most, anonymous())
    grown = max(0, most - before) / 1e6
    what = f"`tokens`, a consumer 100 times as slow as the loader for {seconds:.0f} s: growth of memory, MB"
    yield what, f"{grown:.1f}", "≤ 1", grown <= 1


PARTS = (rates, start, making, waiting, slow)


def page(rows: list[Row]) -> str:
    """The results as Markdown."""
    lines = [
        "# Data",
        "",
        f"Written by `python benchmarks/data.py` on {time.strftime('%Y-%m-%d')}, on {os.cpu_count()} cores. Where",
        "others use the machine too, wall seconds say less than CPU seconds.",
        "",
        "Loaders give micro-batches of 8 × 2,048 shuffled tokens from page cache, all in turn, the best of 5 rounds.",
        "With `isolate`, ours finds the documents of each row too, which the others do not. The text is the Python",
        "source of this installation. MosaicML's `streaming` is not among them: its requirements exclude the versions",
        "that Forge is tested with.",
        "",
        "| what | measured | expected | met |",
        "|---|---|---|---|",
    ]
    lines += [f"| {what} | {measured} | {bar} | {'yes' if met else 'no'} |" for what, measured, bar, met in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    rows: list[Row] = []
    chosen = [part for part in PARTS if part.__name__ in sys.argv] or PARTS
    if "page" in sys.argv:
        chosen = ()
        rows = [tuple(row) for file in sys.argv[2:] for row in json.loads(Path(file).read_text())]
    for part in chosen:
        with tempfile.TemporaryDirectory() as folder:
            for row in part(Path(folder)):
                rows.append(row)
                print(*row, sep=" | ", file=sys.stderr, flush=True)
    print(json.dumps(rows))
    if SCALE == 1 and (chosen is PARTS or not chosen):
        RESULTS.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["library"]:
        by_library(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
