"""What became of mutants, as a page."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mutants import Judged

OUTCOMES = ("killed", "timed out", "survived", "equivalent")
PAGE = """\
# Mutants

Written by `make mutants` on {date}: {where}; {minutes} minutes.
Seed {seed}: {drawn} of {all} single-line mutants, of which the tests kill {share} (at least {bar} % are asked for).
{kept} of them were killed in an earlier run, and their lines have not changed since.

{table}

A mutant is one small fault in a line: another comparison, operator or constant, a condition that always or never holds,
a call left out, arguments exchanged. It is killed if a test fails or does not end. A mutant that changes nothing that
anybody could see is equivalent, and does not count.
"""


def share(judged: Sequence[Judged]) -> float:
    """Of those that count, how many were killed, in percent."""
    counted = [one for one in judged if one.outcome != "equivalent"]
    return 100 * sum(one.outcome != "survived" for one in counted) / (len(counted) or 1)


def table(judged: Sequence[Judged]) -> Iterator[str]:
    yield "| code | mutants | killed | timed out | survived | equivalent | killed of those that count |"
    yield "|---|---|---|---|---|---|---|"
    for name in [*dict.fromkeys(one.area.name for one in judged), "**all**"]:
        mine = [one for one in judged if name in (one.area.name, "**all**")]
        counts = [sum(one.outcome == outcome for one in mine) for outcome in OUTCOMES]
        yield f"| {name} | {len(mine)} | {' | '.join(map(str, counts))} | {share(mine):.0f} % |"


def page(judged: Sequence[Judged], kept: int, all_: int, seed: int, bar: float, seconds: float) -> str:
    """The page of results."""
    text = PAGE.format(
        date=time.strftime("%Y-%m-%d"),
        where=f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}",
        minutes=f"{seconds / 60:.0f}",
        seed=seed,
        drawn=len(judged),
        kept=kept or "None",
        all=all_,
        share=f"{share(judged):.0f} %",
        bar=f"{bar:g}",
        table="\n".join(table(judged)),
    )
    for outcome, title in (("survived", "Survivors"), ("equivalent", "Equivalent")):
        some = [one for one in judged if one.outcome == outcome]
        text += f"\n## {title}\n" if some else ""
        for one in some:
            why = f": {one.by}" if outcome == "equivalent" else ""
            change = f"```diff\n- {one.mutant.was}\n+ {one.mutant.now}\n```"
            text += f"\n`{one.mutant.key}` {one.mutant.file}{why}\n\n{change}\n"
    return text
