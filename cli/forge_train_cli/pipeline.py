"""The pipeline in `forge plan`: timeline, stages and schedules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from forge_train.base.format import format_bytes
from forge_train_kit.format import format_column, format_count, format_seconds
from forge_train_tools.planning.drawing import IDLE, KINDS, OVERLAPPED, is_cut, kind_of, rows

from . import screen

if TYPE_CHECKING:
    from forge_train_tools.planning import Pipeline

PIPED = 100
"""Columns of a timeline if stdout is not a terminal."""
STYLES = {
    "F": "white on blue", "B": "white on green", "I": "black on cyan", "W": "black on yellow",
    OVERLAPPED: "white on magenta", IDLE: "dim",
}  # fmt: skip


def show(made: Pipeline) -> None:
    """Print it."""
    line, table = made.timeline, made.timeline.timetable
    screen.heading("Pipeline")
    screen.line(
        f"  {len(table.ranks)} stages, {table.parts} parts, {table.micro_batches} micro-batches: "
        f"ranks wait {made.bubble:.1%} of {_time(made, line.duration)}"
    )
    screen.line("")
    _draw(made)
    _stages(made)
    if made.alternatives:
        _schedules(made)


def as_json(made: Pipeline) -> dict[str, Any]:
    """Plain values; times in the pipeline's unit."""

    def spans(row: Any) -> list[tuple[str, float, float]]:
        return [(str(span.slot), span.start, span.end) for span in row]

    plain = {field.name: getattr(made, field.name) for field in dataclasses.fields(made) if field.name != "timeline"}
    return {
        **plain,
        "stages": [dataclasses.asdict(stage) for stage in made.stages],
        "alternatives": [dataclasses.asdict(one) for one in made.alternatives],
        "duration": made.timeline.duration,
        "timeline": [spans(row) for row in made.timeline.ranks],
        "critical_path": spans(made.timeline.critical_path),
    }


def _draw(made: Pipeline) -> None:
    from rich.text import Text

    out = screen.console()
    width = min(out.width, PIPED if not out.is_terminal else out.width) - 12
    width = max(width, 20)
    for rank, cells in enumerate(rows(made.timeline, width, ascii_only=out.options.ascii_only)):
        text = Text(f"  rank {rank:<3} ")
        for cell in cells:
            text.append(cell.text, f"{STYLES[cell.kind]}{' bold' if cell.later else ''}")
        out.print(text, no_wrap=True, crop=False)
    shown = {kind_of(span.slot) for row in made.timeline.ranks for span in row}
    names = [f"{'X' if kind == OVERLAPPED else kind} {name}" for kind, name in KINDS.items() if kind in shown]
    small = ["small: a later part"] if any(len(stage.parts) > 1 for stage in made.stages) else []
    cut = "; the middle of the step, which repeats, is left out" if is_cut(made.timeline, width) else ""
    screen.line(f"  {', '.join([*names, *small])}; numbers are micro-batches{cut}", "dim")


def _stages(made: Pipeline) -> None:
    screen.line("")
    peaks = format_column([stage.memory.peak for stage in made.stages])
    kept = format_column([int(stage.kept) for stage in made.stages])
    sent = format_column([int(sum(one.bytes for one in stage.communication)) for stage in made.stages])
    lines = [
        (
            f"stage {rank}",
            " ".join(map(str, stage.parts)),
            format_count(stage.parameters),
            "–" if stage.flops_share is None else f"{stage.flops_share:.1%}",
            " + ".join(map(str, stage.in_flight.values())),
            kept[rank],
            peaks[rank],
            sent[rank],
        )
        for rank, stage in enumerate(made.stages)
    ]
    headers = ("", "parts", "parameters", "FLOPs", "in flight", "activations", "peak", "sent")
    screen.table(headers, lines, right=(2, 3, 4, 5, 6, 7))
    for note in dict.fromkeys(note for stage in made.stages for note in stage.memory.notes):
        screen.line(f"  {note}", "yellow")


def _schedules(made: Pipeline) -> None:
    screen.heading("Schedules")
    screen.table(
        ("", "parts", "step", "bubble", "in flight", "activations", ""), _compared(made), right=(1, 2, 3, 4, 5)
    )
    own = len(made.stages[0].parts)
    if any(one.parts not in (own, None) for one in made.alternatives):
        screen.line("  assumes parts of equal cost if they are not the run's own", "dim")


def _compared(made: Pipeline) -> Iterator[tuple[str, ...]]:
    for one in made.alternatives:
        if one.duration is None or one.bubble is None or one.in_flight is None:
            yield one.name, "–", "–", "–", "–", "–", one.problem
            continue
        yield (
            one.name,
            str(one.parts),
            _time(made, one.duration, plain=True),
            f"{one.bubble:.1%}",
            f"{one.in_flight:.3g}",
            format_bytes(one.kept or 0),
            "this run" if one.current else "",
        )


def _time(made: Pipeline, duration: float, *, plain: bool = False) -> str:
    if made.unit == "seconds":
        return format_seconds(duration)
    return f"{duration:.4g}" if plain else f"{duration:.4g} {made.unit}"
