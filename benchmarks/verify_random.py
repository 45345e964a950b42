"""Verifies random compositions against one process, and writes benchmarks/results/verify-random.md.

    python benchmarks/verify_random.py --seed 7                # 100 compositions, an hour at most
    python benchmarks/verify_random.py --seed 7 --number 12    # number 12 of that seed alone, with all it has to say

Compositions that Forge refuses are counted by their sentence. Beside each disagreement stands how far one process moves
when its weights start one rounding error away: a disagreement beyond that is a fault. Exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: the processes would otherwise take every core each

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "verify-random.md"
sys.path[:0] = [str(HERE.parent / "tests" / "dist"), str(HERE.parent / "tests")]

from forge_train import ConfigError, ForgeError  # noqa: E402
from forge_train.testing import Pool, PoolError, Verifier  # noqa: E402
from forge_train_tools.verification import Verdict  # noqa: E402
from random_compositions import NOISY, Drawn, Jitter, draw, sentence, write  # noqa: E402

STEPS = 3
TIMEOUT = 180.0
PAGE = """\
# Random compositions against one process

Written by `make verify-random SEED={seed}`. Each composition takes {steps} steps on one process and on its layout, by
`forge verify`'s code. Axes, schedules, plugins, precision, optimizer, task, accumulation and recomputation are drawn at
random. Beside each disagreement stands how far one process moves when its weights start one rounding error away
(the most of three draws): {noise} means that everything that differs is at most three times that.

{when}: {cores} cores, {system}, Python {python}, torch {torch}. Seed {seed}, {seconds:.0f} minutes.

| compositions | |
|---|---|
| drawn | {drawn} |
| refused by name | {refused} |
| compared | {compared} |
| agree | {agree} |
| undecided (ties of routers) | {undecided} |
| within jitter | {within} |
| **at fault** | {faults} |
"""


@dataclass
class Found:
    """Everything that a seed gave."""

    agree: int = 0
    undecided: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    within: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def compared(self) -> int:
        return self.agree + self.undecided + len(self.within) + len(self.faults)

    def take(self, one: Drawn, verify: Verifier, file: Path) -> str:
        """Verify one composition; the outcome in words."""
        try:
            verdict = verify(one.request(file), one.world, steps=STEPS, reference=one.reference(file))
        except ConfigError as error:
            self.refused[re.sub(r"\d+", "…", sentence(error))] += 1
            return f"refused: {sentence(error)}"
        except (ForgeError, PoolError) as error:
            self.faults.append(f"- {one}: failed: {str(error)[:1000]}")
            return f"FAILED: {error}"
        if verdict.agree:
            self.agree += 1
            return "agrees"
        if verdict.undecided:
            self.undecided += 1
            return f"undecided: {' '.join(verdict.advice)}"
        jitter = Jitter.measure(one.reference(file), STEPS)
        told = f"{one}: {differences(verdict, jitter)}"
        noise = jitter.explains(verdict)
        (self.within if noise else self.faults).append(f"- {told}. {' '.join(verdict.advice)}")
        return f"{'within jitter' if noise else 'DISAGREES'}: {told}\n{' '.join(verdict.advice)}"

    def page(self, seed: int, drawn: int, seconds: float) -> str:
        """The whole report."""
        head = PAGE.format(
            seed=seed, steps=STEPS, noise="noise", when=time.strftime("%Y-%m-%d"), cores=os.cpu_count(),
            system=platform.system(), python=platform.python_version(), torch=torch.__version__,
            seconds=seconds / 60, drawn=drawn, refused=self.refused.total(), compared=self.compared, agree=self.agree,
            undecided=self.undecided, within=len(self.within), faults=len(self.faults),
        )  # fmt: skip
        parts = [head]
        if self.faults:
            parts += ["## At fault\n", "\n".join(self.faults), ""]
        if self.within:
            parts += ["## Within jitter\n", "\n".join(self.within), ""]
        if self.refused:
            rows = (f"| {count} | {text.replace('|', '/')} |" for text, count in self.refused.most_common())
            parts += ["## Refused\n", "| | sentence |\n|---|---|", *rows, ""]
        return "\n".join(parts)


def differences(verdict: Verdict, jitter: Jitter) -> str:
    """Every failed check with its size, its limit, and what jitter does to it."""
    return ", ".join(
        f"{check.name} {check.worst:.1e} (allowed {check.tolerance:.1e}"
        + (f", jitter {jitter.moved[NOISY[check.name]]:.1e})" if check.name in NOISY else ")")
        for check in verdict.checks
        if not check.ok
    )


def numbers(arguments: argparse.Namespace) -> Iterator[int]:
    """Which compositions of the seed are drawn."""
    return iter([arguments.number]) if arguments.number is not None else itertools.count(arguments.first)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="compositions to compare; refused ones do not count")
    parser.add_argument("--minutes", type=float, default=60.0, help="time after which no other is begun")
    parser.add_argument("--number", type=int, help="draw this one alone, and write no page")
    parser.add_argument("--first", type=int, default=0, help="number of the first composition")
    parser.add_argument("--most", type=int, default=8, help="processes of a layout, at most")
    arguments = parser.parse_args()
    found, began, drawn = Found(), time.perf_counter(), 0
    with tempfile.TemporaryDirectory(prefix="forge-verify-random-") as folder:
        file = write(Path(folder))
        with Pool(Path(folder), size=arguments.most) as pool:
            verify = Verifier(pool, TIMEOUT)
            for number in numbers(arguments):
                if found.compared >= arguments.count or time.perf_counter() - began > 60 * arguments.minutes:
                    break
                one, drawn, start = draw(arguments.seed, number, arguments.most), drawn + 1, time.perf_counter()
                says = found.take(one, verify, file)
                print(f"{one}: {says} ({time.perf_counter() - start:.1f} s)", flush=True)
                if arguments.number is None:
                    text = found.page(arguments.seed, drawn, time.perf_counter() - began)
                    RESULTS.write_text(text, encoding="utf-8")
    return 1 if found.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
