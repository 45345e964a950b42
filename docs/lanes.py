"""Drawings of ranks as lanes, with time from left to right; `drawings.py` has the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LEFT, TOP, LANE, GAP = 64, 12, 46, 10
STYLE = """
svg{background:#fff}text{fill:#223;font:12px system-ui,sans-serif;text-anchor:middle}.name{text-anchor:end}
.lane{fill:#eef0f3}.frame{fill:none;stroke:#889}.have{fill:#8fb8e8}.work{fill:#a5d6b7}.talk{fill:#f3c77f}
.idle{fill:#d8dce2}
@media(prefers-color-scheme:dark){svg{background:#14171a}text{fill:#e3e6ea}.lane{fill:#22272c}.have{fill:#2b5b94}
.work{fill:#27684a}.talk{fill:#7d5410}.idle{fill:#343a41}}
"""


@dataclass(frozen=True)
class Column:
    """A stretch of time.

    Args:
        width: in pixels.
        lanes: text and class of each rank's box; an empty text leaves the lane free.
        across: text of a collective of all ranks, instead of boxes.
        filled: for each rank, parts of its box that are held, as fractions from and up to.
    """

    width: int
    lanes: Sequence[tuple[str, str]] = ()
    across: str = ""
    filled: Sequence[Sequence[tuple[float, float]]] = ()


def holds(text: str, *filled: Sequence[tuple[float, float]], width: int = 96) -> Column:
    """Shares of something that ranks hold."""
    return Column(width, [(text, "frame")] * len(filled), filled=filled)


def works(*texts: str, width: int = 110) -> Column:
    """Work of each rank."""
    return Column(width, [(text, "work") for text in texts])


def across(text: str, width: int = 104) -> Column:
    """A collective of all ranks."""
    return Column(width, across=text)


def drawing(title: str, ranks: int, columns: Sequence[Column]) -> str:
    """The picture as SVG."""
    height = TOP * 2 + ranks * LANE + (ranks - 1) * GAP
    parts, x = [], LEFT
    for column in columns:
        parts.append(_column(column, x, ranks, height))
        x += column.width + GAP
    lanes = "".join(
        f'<text class="name" x="{LEFT - 8}" y="{_middle(rank)}">rank {rank}</text>'
        f'<rect class="lane" x="{LEFT}" y="{_top(rank)}" width="{x - GAP - LEFT}" height="{LANE}"/>'
        for rank in range(ranks)
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {x} {height}" role="img" aria-label="{escape(title)}">'
    )
    return f"{head}<style>{STYLE}</style><title>{escape(title)}</title>{lanes}{''.join(parts)}</svg>\n"


def _top(rank: int) -> int:
    return TOP + rank * (LANE + GAP)


def _middle(rank: int) -> int:
    return _top(rank) + LANE // 2 + 4


def _column(column: Column, x: int, ranks: int, height: int) -> str:
    width = column.width
    if column.across:
        box = f'<rect class="talk" x="{x}" y="{TOP - 4}" width="{width}" height="{height - 2 * TOP + 8}" rx="4"/>'
        return box + _text(column.across, x + width / 2, height / 2)
    parts = []
    for rank, (text, kind) in enumerate(column.lanes):
        if not text:
            continue
        for begin, end in column.filled[rank] if column.filled else ():
            parts.append(
                f'<rect class="have" x="{x + begin * width:g}" y="{_top(rank) + 4}" '
                f'width="{(end - begin) * width:g}" height="{LANE - 8}"/>'
            )
        parts.append(f'<rect class="{kind}" x="{x}" y="{_top(rank) + 4}" width="{width}" height="{LANE - 8}"/>')
        parts.append(_text(text, x + width / 2, _middle(rank) - 4))
    return "".join(parts)


def _text(text: str, x: float, y: float) -> str:
    lines = text.split("\n")
    start = y + 4 - (len(lines) - 1) * 7.5
    return "".join(f'<text x="{x:g}" y="{start + 15 * at:g}">{escape(line)}</text>' for at, line in enumerate(lines))
