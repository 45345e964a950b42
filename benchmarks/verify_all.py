"""Verifies every composition of the tests' factors against one process, and writes benchmarks/results/verify.md.

    python benchmarks/verify_all.py                    # everything
    python benchmarks/verify_all.py context pipelines  # these sections, of those in SECTIONS
    python benchmarks/verify_all.py tuning             # adapters × tasks × layouts × models
    python benchmarks/verify_all.py tp4 dp3            # some layouts, without writing

The full product on up to 4 processes. On 8, which share the cores, all pairs of the other factors. Context parallelism
in every size and way, with each of what it is combined with alone, and with all together. Pipelines with every schedule
on 2, 3 and 4 ranks likewise, up to 8 processes. One composition of 16 processes with all axes above 1. Sections that
are not asked for stay in the page as they were.
"""

from __future__ import annotations

import math
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: the processes would otherwise take every core each

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "verify.md"
sys.path[:0] = [str(HERE.parent / "tests" / "dist"), str(HERE.parent / "tests")]

import tuning  # noqa: E402
from compositions import LAYOUTS, SEED, STEPS, Composition, covering, product, write  # noqa: E402
from contexts import Context  # noqa: E402
from contexts import product as contexts  # noqa: E402
from family_layouts import Imported  # noqa: E402
from family_layouts import product as families  # noqa: E402
from forge_train.base.errors import ConfigError  # noqa: E402
from forge_train_tools.testing import Pool, PoolError, Verifier  # noqa: E402
from forge_train_tools.verification import Verdict  # noqa: E402
from hf_layouts import Foreign  # noqa: E402
from hf_layouts import product as foreign  # noqa: E402
from pipelines import Everything, Piped  # noqa: E402
from pipelines import product as pipelines  # noqa: E402
from tuning import Tuned  # noqa: E402

IN_FULL = 4
"""Processes up to which the product is taken in full."""
PAGE = """\
# Every composition against one process

Written by `make verify-all`. Each takes {steps} steps in fp32 on one process and on the layout, over gloo, by
`forge verify`'s code: initial weights, batches, replicas and checkpoints must be equal to the bit, losses, held-out
losses and norms within 1e-5, each parameter's gradient at every step, its change and its optimizer state within 1e-4.
Rows show the largest relative differences.
"""
CRASHED = re.compile(r"the process ended with -(6|11)\b")
"""Of a rank: gloo's threads free memory twice about once in some hundred compositions. Such a one runs again."""
COMPARED = ("loss", "grad_norm", "gradients", "later gradients", "updates", "optimizer", "evaluation")


Case = Composition | Context | Piped | Everything | Foreign | Imported | Tuned


@dataclass(frozen=True)
class Section:
    """Of the page: compositions that are verified together."""

    title: str
    text: str
    how: str
    """Heading of the second column."""
    cases: Callable[[], Iterable[Case]]
    write: Callable[[Path], Path] = write
    """Writes what the cases share into a folder; returns the configuration."""
    wide: bool = False
    """A column for each layout, instead of one for each thing that is compared."""


@dataclass(frozen=True)
class Verified:
    """One composition and what became of it."""

    composition: Case
    verdict: Verdict | None
    refusal: str = ""
    """The sentence that refuses it."""

    def worst(self, *names: str) -> float:
        checks = self.verdict.checks if self.verdict else ()
        return max((check.worst for check in checks if check.name in names), default=math.nan)

    @property
    def agrees(self) -> bool:
        """Whether it does what it should, be it to refuse."""
        expected = getattr(self.composition, "refused", "")
        if self.verdict is None:
            return bool(expected) and self.refusal.startswith(expected)
        return not self._wrong(self.verdict) and not expected

    @property
    def failed(self) -> str:
        if self.verdict is None:
            return f"refused: {self.refusal}"
        return ", ".join(self._wrong(self.verdict)) or "expected to be refused"

    def _wrong(self, verdict: Verdict) -> list[str]:
        if isinstance(self.composition, Tuned):
            return self.composition.failed(verdict)
        return sorted(verdict.failed) or (["routing"] if verdict.undecided else [])


