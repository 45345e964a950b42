"""Verifies random compositions against one process; writes benchmarks/results/verify-random-SEEDS.md.

    python benchmarks/verify_random.py --seed 7                # 100 compositions, an hour at most
    python benchmarks/verify_random.py --seed 7 8 --outcomes F # of both; what F has is not done again, unless at fault
    python benchmarks/verify_random.py --seed 7 --number 12    # number 12 of that seed alone, with all it has to say

Compositions that Forge refuses are counted by their sentence. Beside each disagreement stands how far one process moves
when its weights start one rounding error away: a disagreement beyond that is a fault. Exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch: the processes would otherwise take every core each

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results"
sys.path[:0] = [str(HERE.parent / "tests" / "dist"), str(HERE.parent / "tests")]

from forge_train import ConfigError, ForgeError  # noqa: E402
from forge_train_tools.testing import Pool, PoolError, Verifier  # noqa: E402
from forge_train_tools.verification import Verdict  # noqa: E402
from random_compositions import NOISY, Drawn, Jitter, draw, sentence, write  # noqa: E402

STEPS = 3
TIMEOUT = 180.0
"""Seconds until ranks count as hanging, without those in which they wait for a core."""
Kind = Literal["agrees", "undecided", "refused", "within jitter", "at fault"]
PAGE = """\
# Random compositions against one process

Written by `make verify-random SEED="{seeds}"`. Each composition takes {steps} steps on one process and on its layout,
by `forge verify`'s code. Axes, schedules, plugins, precision, optimizer, task, accumulation and recomputation are drawn
at random. Beside each disagreement stands how far one process moves when its weights start one rounding error away
(the most of three draws): {noise} means that everything that differs is at most three times that.

{when}: {cores} cores, {system}, Python {python}, torch {torch}. Seed {seeds}, {minutes:.0f} minutes.

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


@dataclass(frozen=True)
class Outcome:
    """The verdict on one composition."""

    seed: int
    number: int
    kind: Kind
    says: str
    seconds: float

    @classmethod
    def of(cls, one: Drawn, verify: Verifier, file: Path) -> Outcome:
        """Verify a composition."""
        began = time.perf_counter()
        kind, says = judge(one, verify, file)
        return cls(one.seed, one.number, kind, says, time.perf_counter() - began)


def judge(one: Drawn, verify: Verifier, file: Path) -> tuple[Kind, str]:
    """Verify a composition; what that says, for the page."""
    try:
        verdict = verify(one.request(file), one.world, steps=STEPS, reference=one.reference(file))
    except ConfigError as error:
        return "refused", sentence(error)
    except (ForgeError, PoolError) as error:
        return "at fault", f"{one}: failed: {str(error)[:1000]}"
    if verdict.agree or verdict.undecided:
        return "agrees" if verdict.agree else "undecided", " ".join(verdict.advice)
    jitter = Jitter.measure(one.reference(file), STEPS)
    kind: Kind = "within jitter" if jitter.explains(verdict) else "at fault"
    return kind, f"{one}: {differences(verdict, jitter)}. {' '.join(verdict.advice)}"


def page(found: Iterable[Outcome], seeds: str) -> str:
    """The whole report."""
    said: dict[Kind, list[str]] = {kind: [] for kind in get_args(Kind)}
    minutes = 0.0
    for one in found:
        said[one.kind].append(one.says if one.kind == "refused" else f"seed {one.seed}, {one.says}")
        minutes += one.seconds / 60
    counts = {kind: len(says) for kind, says in said.items()}
    drawn = sum(counts.values())
    parts = [
        PAGE.format(
            seeds=seeds, steps=STEPS, noise="noise", when=time.strftime("%Y-%m-%d"), cores=os.cpu_count(),
            system=platform.system(), python=platform.python_version(), torch=torch.__version__, minutes=minutes,
            drawn=drawn, compared=drawn - counts["refused"], refused=counts["refused"], agree=counts["agrees"],
            undecided=counts["undecided"], within=counts["within jitter"], faults=counts["at fault"],
        )
    ]  # fmt: skip
    listed: tuple[Kind, ...] = ("at fault", "within jitter")
    for kind in listed:
        if said[kind]:
            parts += [f"## {kind.capitalize()}\n", *(f"- {text}" for text in said[kind]), ""]
    if sentences := Counter(re.sub(r"\d+", "…", text.replace("|", "/")) for text in said["refused"]):
        rows = (f"| {count} | {text} |" for text, count in sentences.most_common())
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


def read(file: Path | None) -> dict[tuple[int, int], Outcome]:
    """Outcomes of an earlier run; of a composition, the last."""
    lines = file.read_text(encoding="utf-8").splitlines() if file and file.exists() else []
    return {(one.seed, one.number): one for one in (Outcome(**json.loads(line)) for line in lines)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--count", type=int, default=100, help="compositions of a seed to compare, without refused ones"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="time after which no other is begun")
    parser.add_argument("--number", type=int, help="draw this one alone, and write no page")
    parser.add_argument("--first", type=int, default=0, help="number of the first composition")
    parser.add_argument("--most", type=int, default=8, help="processes of a layout, at most")
    parser.add_argument("--outcomes", type=Path, help="a file with a line for each composition, to continue with")
    arguments = parser.parse_args()
    alone, ends = arguments.number is not None, time.perf_counter() + 60 * arguments.minutes
    found = {} if alone else read(arguments.outcomes)
    with tempfile.TemporaryDirectory(prefix="forge-verify-random-") as folder:
        file = write(Path(folder))
        with Pool(Path(folder), size=arguments.most) as pool:
            verify = Verifier(pool, TIMEOUT)
            for seed in arguments.seed:
                compared = 0
                for number in [arguments.number] if alone else itertools.count(arguments.first):
                    if compared >= arguments.count or time.perf_counter() > ends:
                        break
                    known = found.get((seed, number))
                    if known is None or known.kind == "at fault":
                        one = draw(seed, number, arguments.most)
                        known = found[seed, number] = Outcome.of(one, verify, file)
                        print(f"{one}: {known.kind}: {known.says} ({known.seconds:.1f} s)", flush=True)
                        if arguments.outcomes:
                            with arguments.outcomes.open("a", encoding="utf-8") as out:
                                out.write(json.dumps(dataclasses.asdict(known)) + "\n")
                    compared += known.kind != "refused"
    if not alone:
        seeds = [str(seed) for seed in arguments.seed]
        file = RESULTS / f"verify-random-{'-'.join(seeds)}.md"
        file.write_text(page(found.values(), " ".join(seeds)), encoding="utf-8")
    return int(any(one.kind == "at fault" for one in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
