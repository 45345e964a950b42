"""A pipeline's timeline, drawn: as rows of characters, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from html import escape
from math import ceil
from statistics import median_high
from typing import NamedTuple

from forge_train_kit.pipeline.timetable import Action, Overlap, Work, actions_of

from .timeline import Span, Timeline

IDLE, OVERLAPPED = "idle", "F+B"
KINDS = {
    Work.FORWARD.value: "forward",
    Work.BACKWARD.value: "backward",
    Work.INPUT_GRADIENT.value: "input gradient",
    Work.WEIGHT_GRADIENT.value: "weight gradient",
    OVERLAPPED: "forward and backward overlapped",
}
"""Drawn action → its meaning."""
LONG, GAP = 32, 3
"""Micro-batches from which on a row that has no room for them shows the beginning and the end; columns between."""
WIDEST = 4
"""Columns of the shortest action at most."""
LEFT, TOP, ROW, GAP, BETWEEN, WIDE, DIGIT = 58, 8, 22, 5, 14, 960, 7
"""Pixels of the picture; BETWEEN is what separates its lines, DIGIT as wide as a character of a number."""
INNER = WIDE - LEFT - 8
LINES = 24
"""The most lines of a picture."""
_STYLE = """
svg{background:#fff}text{fill:#445;font:11px system-ui,sans-serif}.lane{fill:#eef0f3}.on{fill:#fff;font-size:10px}
.F{fill:#3b78c9}.B{fill:#2f9a5d}.I{fill:#39a9a0}.W{fill:#c9902b}.O{fill:#8a5bc4}.later{opacity:.72}
@media(prefers-color-scheme:dark){svg{background:#14171a}text{fill:#98a1ab}.lane{fill:#22272c}}
"""


class Cell(NamedTuple):
    """Neighbouring characters of one action, or of none."""

    text: str
    kind: str
    """A key of `KINDS`, or `IDLE`."""
    later: bool
    """True if it belongs to another part than the rank's first."""


def kind_of(slot: Action | Overlap) -> str:
    """The key in `KINDS`."""
    return slot.work.value if isinstance(slot, Action) else OVERLAPPED


def rows(timeline: Timeline, width: int, *, ascii_only: bool = False) -> Iterator[list[Cell]]:
    """One row of `width` characters at most for each rank, time from left to right.

    An action has its letter, small for a part behind the rank's first one, and where all of a row have room for it the
    number of its micro-batch. Where several actions share a character, the longest has it. A long step whose actions
    would all share characters is shown by its beginning and its end.
    """
    line, rest = ("-", ".") if ascii_only else ("─", "·")
    windows = _windows(timeline, width)
    for rank, row in enumerate(timeline.ranks):
        first = timeline.timetable.parts_of(rank)[0]
        shortest = min(span.end - span.start for span in row)
        cells: list[Cell] = []
        for begin, length, columns in windows:
            if cells:
                cells.append(Cell(("~" if ascii_only else "⋯") * GAP, IDLE, later=False))
            owners = _owners(_within(row, begin, length), columns, length)
            cells += _cells(owners, first, (line, rest), numbered=shortest * columns / length >= 2)
        yield cells


def is_cut(timeline: Timeline, width: int) -> bool:
    """Return True if rows of this width leave out the middle of the step."""
    return len(_windows(timeline, width)) > 1


def _windows(timeline: Timeline, width: int) -> list[tuple[float, float, int]]:
    """Begin, duration and columns of each stretch that is drawn."""
    shortest = min(span.end - span.start for row in timeline.ranks for span in row)
    if timeline.timetable.micro_batches <= LONG or timeline.duration <= shortest * width or shortest <= 0:
        return [(0.0, timeline.duration, _columns(timeline, width))]
    each = len(str(timeline.timetable.micro_batches - 1)) + 1  # a letter and the number
    columns = (width - GAP) // 2
    length = shortest * columns / each
    return [(0.0, length, columns), (timeline.duration - length, length, columns)]


def _within(row: tuple[Span, ...], begin: float, length: float) -> tuple[Span, ...]:
    """Return the spans in a stretch, relative to its start."""
    return tuple(
        replace(span, start=max(span.start - begin, 0.0), end=min(span.end - begin, length))
        for span in row
        if span.end > begin and span.start < begin + length
    )


def _cells(owners: list[Span | None], first: int, fill: tuple[str, str], *, numbered: bool) -> Iterator[Cell]:
    at = 0
    while at < len(owners):
        span = owners[at]
        end = next((later for later in range(at, len(owners)) if owners[later] is not span), len(owners))
        yield _cell(span, end - at, first, fill, numbered=numbered)
        at = end


def _columns(timeline: Timeline, width: int) -> int:
    """As many characters as make the shortest action whole ones, where there is room."""
    shortest = min(span.end - span.start for row in timeline.ranks for span in row)
    units = timeline.duration / shortest if shortest > 0 else width + 1.0
    return round(units * min(width / units // 1, WIDEST)) if units <= width else width


def _owners(row: tuple[Span, ...], columns: int, duration: float) -> list[Span | None]:
    share: list[dict[Span, float]] = [{} for _ in range(columns)]
    scale = columns / duration
    for span in row:
        start, end = span.start * scale, span.end * scale
        for at in range(int(start), min(columns, int(end) + 1)):
            if (part := min(end, at + 1) - max(start, at)) > 0:
                share[at][span] = part
    found: list[Span | None] = []
    for spans in share:
        longest = max(spans, key=lambda span: spans[span], default=None)
        found.append(longest if longest is not None and sum(spans.values()) >= 0.5 else None)
    return found


def _cell(span: Span | None, width: int, first: int, fill: tuple[str, str], *, numbered: bool) -> Cell:
    line, rest = fill
    if span is None:
        return Cell(rest * width, IDLE, later=False)
    one = actions_of(span.slot)[0]
    kind = kind_of(span.slot)
    later = isinstance(span.slot, Action) and one.part != first
    letter = "X" if kind == OVERLAPPED else kind
    letter = letter.lower() if later else letter
    text = f"{letter}{one.micro_batch}"
    return Cell((text if numbered and len(text) <= width else letter).ljust(width, line), kind, later)


def svg(timeline: Timeline, title: str) -> str:
    """A picture: a lane for each rank, an action's number is its micro-batch's. A long step goes on below, in lines
    like those of a text, so that numbers have room."""
    count, lines = len(timeline.ranks), _lines(timeline)
    block = count * (ROW + GAP)
    end = TOP + lines * block + (lines - 1) * BETWEEN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {end + 26}" role="img" '
        f'aria-label="{escape(title)}"><style>{_STYLE}</style><title>{escape(title)}</title>'
    )
    parts, length = [head], timeline.duration / lines
    for line in range(lines):
        for rank, row in enumerate(timeline.ranks):
            y = TOP + line * (block + BETWEEN) + rank * (ROW + GAP)
            first = timeline.timetable.parts_of(rank)[0]
            parts.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">rank {rank}</text>')
            parts.append(f'<rect class="lane" x="{LEFT}" y="{y}" width="{INNER}" height="{ROW}"/>')
            parts += _boxes(row, line * length, length, y, first)
    parts.append(_legend(timeline, end + 8))
    return "".join([*parts, "</svg>\n"])


def _lines(timeline: Timeline) -> int:
    """Return how many lines fit the number of the usual short action: half of all actions take as long or longer."""
    spans = [span for row in timeline.ranks for span in row if span.end > span.start]
    number = len(str(timeline.timetable.micro_batches - 1)) + 1  # of the last one, and a space or a dot
    needs = [(number * len(actions_of(span.slot)) - 1) / (span.end - span.start) for span in spans]
    return min(max(ceil(DIGIT * median_high(needs) * timeline.duration / INNER), 1), LINES) if needs else 1


def _boxes(row: tuple[Span, ...], begin: float, length: float, y: int, first: int) -> Iterator[str]:
    """Draw one line with this start and length; an action across its end continues in the next."""
    scale = INNER / length
    for span in row:
        start, end = max(span.start - begin, 0.0), min(span.end - begin, length)
        if end > start or 0 <= span.start - begin == span.end - begin < length:
            yield _box(span, LEFT + start * scale, y, (end - start) * scale, first)


def _numbers(span: Span) -> str:
    return "·".join(str(one.micro_batch) for one in actions_of(span.slot))


def _box(span: Span, x: float, y: int, width: float, first: int) -> str:
    kind = kind_of(span.slot)
    numbers = _numbers(span)
    later = " later" if actions_of(span.slot)[0].part != first else ""
    box = (
        f'<rect class="{"O" if kind == OVERLAPPED else kind}{later}" x="{x:.1f}" y="{y}" '
        f'width="{max(width - 0.6, 0.4):.1f}" height="{ROW}"><title>{escape(str(span.slot))}</title></rect>'
    )
    if width < DIGIT * len(numbers):
        return box
    return box + f'<text class="on" x="{x + width / 2:.1f}" y="{y + 15}" text-anchor="middle">{numbers}</text>'


def _legend(timeline: Timeline, y: int) -> str:
    shown = {kind_of(span.slot) for row in timeline.ranks for span in row}
    parts, x = [], LEFT
    for kind, name in KINDS.items():
        if kind in shown:
            parts.append(
                f'<rect class="{"O" if kind == OVERLAPPED else kind}" x="{x}" y="{y}" width="10" height="10"/>'
            )
            parts.append(f'<text x="{x + 15}" y="{y + 9}">{name}</text>')
            x += 34 + 6 * len(name)
    parts.append(f'<text x="{WIDE - 8}" y="{y + 9}" text-anchor="end">bubble {timeline.bubble:.1%}</text>')
    return "".join(parts)
