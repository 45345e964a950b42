"""How commands write tables: as wide as the terminal, and never cut where there is none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forge_train.ground.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PIPED = 400
"""Columns where stdout is no terminal: nothing should be cut in a file."""
GENERATOR = '<meta name="generator" content="forge-train">'
"""In the head of every page, which may be written anew for it."""


def console() -> Console:
    """stdout."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPED)


def heading(text: str) -> None:
    from rich.text import Text

    console().print(Text.assemble("\n", (text, "bold")))


def table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[int] = (), indent: int = 2
) -> None:
    """Print rows in columns.

    Args:
        headers: above the columns; none at all leaves the line out.
        rows: cells; rich's own renderables, or anything's text, taken literally.
        right: columns that are aligned on the right.
        indent: columns to its left.
    """
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    rows = [list(row) for row in rows]
    # rich (14) measures a column without a character as 0 wide, draws it 1 wide, and squeezes the others for that.
    filled = [index for index, name in enumerate(headers) if name or any(str(row[index]) for row in rows)]
    made = Table(box=None, show_header=any(headers), header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for index in filled:
        # Names and keys, which come first, stay whole: they are there to be copied.
        made.add_column(
            headers[index], justify="right" if index in right else "left", overflow="fold", no_wrap=index == 0
        )

    def cell(value: object) -> RenderableType:
        return value if isinstance(value, Text) else Text(str(value))

    for row in rows:
        made.add_row(*(cell(row[index]) for index in filled))
    screen = console()
    with screen.capture() as captured:
        screen.print(Padding(made, (0, 0, 0, indent), expand=False))
    for row in captured.get().splitlines():
        click.echo(row.rstrip())  # rich fills every line up


def visible(text: str, kept: str = "\n\t") -> str:
    """Characters that would move the cursor, or more, as their escapes; but for those that are kept."""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def line(text: str, style: str = "") -> None:
    """Print a text literally: brackets are no markup."""
    from rich.text import Text

    console().print(Text(text, style=style), soft_wrap=not sys.stdout.isatty())


def _is_svg(begins: bytes) -> bool:
    return begins.startswith((b"<svg", b"<?xml", b"<!")) and b"<svg" in begins


def check_own(path: Path, is_own: Callable[[bytes], bool], what: str) -> None:
    """Whether a file may be written over: there is none, or an empty one, or one of the same kind.

    Args:
        path: the file.
        is_own: whether a file is of that kind, by how it begins.
        what: the kind, for the message.

    Raises:
        ConfigError: if something else is there.
    """
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            begins = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror or error}.") from error
    if begins and not is_own(begins):
        raise ConfigError(f"{path}: is there already, and is no {what}: choose another name, or remove it.")


def picture(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """The callback of an option that names an SVG file: it overwrites nothing but a picture."""
    if value:
        check_own(Path(value), _is_svg, "SVG")
    return value


def page(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """The callback of an option that names an HTML file: it overwrites nothing but a page with `GENERATOR`."""
    if value:
        check_own(Path(value), lambda begins: GENERATOR.encode() in begins, "page written by forge")
    return value


def write(path: Path, text: str) -> None:
    """Write a file that a command was asked for.

    Raises:
        ConfigError: if it can't be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error.strerror or error}.") from error
