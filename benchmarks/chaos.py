"""Runs of two ranks that meet misfortunes, and must end as if nothing had happened.

    python benchmarks/chaos.py [TRIALS [FIRST]]   # 100 trials from seed 0: writes benchmarks/results/chaos.md

The trials are those of tests/dist/chaos_trials.py. A seed names a trial: `python benchmarks/chaos.py 1 37` repeats the
one of seed 37, and writes nothing.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "chaos.md"
for folder in ("tests", "tests/dist"):
    sys.path.insert(0, str(HERE.parent / folder))

import torch  # noqa: E402

from chaos_trials import EVERY, KINDS, STEPS, Ground, Verdict, choose  # noqa: E402

TRIALS = 100


def run(seeds: range, done: list[Verdict]) -> None:
    """Do the trials of seeds, one after the other; Ctrl-C ends it after those that are done."""
    with tempfile.TemporaryDirectory() as folder:
        ground = Ground(Path(folder))
        for seed in seeds:
            trial = choose(seed)
            print(f"{seed:3} {trial.kind}: {trial.words} … ", end="", flush=True)
            one = ground.run(trial)
            how = "FAIL: " + "; ".join(one.wrong) if one.wrong else "ok"
            print(f"{how}; exit codes {one.codes}, resumed at {one.resumed}, {one.seconds:.0f} s", flush=True)
            if one.wrong:
                print("".join(f"    | {line}\n" for said in one.said for line in said.splitlines()), flush=True)
            done.append(one)


def page(verdicts: Sequence[Verdict]) -> str:
    """The table of results."""
    rows = []
    for kind in dict.fromkeys(KINDS):
        ours = [one for one in verdicts if one.trial.kind == kind]
        if ours:
            rows.append((kind, ours))
    rows.append(("all", list(verdicts)))
    machine = (
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    lines = [
        "# Chaos",
        "",
        f"Written by `python benchmarks/chaos.py {len(verdicts)}` on {time.strftime('%Y-%m-%d')}: {machine}.",
        f"Each trial is a run of {STEPS} steps on 2 ranks with a checkpoint every {EVERY} steps, half of them saved",
        "in the background. One misfortune strikes at a moment that a seed chooses; the same command is repeated until",
        "the run is done. *Passed*: metrics and last checkpoint equal those of an undisturbed run bit for bit, every",
        "command ended well or with a documented refusal, and no attempt began before the newest whole checkpoint.",
        "",
        "| misfortune | trials | struck | passed | commands that ended early | attempts that resumed | median s |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, ours in rows:
        passed, struck = sum(not one.wrong for one in ours), sum(one.struck for one in ours)
        early = sum(code != 0 for one in ours for code in one.codes)
        resumed = sum(len(one.resumed) for one in ours)
        seconds = statistics.median(one.seconds for one in ours)
        lines.append(f"| {kind} | {len(ours)} | {struck} | {passed} | {early} | {resumed} | {seconds:.0f} |")
    bad = [f"- seed {one.trial.seed} ({one.trial.kind}; {one.trial.words}): {'; '.join(one.wrong)}" for one in verdicts]
    failed = [line for line, one in zip(bad, verdicts, strict=True) if one.wrong]
    return "\n".join([*lines, "", *failed, *([""] if failed else [])])


def main() -> int:
    """Run what the command line says."""
    given = [int(one) for one in sys.argv[1:]]
    count, first = (given + [TRIALS, 0][len(given) :])[:2]
    verdicts: list[Verdict] = []
    try:
        run(range(first, first + count), verdicts)
    except KeyboardInterrupt:
        print(f"\nstopped after {len(verdicts)} trials")
    text = page(verdicts)
    print(text)
    if not first:
        RESULTS.write_text(text, encoding="utf-8")
    return int(any(one.wrong for one in verdicts))


if __name__ == "__main__":
    raise SystemExit(main())
