"""Curves as inline SVG: no script, no image file, and colours for light and dark backgrounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from forge_train_kit.format import format_count, format_number

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 28
POINTS = 400
"""The most points of one curve; more are reduced to means of neighbours."""
_GOLDEN = 137.508
"""Degrees between the hues of two runs: neighbours differ, however many runs there are."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """One run's values: `(step, value)`; non-finite values interrupt the line."""

    run: int
    name: str
    points: Sequence[Point]


def colour(run: int) -> str:
    """A run's colour."""
    return f"hsl({(210 + run * _GOLDEN) % 360:.0f} 65% var(--light))"


def drawing(title: str, curves: Sequence[Curve], *, logarithmic: bool = False) -> str:
    """An SVG with all curves, and the names of both axes; empty if there is nothing to draw."""
    drawn = [Curve(one.run, one.name, list(_usable(one.points, logarithmic=logarithmic))) for one in curves]
    finite = [point for one in drawn for point in one.points if math.isfinite(point[1])]
    if not finite:
        return ""
    across = _range([x for x, _ in finite])
    up = _range([y for _, y in finite])
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    parts.append(f'<text class="axis" x="{WIDTH - RIGHT}" y="{HEIGHT - BOTTOM - 6}" text-anchor="end">step</text>')
    parts.append(f'<text class="axis" x="{LEFT + 6}" y="{TOP + 6}">{escape(title)}</text>')
    for value, text in _log_ticks(*up) if logarithmic else ((value, _short(value)) for value in _ticks(*up)):
        y = _place(value, up, HEIGHT - BOTTOM, TOP)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    for value in _ticks(*across):
        x = _place(value, across, LEFT, WIDTH - RIGHT)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(_short(value))}</text>')
    for one in drawn:
        parts.append(f'<g class="curve r{one.run}" stroke="{colour(one.run)}"><title>{escape(one.name)}</title>')
        for piece in _pieces(one.points):
            places = [
                f"{_place(x, across, LEFT, WIDTH - RIGHT):.1f},{_place(y, up, HEIGHT - BOTTOM, TOP):.1f}"
                for x, y in piece
            ]
            if len(places) == 1:  # a line with only one point is invisible
                at, _, height = places[0].partition(",")
                parts.append(f'<circle cx="{at}" cy="{height}" r="2" fill="{colour(one.run)}"/>')
            else:
                parts.append(f'<polyline points="{" ".join(places)}"/>')
        parts.append("</g>")
    return "".join([*parts, "</svg>"])


def _usable(points: Sequence[Point], *, logarithmic: bool) -> Iterator[Point]:
    """At most `POINTS` points, on the axis that is drawn."""
    size = max(math.ceil(len(points) / POINTS), 1)
    for at in range(0, len(points), size):
        group = points[at : at + size]
        value = sum(y for _, y in group) / len(group)
        if logarithmic:
            value = math.log10(value) if 0 < value < math.inf else math.nan
        yield group[-1][0], value


def _pieces(points: Sequence[Point]) -> Iterator[list[Point]]:
    """The runs of consecutive finite values."""
    piece: list[Point] = []
    for point in points:
        if math.isfinite(point[1]):
            piece.append(point)
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _range(values: Sequence[float]) -> Point:
    low, high = min(values), max(values)
    margin = (high - low) * 0.04 or max(abs(high), 1.0) * 0.05
    return low - margin, high + margin


def _place(value: float, span: Point, first: float, last: float) -> float:
    low, high = span
    return first + (value - low) / (high - low) * (last - first)


def _ticks(low: float, high: float) -> Iterator[float]:
    """Four to eight round values."""
    unit = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(unit * factor for factor in (1, 2, 5, 10) if (high - low) / (unit * factor) <= 8)
    for number in range(math.ceil(low / step), math.floor(high / step) + 1):
        yield number * step


def _log_ticks(low: float, high: float) -> Iterator[tuple[float, str]]:
    """Powers of ten, at most eight of them; where there is not one in each direction, round values between them too."""
    first, last = math.ceil(low), math.floor(high)
    factors = (1,) if last - first >= 1 else (1, 2, 5) if high - low > 0.3 else ()
    if not factors:
        yield from ((math.log10(value), format_number(value)) for value in _ticks(10**low, 10**high))
        return
    apart = max(math.ceil((last - first + 1) / 8), 1)
    for power in range(math.floor(low), last + 1):
        for factor in factors:
            place = power + math.log10(factor)
            if low <= place <= high and power % apart == 0:
                yield place, format_number(factor * 10.0**power)


def _short(value: float) -> str:
    return format_count(value) if abs(value) >= 1000 else format_number(value)
