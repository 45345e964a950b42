"""Measures and checks Forge on this machine's CUDA device, and writes benchmarks/results/gpu.md and gpu.json.

    make gpu                                # all cases, at most ten minutes; the same command again goes on
    make gpu ARGS="attention speed"         # those whose names begin so
    make gpu ARGS="--fresh"                 # forget what was kept
    make gpu ARGS="--toy"                   # at toy size, on a CPU too
    PYTHONPATH=core:plugins:cli:contrib python benchmarks/gpu      # without pip: plugins are registered on the way

The exit code is 1 for a wrong number, a speed below 0.95 of the plain loop's, a case that failed or was not reached; 2
where a package that Forge needs is missing. Cases that need more devices than there are are listed as such.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import machine, page
from gpu.case import BAD, Size
from gpu.cases import cases
from gpu.suite import Suite, failed

RESULTS = machine.ROOT / "benchmarks" / "results"


def main(arguments: list[str] | None = None) -> int:
    chosen = _arguments(arguments)
    if missing := machine.lacking():
        print(
            f"Forge needs what {sys.executable} lacks: {', '.join(missing)}. Install that, without a "
            "network from wheels, or name a Python that has it: make gpu PYTHON=/path/to/python.",
            file=sys.stderr,
        )
        return 2
    import torch

    gpus = torch.cuda.device_count()
    device = chosen.device if chosen.device != "auto" else ("cuda" if gpus else "cpu")
    toy = chosen.toy or device == "cpu"
    folder = chosen.kept / ("toy" if toy else "real")
    if chosen.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    about = machine.describe(device)
    stamp = {**about, "code": machine.digest(), "toy": toy}
    paths = machine.register(chosen.kept / "registered")
    suite = Suite(
        Size(device, toy),
        gpus if device == "cuda" else 0,
        folder,
        stamp,
        machine.environment(paths),
        minutes=chosen.minutes,
        # `eager` in float64 holds about 10 GiB for 8,192 tokens.
        beside=chosen.beside or (min((os.cpu_count() or 1) // 2, about["memory_gib"] // 12) if device == "cuda" else 1),
    )
    wanted = [case for case in cases(about) if not chosen.case or case.name.startswith(tuple(chosen.case))]
    if not wanted:
        print(f"No case begins with {' or '.join(map(repr, chosen.case))}: {_names(about)}.", file=sys.stderr)
        return 2
    results = []
    for result in suite.run(wanted):
        results.append(result)
        mark = "MISS" if result.status in BAD else "ok  " if result.rows else "—   "
        print(f"{mark} {result.name}: {result.status}, {result.seconds:.0f} s", flush=True)
        for row in result.rows:
            print(f"       {'' if row.ok else 'MISS '}{row.name}: {row.measured} (bar {row.bar})", flush=True)
        if not result.rows:
            print("       " + result.told.replace("\n", "\n       "), flush=True)
    out = chosen.out or (folder if toy else RESULTS)  # a trial on a CPU replaces no device's table
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.md").write_text(page.markdown(wanted, results, about, toy=toy), encoding="utf-8")
    (out / "gpu.json").write_text(page.plain(results, about), encoding="utf-8")
    print(f"The table is {out / 'gpu.md'}.")
    return 1 if failed(results) else 0


def _names(about: dict[str, object]) -> str:
    return ", ".join(case.name for case in cases(about))


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case", nargs="*", help="beginnings of names of cases; all by default")
    parser.add_argument("--toy", action="store_true", help="at toy size, as without a CUDA device")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--minutes", type=float, default=10.0, help="after which no case is begun")
    parser.add_argument("--beside", type=int, default=0, help="cases at once, of those that measure no time")
    parser.add_argument("--fresh", action="store_true", help="forget the results that were kept")
    parser.add_argument("--kept", type=Path, default=machine.ROOT / "runs" / "gpu", help="where results are kept")
    parser.add_argument("--out", type=Path, help="where the table is written: benchmarks/results, at toy size --kept")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