def chosen(layouts: Iterable[str]) -> Iterator[Composition]:
    """What is verified of some layouts, small worlds first."""
    for layout in sorted(layouts, key=lambda name: LAYOUTS[name].world):
        yield from product([layout]) if LAYOUTS[layout].world <= IN_FULL else covering(SEED, [layout])


def verified(compositions: list[Case], write: Callable[[Path], Path]) -> Iterator[Verified]:
    """Verify on one pool of processes, one after the other."""
    with tempfile.TemporaryDirectory(prefix="forge-verify-all-") as folder:
        file = write(Path(folder))
        with Pool(Path(folder), size=max(one.world for one in compositions)) as pool:
            verify = Verifier(pool)
            for number, one in enumerate(compositions, start=1):
                began = time.perf_counter()
                try:
                    done = _verified(verify, one, file)
                except PoolError as error:
                    if not CRASHED.search(str(error)):
                        raise
                    print(f"{number:3}/{len(compositions)}  {one}: a rank crashed, once more", flush=True)
                    done = _verified(verify, one, file)
                sign = ("agrees" if done.verdict else "refused") if done.agrees else f"DISAGREES ({done.failed})"
                print(f"{number:3}/{len(compositions)}  {one}: {sign}, {time.perf_counter() - began:.1f} s", flush=True)
                yield done


def _verified(verify: Verifier, one: Case, file: Path) -> Verified:
    try:
        return Verified(one, verify(one.request(file), one.world, steps=STEPS, reference=one.reference(file)))
    except ConfigError as error:
        return Verified(one, None, str(error))


SECTIONS = {
    "layouts": Section(
        "Sharding, tensor parallelism and replicas",
        f"A row stands for accumulation over 1 and 3 micro-batches × tied and untied heads × packed documents and one "
        f"long text; on 8 processes for all pairs of these (seed {SEED}).",
        "activation checkpointing",
        lambda: chosen(LAYOUTS),
    ),
    "context": Section(
        "Sequences cut over ranks",
        "Each row stands for a size and a way alone, with grouped queries, packed documents, tp2, `zero1`, experts "
        "over ranks, `ac`, 3 micro-batches, dp2, and with all that go together.",
        "method",
        contexts,
    ),
    "pipelines": Section(
        "Pipelines",
        "Each row stands for a schedule on some ranks: alone, with tied weights, packed documents, `ac`, tp2, experts, "
        "experts over ranks, and with all of these that go together, on one data rank and with `fsdp2`; and with each "
        "other way to share data.",
        "schedule",
        pipelines,
    ),
    "transformers": Section(
        "Models of transformers",
        "Each row stands for every model type of the tests whose class allows the layout.",
        "rows",
        foreign,
    ),
    "families": Section(
        "Imported models of every family",
        "Each row stands for a random model of every family of `decoder`, with experts or without, saved by "
        "transformers and imported onto the layout.",
        "families",
        families,
    ),
    "tuning": Section(
        "Tuning a model that exists",
        tuning.TEXT,
        "tuned",
        tuning.product,
        tuning.write,
        wide=True,
    ),
    "everything": Section("Every axis above 1", "One composition on 16 processes.", "schedule", lambda: [Everything()]),
}


def figure(worst: float) -> str:
    """Nothing where nothing of that name was compared."""
    return "–" if math.isnan(worst) else f"{worst:.1e}"


def table(found: list[Verified], how: str) -> Iterator[str]:
    """A row for each layout and mode of activation checkpointing, size and way of context parallelism, or pipeline."""
    yield f"| layout | processes | {how} | agree | {' | '.join(COMPARED)} |"
    yield "|---" * (4 + len(COMPARED)) + "|"
    groups: dict[tuple[str, str], list[Verified]] = {}
    for one in found:
        groups.setdefault(row_of(one.composition), []).append(one)
    for (layout, way), group in groups.items():
        agree, worlds = sum(one.agrees for one in group), sorted({one.composition.world for one in group})
        worst = " | ".join(figure(max(one.worst(name) for one in group)) for name in COMPARED)
        yield f"| {layout} | {', '.join(map(str, worlds))} | {way} | {agree} of {len(group)} | {worst} |"


