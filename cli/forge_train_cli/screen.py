"""Tables of commands: as wide as the terminal, and uncut without a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from forge_train.base.errors import ConfigError
from forge_train.base.files import FULL, refused
from forge_train.base.strict_json import dumps

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

PIPED = 400
"""Columns if stdout is not a terminal: nothing should be cut in a file."""
WIDEST = 48
"""The longest cell that a column is as wide as, if stdout is not a terminal."""
NARROWEST = 24
"""Columns that a text beside a name needs; with less, it stands below."""
FOLDED = 16
"""Columns that a folded cell of a table needs; with less, the cells of a row stand below each other."""
GENERATOR = '<meta name="generator" content="forge-train">'
"""Marks every page in its head; pages with this mark may be overwritten."""


def console() -> Console:
    """stdout."""
    from rich.console import Console

    return Console(highlight=False, width=width(), height=25)  # a dumb terminal is 80 wide otherwise


def width() -> int:
    """The terminal's columns."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED


def heading(text: str) -> None:
    click.echo(f"\n{click.style(text, bold=True)}")


def listing(rows: Sequence[tuple[str, str]], wide: int) -> None:
    """Print names, and beside each of them a text, folded. It does without rich, which takes long to import.

    Args:
        rows: a name and its text.
        wide: columns for a name.
    """
    beside = width() - wide - 2
    start = wide + 2 if beside >= NARROWEST else 4
    for name, text in rows:
        lines = textwrap.wrap(text, width() - start) or [""]
        if beside >= NARROWEST:
            click.echo(f"{click.style(name.ljust(wide), bold=True)}  {lines.pop(0)}")
        else:
            click.echo(click.style(name, bold=True))
        for line in lines:
            click.echo(" " * start + line)


def table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[int] = (), indent: int = 2
) -> None:
    """Print rows in columns.

    Args:
        headers: shown above the columns; leave them empty to omit the line.
        rows: cells; rich's own renderables, or any object, whose text is taken literally.
        right: columns that are right-aligned.
        indent: columns to the left of the table.
    """
    from rich.text import Text

    rows = [list(row) for row in rows]
    # rich (14) measures a column without characters as 0 wide, but draws it 1 wide and squeezes the others for it.
    filled = [index for index, name in enumerate(headers) if name or any(str(row[index]) for row in rows)]
    if not sys.stdout.isatty():
        _unfolded([headers, *rows] if any(headers) else rows, filled, right, indent)
        return
    screen = console()
    texts = [[cell if isinstance(cell, Text) else Text(str(cell)) for cell in row] for row in rows]
    whole = _whole_columns(headers, texts, filled, screen.width - indent)
    with screen.capture() as captured:
        if whole is None:
            _stacked(screen, headers, texts, filled, indent)
        else:
            _columns(screen, headers, texts, filled, right, indent, whole)
    for row in captured.get().splitlines():
        click.echo(row.rstrip())  # rich pads every line


def _whole_columns(
    headers: Sequence[str], rows: Sequence[Sequence[Text]], filled: Sequence[int], room: int
) -> set[int] | None:
    """The columns that are never folded: short ones, and the first, whose keys are there to be copied.

    Returns:
        None if the others would have too little room to be read.
    """
    widths = {index: max(len(headers[index]), *(len(row[index]) for row in rows), 0) for index in filled}
    whole = {*filled[:1], *(index for index, wide in widths.items() if wide <= NARROWEST)}
    needed = sum(wide if index in whole else FOLDED for index, wide in widths.items())
    return whole if needed + 2 * (len(filled) - 1) <= room else None


