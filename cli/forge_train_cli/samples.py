"""Tokens on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import screen

if TYPE_CHECKING:
    from rich.text import Text

    from forge_train_kit.data.inspection import ShownItem, Token

WIDTH = 40
"""Characters of the line after a document."""
SHADES = ("#1c1f23 on #dbe7f5", "#1c1f23 on #f7e6cf")
BORDER, UNLEARNED = "│", ("⟦", "⟧")
"""Marks between tokens and around tokens that are not learned, if there are no colours."""


def legend(*, masked: bool) -> str:
    """Say how tokens are shown.

    Args:
        masked: whether some are not learned.
    """
    if screen.console().is_terminal:
        return "one shade a token, special tokens in bold, a line after each document" + masked * ", dim: not learned"
    return f"{BORDER} between tokens, a line after each document" + masked * ", ⟦not learned⟧"


def written(token: Token) -> str:
    """Format a token: visible white space, a dot for part of a character, the id if its text is unknown."""
    if token.text is None:
        return str(token.id)
    return screen.visible(token.text.replace("\n", "↵\n").replace("\t", "⇥\t")) or "·"


def described(item: ShownItem) -> str:
    """Format an item among tokens."""
    grid = "×".join(map(str, item.grid))
    return f"{item.modality} {grid} at {item.position}: {item.path} ({item.where})"


def print_tokens(tokens: Sequence[Token]) -> None:
    """Print tokens, in colours on a terminal."""
    from rich.text import Text

    colours = screen.console().is_terminal
    screen.console().print(_coloured(tokens) if colours else Text(_plain(tokens)), soft_wrap=True)


def _coloured(tokens: Sequence[Token]) -> Text:
    from rich.text import Text

    text = Text()
    for at, token in enumerate(tokens):
        style = SHADES[at % 2] + " bold" * token.special + " dim" * (not token.learned)
        shown = written(token)
        text.append(shown, style)
        if token.ends:
            text.append("\n" * (not shown.endswith("\n")) + "─" * WIDTH + "\n", "dim")
    return text


def _plain(tokens: Sequence[Token]) -> str:
    parts: list[str] = []
    learned, fresh = True, True
    for token in tokens:
        if token.learned != learned:
            parts.append(UNLEARNED[token.learned])
            learned = token.learned
        elif not fresh:
            parts.append(BORDER)
        parts.append(written(token))
        fresh = token.ends
        if token.ends:
            parts.append("" if learned else UNLEARNED[1])
            parts.append(f"\n{'─' * WIDTH}\n")
            learned = True
    return "".join(parts) + ("" if learned else UNLEARNED[1])