def wide_table(found: list[Verified]) -> Iterator[str]:
    """A row for each adapter, task and model, and a column for each layout; below it, the refusals."""
    cells = {one.composition.row: one for one in found if isinstance(one.composition, Tuned)}
    rows, layouts = (list(dict.fromkeys(row[part] for row in cells)) for part in (0, 1))
    refusals = list(dict.fromkeys(one.refusal for one in found if one.refusal))
    yield f"| | {' | '.join(layouts)} |"
    yield "|---" * (1 + len(layouts)) + "|"
    for row in rows:
        yield f"| {row} | {' | '.join(_cell(cells.get((row, layout)), refusals) for layout in layouts)} |"
    yield ""
    yield from (f"{number}. {sentence}" for number, sentence in enumerate(refusals, start=1))


def _cell(one: Verified | None, refusals: list[str]) -> str:
    if one is None:
        return ""
    if one.refusal:
        return f"[{refusals.index(one.refusal) + 1}]"
    return f"{'' if one.agrees else '✗ '}{figure(one.worst(*tuning.NUMBERS))}"


def row_of(case: Case) -> tuple[str, str]:
    """What the row of a composition is called."""
    if isinstance(case, Context):
        return f"cp{case.size}", case.method
    return (case.layout, case.ac) if isinstance(case, Composition) else case.row


def report(section: Section, found: list[Verified], total: int, seconds: float) -> str:
    """A section of the page, so far."""
    failed = [
        f"- {one.composition}: {one.failed}. {' '.join(one.verdict.advice if one.verdict else ())}"
        for one in found
        if not one.agrees
    ]
    refused = sum(one.verdict is None and one.agrees for one in found)
    cores, system = os.cpu_count(), platform.system()
    date, where = time.strftime("%Y-%m-%d"), f"{cores} cores, {system}, Python {platform.python_version()}"
    cut = "" if len(found) == total else f" Cut short, of {total}."
    agree = f"{len(found) - len(failed) - refused} agree{f', {refused} are refused' * (refused > 0)}"
    count = f"{len(found)} compositions, {agree}; {seconds / 60:.0f} minutes.{cut}"
    lines = [
        f"## {section.title}",
        "",
        f"{date}: {where}, torch {torch.__version__}. {count}",
        "",
        section.text,
        "",
        *(wide_table(found) if section.wide else table(found, section.how)),
        *(["", "Not in agreement:", "", *failed] if failed else []),
    ]
    return "\n".join(lines)


def write_section(name: str, text: str) -> None:
    """Replace one section of the page."""
    page = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else ""
    parts = {part.partition("\n")[0]: f"## {part.rstrip()}" for part in page.split("\n## ")[1:]}
    parts[SECTIONS[name].title] = text
    known = [parts[section.title] for section in SECTIONS.values() if section.title in parts]
    RESULTS.write_text("\n\n".join([PAGE.format(steps=STEPS).rstrip(), *known]) + "\n", encoding="utf-8")


def main() -> int:
    asked = sys.argv[1:]
    plans = [(name, list(SECTIONS[name].cases())) for name in SECTIONS if name in asked or not asked]
    if some := [one for one in asked if one not in SECTIONS]:
        plans.append(("", list(chosen(some))))
    agree = True
    for name, cases in plans:
        began, found = time.perf_counter(), list[Verified]()
        section = SECTIONS[name or "layouts"]
        ordered = cases if section.wide else sorted(cases, key=lambda case: case.world)
        for one in verified(ordered, section.write):
            found.append(one)
            agree &= one.agrees
            text = report(section, found, len(cases), time.perf_counter() - began)
            if name:
                write_section(name, text)
        print(text)
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