def _columns(
    screen: Console,
    headers: Sequence[str],
    rows: Sequence[Sequence[Text]],
    filled: Sequence[int],
    right: Sequence[int],
    indent: int,
    whole: set[int],
) -> None:
    from rich.padding import Padding
    from rich.table import Table

    made = Table(box=None, show_header=any(headers), header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for index in filled:
        side: Literal["left", "right"] = "right" if index in right else "left"
        made.add_column(headers[index], justify=side, overflow="fold", no_wrap=index in whole)
    for row in rows:
        made.add_row(*(row[index] for index in filled))
    screen.print(Padding(made, (0, 0, 0, indent), expand=False))


def _stacked(
    screen: Console, headers: Sequence[str], rows: Sequence[Sequence[Text]], filled: Sequence[int], indent: int
) -> None:
    """Print each row as lines: its name, and below it the other cells, each beside its header."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    signs = sum(1 for index in filled[:1] if all(len(row[index]) <= 1 for row in rows))  # a ✓ stands before the name
    names, cells = filled[: signs + 1], filled[signs + 1 :]
    bare, labelled = (
        [index for index in cells if not headers[index]],
        [index for index in cells if headers[index]],
    )
    for row in rows:
        name = Text(" ").join(
            [*(Text(headers[index], "dim") for index in names if headers[index]), *(row[index] for index in names)]
        )
        if any(row[index] for index in names):
            screen.print(Padding(name, (0, 0, 0, indent)), overflow="fold")
        below = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        below.add_column(no_wrap=True, style="dim")
        below.add_column(overflow="fold")
        for index in labelled:
            if row[index]:
                below.add_row(headers[index], row[index])
        text = Text("  ").join(row[index] for index in bare if row[index])
        for shown in (below if below.row_count else None, text or None):
            if shown is not None:
                screen.print(Padding(shown, (0, 0, 0, indent + 2), expand=False), overflow="fold")


def _unfolded(rows: Sequence[Sequence[object]], columns: Sequence[int], right: Sequence[int], indent: int) -> None:
    """Print rows in one line each. A cell that is much longer than the others of its column moves what follows it."""
    texts = [[str(row[index]) for index in columns] for row in rows]
    widths = [
        max((len(cell) for cell in cells if len(cell) <= WIDEST), default=0) for cells in zip(*texts, strict=True)
    ]
    for row in texts:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, cell, width in zip(columns, row, widths, strict=True)
        ]
        click.echo((" " * indent + "  ".join(cells)).rstrip())


def visible(text: str, kept: str = "\n\t") -> str:
    """Replaces characters that would move the cursor or do more by their escapes, except those in `kept`."""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def line(text: str | Text, style: str = "") -> None:
    """Print a text literally: brackets are not markup. A terminal's further lines are indented as the first."""
    from rich.padding import Padding
    from rich.text import Text

    made = text if isinstance(text, Text) else Text(text, style=style)
    if not sys.stdout.isatty():
        console().print(made, soft_wrap=True)
        return
    indent = len(made.plain) - len(made.plain.lstrip(" "))
    with (screen := console()).capture() as captured:
        screen.print(Padding(made[indent:], (0, 0, 0, indent), expand=False))
    click.echo("\n".join(row.rstrip() for row in captured.get().splitlines()))


def _is_svg(begins: bytes) -> bool:
    return begins.startswith((b"<svg", b"<?xml", b"<!")) and b"<svg" in begins


def check_own(path: Path, is_own: Callable[[bytes], bool], what: str) -> None:
    """Check that a file may be overwritten: it does not exist, is empty, or is of the same kind.

    Args:
        path: the file.
        is_own: whether a file is of that kind, judging by its beginning.
        what: the kind with its article, for the message.

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
        raise ConfigError(f"{path} exists and is not {what}; choose another name, or remove it.")


def picture(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """The callback of an option that names an SVG file: it overwrites only pictures."""
    if value:
        check_own(Path(value), _is_svg, "an SVG")
    return value


def embedded(value: object) -> str:
    """JSON that can't end the element of a page that it stands in, nor a line of a script."""
    return dumps(value).replace("<", "\\u003c")


def page(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """The callback of an option that names an HTML file: it overwrites only pages with `GENERATOR`."""
    if value:
        check_own(Path(value), lambda begins: GENERATOR.encode() in begins, "a page written by forge")
    return value


def write(path: Path, content: str | bytes) -> None:
    """Write a file that the user requested, so that it is there whole or as it was.

    Raises:
        DiskError: the disk is full.
        ConfigError: it can't be written for another reason, such as a folder that is not there.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():  # a device, or a pipe
            path.write_bytes(data)
            return
        part = path.resolve().with_name(f".{path.name}.partial")
        try:
            part.write_bytes(data)
            part.replace(path.resolve())
        finally:
            with suppress(OSError):
                part.unlink()
    except OSError as error:
        if error.errno in FULL:
            raise refused(path, error) from error
        raise ConfigError(f"{path}: can't be written: {error.strerror or error}.") from error
