"""Requirements of schedules on ranks, parts and micro-batches. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forge_train import Problem
from forge_train.base.errors import nearest

if TYPE_CHECKING:
    from forge_train.config import Config as RunConfig

    from ..pp import PipelineParallel


@dataclass(frozen=True)
class Rule:
    """Requirements of one of torch's schedules."""

    torch: str
    """The name of its class; empty where the rows are made here."""
    parts: tuple[int, int]
    """Of a rank: what it takes by default, and the most; 0 is any number."""
    needs: str
    """Required number of micro-batches: `any`, `ranks` (at least as many as ranks), `rounds` (a multiple of the rounds
    of as many as ranks), `parts` (at least as many as parts)."""
    split: bool = False
    """True if it separates input gradients from weight gradients."""

    def allows(self, parts: int) -> bool:
        """Return True if a rank may have this many parts."""
        return not self.parts[1] or parts == self.parts[1]

    def least(self, ranks: int, parts: int) -> int:
        """The fewest micro-batches of a step."""
        return {"ranks": ranks, "parts": ranks * parts}.get(self.needs, 1)

    def problem(self, ranks: int, parts: int, micro_batches: int) -> str:
        """Why it can't be followed with that many micro-batches; empty if it can."""
        if not self.allows(parts):
            return f"has {self.parts[1]} part{'s' * (self.parts[1] > 1)} on each rank, and pp.parts is {parts}"
        least = self.least(ranks, parts)
        if micro_batches < least:
            return f"needs {least} micro-batches in a step or more, and there {_are(micro_batches)}"
        if self.needs == "rounds" and micro_batches % (rounds := max(1, micro_batches // ranks)):
            return (
                f"takes micro-batches in rounds of about {ranks}, of equal size: {micro_batches} do not divide into "
                f"{rounds}; {rounds * ranks} and {rounds * ranks + rounds} do"
            )
        return ""


def _are(count: int) -> str:
    return f"{'is' if count == 1 else 'are'} {count}"


RULES = {
    "gpipe": Rule("", (1, 1), "any"),
    "1f1b": Rule("", (1, 1), "ranks"),
    "looped_bfs": Rule("ScheduleLoopedBFS", (2, 0), "any"),
    "interleaved_1f1b": Rule("ScheduleInterleaved1F1B", (2, 0), "rounds"),
    "interleaved_zero_bubble": Rule("ScheduleInterleavedZeroBubble", (2, 0), "rounds", split=True),
    "zbv": Rule("ScheduleZBVZeroBubble", (2, 2), "any", split=True),
    "dualpipe_v": Rule("ScheduleDualPipeV", (2, 2), "parts", split=True),
}
"""arXiv:1811.06965, 2104.04473, 2211.05953, 2104.04473, 2401.10241, 2401.10241, 2412.19437."""


GROUP = "forge_train.pipeline_schedules"


def added() -> dict[str, str]:
    """Schedules of other distributions: name → `module:function`."""
    return {point.name: point.value for point in importlib.metadata.entry_points(group=GROUP)}


def unknown(name: str) -> str:
    """Why a schedule is impossible; empty if it is possible."""
    if name in RULES or name == "csv" or ":" in name or name in added():
        return ""
    known = sorted({*RULES, "csv", *added()})
    return f"there is no {name!r}.{nearest(name, known)} There are {', '.join(known)}."


def whole_backward() -> str:
    """Schedules that compute both gradients at once."""
    return ", ".join(name for name, rule in RULES.items() if not rule.split)


def compiled(schedule: str) -> str:
    """Why a schedule can't have compiled units."""
    return (
        f"{schedule} takes the gradients of inputs and weights apart, and a compiled unit brings both at once; leave "
        f"compile out, or take a schedule that does not split: {whole_backward()}."
    )


def advice(config: PipelineParallel.Config, ranks: int, share: int, micro_batches: int) -> str:
    """Suggest how to get as many micro-batches as the schedule needs; empty if it has enough.

    Args:
        config: names the schedule.
        ranks: of the pipeline.
        share: sequences of a step on a data-parallel rank.
        micro_batches: their present number.
    """
    rule = RULES.get(config.schedule)
    least = rule.least(ranks, parts_of(config)) if rule else 0
    if micro_batches >= least:
        return ""
    if share < least:
        return f"take larger batches, of {least} sequences or more on each data-parallel rank"
    size = max(size for size in range(1, share // least + 1) if share % size == 0)
    return f"set train.micro_batch to {size}, or take larger batches"


def parts_of(config: PipelineParallel.Config) -> int:
    """Parts on each rank."""
    if config.parts or config.schedule not in RULES:
        return config.parts or 1
    return RULES[config.schedule].parts[0]


def check(config: PipelineParallel.Config, run: RunConfig) -> Iterator[Problem]:
    """Report values that do not fit together."""
    ranks, parts = run.parallel.pp, parts_of(config)
    if (config.schedule == "csv") != bool(config.table):
        yield Problem("pp.table", 'is read by schedule = "csv", and only by that; set both or neither.')
    if config.cuts and ranks > 1 and config.schedule in RULES and len(config.cuts) != ranks * parts - 1:
        yield Problem(
            "pp.cuts",
            f"they make {len(config.cuts) + 1} parts, and there are {ranks * parts}: {parts} on each of {ranks} ranks.",
        )  # of another schedule, its timetable tells, once it is made
    if config.table and not Path(config.table).is_file():
        yield Problem("pp.table", f"no such file: {config.table}.")
    if problem := unknown(config.schedule):
        yield Problem("pp.schedule", problem)
    rule = RULES.get(config.schedule)
    if rule is not None and rule.split and ranks > 1:
        others = run.everything()
        if "compile" in others:
            yield Problem("pp.schedule", compiled(config.schedule))
        elif "ac" in others and others["ac"].mode == "selective":
            yield Problem(
                "pp.schedule",
                f"{config.schedule} runs backward several times through a unit, and selective recomputation keeps what "
                f"it saves for one; set ac.mode to full, or take a schedule that does not split: {whole_backward()}.",
            )
    data_ranks = run.parallel.dp_replicate * run.parallel.dp_shard
    if rule is None or ranks == 1 or data_ranks < 1:  # -1: the number of processes decides, and is not known here
        return
    train = run.train
    each = train.micro_batch or max(1, math.gcd(*train.batches) // data_ranks)  # 0 stands for a rank's share
    for batch in train.batches:
        count = batch // (each * data_ranks)
        if count and (problem := rule.problem(ranks, parts, count)):
            way_out = advice(config, ranks, batch // data_ranks, count)
            yield Problem(
                "pp.schedule",
                f"{config.schedule} {problem} (a global batch of {batch} is {count} × train.micro_batch = "
                f"{each} × {data_ranks} data-parallel ranks){way_out and ': '}{way_out}.",
            )
            return
