"""Verifies every composition of the tests' factors against one process, and writes benchmarks/results/verify.md.

    python benchmarks/verify_all.py            # everything
    python benchmarks/verify_all.py tp4 dp3    # some layouts, without writing
    python benchmarks/verify_all.py context    # context parallelism, without writing
    python benchmarks/verify_all.py pipelines  # pipelines, without writing

The full product on up to 4 processes. On 8, which share the cores, all pairs of the other factors. Context parallelism
in every size and way, with each of what it is combined with alone, and with all together. Pipelines with every schedule
on 2, 3 and 4 ranks likewise, up to 8 processes, and one of 16 with all axes above 1.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: the processes would otherwise take every core each

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "verify.md"
sys.path.insert(0, str(HERE.parent / "tests" / "dist"))

from compositions import LAYOUTS, SEED, STEPS, Composition, covering, product, write  # noqa: E402
from contexts import Context  # noqa: E402
from contexts import product as contexts  # noqa: E402
from forge_train.testing import Pool, Verifier  # noqa: E402
from forge_train_tools.verification import Verdict  # noqa: E402
from pipelines import Everything, Piped  # noqa: E402
from pipelines import product as pipelines  # noqa: E402

IN_FULL = 4
"""Processes up to which the product is taken in full."""
PAGE = """\
# Every composition against one process

Written by `make verify-all` on {date}: {where}.
{count}, {agree} agree; {minutes} minutes.

Each takes {steps} steps in fp32 on one process and on the layout, over gloo, by `forge verify`'s code: initial weights,
batches, replicas and checkpoints must be equal to the bit, losses, held-out losses and norms within 1e-5, each
parameter's gradient at every step, its change and its optimizer state within 1e-4. A row stands
for accumulation over 1 and 3 micro-batches × tied and untied heads × packed documents and one long text, and shows the
largest relative differences; on 8 processes it stands for all pairs of these (seed {seed}).

{table}

## Sequences cut over ranks

Each row stands for a size and a way alone, with grouped queries, packed documents, tp2, `zero1`, experts over ranks,
`ac`, 3 micro-batches, dp2, and with all that go together.

{cut}

## Pipelines

Each row stands for a schedule on some ranks: alone, with tied weights, packed documents, `ac`, tp2, experts, experts
over ranks, and with all of these that go together, on one data rank and with `fsdp2`; and with each other way to share
data.

{piped}
"""
COMPARED = ("loss", "grad_norm", "gradients", "later gradients", "updates", "optimizer", "evaluation")


Case = Composition | Context | Piped | Everything


@dataclass(frozen=True)
class Verified:
    """One composition and what became of it."""

    composition: Case
    verdict: Verdict

    def worst(self, name: str) -> float:
        return next((check.worst for check in self.verdict.checks if check.name == name), math.nan)

    @property
    def failed(self) -> str:
        return ", ".join(check.name for check in self.verdict.checks if not check.ok)


def chosen(layouts: Iterable[str]) -> Iterator[Composition]:
    """What is verified of some layouts, small worlds first."""
    for layout in sorted(layouts, key=lambda name: LAYOUTS[name].world):
        yield from product([layout]) if LAYOUTS[layout].world <= IN_FULL else covering(SEED, [layout])


def verified(compositions: list[Case]) -> Iterator[Verified]:
    """Verify on one pool of processes, one after the other."""
    with tempfile.TemporaryDirectory(prefix="forge-verify-all-") as folder:
        file = write(Path(folder))
        with Pool(Path(folder)) as pool:
            verify = Verifier(pool)
            for number, one in enumerate(compositions, start=1):
                began = time.perf_counter()
                done = Verified(one, verify(one.request(file), one.world, steps=STEPS, reference=one.reference(file)))
                sign = "agrees" if done.verdict.agree else f"DISAGREES ({done.failed})"
                print(f"{number:3}/{len(compositions)}  {one}: {sign}, {time.perf_counter() - began:.1f} s", flush=True)
                yield done


def table(found: list[Verified]) -> Iterator[str]:
    """A row for each layout and mode of activation checkpointing, or of context parallelism for each size and way."""
    kinds = {Context: "method", Piped: "schedule"}
    how = kinds.get(type(found[0].composition), "activation checkpointing") if found else ""
    yield f"| layout | processes | {how} | agree | {' | '.join(COMPARED)} |"
    yield "|---" * (4 + len(COMPARED)) + "|"
    groups: dict[tuple[str, str], list[Verified]] = {}
    for one in found:
        case = one.composition
        row = (
            case.row
            if isinstance(case, (Piped, Everything))
            else ((f"cp{case.size}", case.method) if isinstance(case, Context) else (case.layout, case.ac))
        )
        groups.setdefault(row, []).append(one)
    for (layout, ac), group in groups.items():
        agree, worlds = sum(one.verdict.agree for one in group), sorted({one.composition.world for one in group})
        worst = " | ".join(f"{max(one.worst(name) for one in group):.1e}" for name in COMPARED)
        yield f"| {layout} | {', '.join(map(str, worlds))} | {ac} | {agree} of {len(group)} | {worst} |"


def report(found: list[Verified], total: int, seconds: float) -> str:
    """The page of results, so far."""
    failed = [f"- {one.composition}: {one.failed}. {' '.join(one.verdict.advice)}" for one in found if one.failed]
    where = (
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    page = PAGE.format(
        date=time.strftime("%Y-%m-%d"),
        where=where,
        count=f"{len(found)} compositions"
        if len(found) == total
        else f"Cut short: {len(found)} of {total} compositions",
        agree=len(found) - len(failed),
        minutes=f"{seconds / 60:.0f}",
        steps=STEPS,
        seed=SEED,
        table="\n".join(table([one for one in found if isinstance(one.composition, Composition)])),
        cut="\n".join(table([one for one in found if isinstance(one.composition, Context)])),
        piped="\n".join(table([one for one in found if isinstance(one.composition, (Piped, Everything))])),
    )
    return page + "".join(f"{line}\n" for line in (["", "## What does not agree", "", *failed] if failed else []))


def main() -> int:
    began = time.perf_counter()
    asked = sys.argv[1:]
    layouts = [one for one in asked if one not in ("context", "pipelines")] if asked else list(LAYOUTS)
    cut = contexts() if not asked or "context" in asked else ()
    piped = [*pipelines(), Everything()] if not asked or "pipelines" in asked else ()
    compositions: list[Case] = [*chosen(layouts), *cut, *piped]
    found: list[Verified] = []
    for one in verified(compositions):
        found.append(one)
        text = report(found, len(compositions), time.perf_counter() - began)
        if not sys.argv[1:]:
            RESULTS.write_text(text, encoding="utf-8")
    print(text)
    return 0 if all(one.verdict.agree for one in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
