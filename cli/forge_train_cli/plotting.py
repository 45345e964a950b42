"""Curves in a terminal, and as a separate picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from forge_train_kit.format import format_count, format_number

from .curves import Curve, drawing

WIDTH, HEIGHT = 64, 12
"""Columns and lines of a plot in the terminal."""
_BLOCKS = " ▁▂▃▄▅▆▇█"
_STYLE = """
svg{background:#fff;--light:42%}text{fill:#667;font:11px system-ui,sans-serif}
.grid{stroke:#d8dce2}.curve{fill:none;stroke-width:1.6}
@media(prefers-color-scheme:dark){svg{background:#14171a;--light:66%}text{fill:#98a1ab}.grid{stroke:#343a41}}
"""


def in_terminal(values: Sequence[float]) -> Iterator[str]:
    """Lines of a plot that begins at 0, with its highest value and its last step at the axes."""
    top = max(values) or 1.0
    wide = min(WIDTH, len(values))
    columns = [values[index * (len(values) - 1) // max(wide - 1, 1)] for index in range(wide)]
    labels = {HEIGHT - 1: format_number(top), 0: "0"}
    for line in reversed(range(HEIGHT)):
        eighths = (round(value / top * HEIGHT * 8) - line * 8 for value in columns)
        yield f"{labels.get(line, ''):>6} ▕" + "".join(_BLOCKS[min(max(one, 0), 8)] for one in eighths)
    last = f"{format_count(len(values))} steps"
    yield f"{'':>8}1{last:>{max(len(columns) - 1, len(last) + 1)}}"


def as_svg(title: str, values: Sequence[float]) -> str:
    """A picture of values by step."""
    return picture(title, [Curve(0, title, [(float(step), value) for step, value in enumerate(values, 1)])])


def picture(title: str, curves: Sequence[Curve]) -> str:
    """A picture of curves, as a separate file."""
    return (
        drawing(title, curves)
        .replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        .replace(">", f"><style>{_STYLE}</style>", 1)
    )
