"""Writes what pages of the documentation take from the code, so that it can be read in the repository too.

    python docs/write.py            write it
    python docs/write.py --check    exit 1, and name the pages, where one is stale

A page says where: between `<!-- write: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from forge_train_cli.presets import everything

DOCS = Path(__file__).parent
sys.path.append(str(DOCS))

import reference  # noqa: E402  # beside this file
import transcripts  # noqa: E402

BLOCK = re.compile(r"(<!-- write: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def presets() -> str:
    """The presets that come with forge."""
    rows = ["| command | what it shows | needs |", "|---|---|---|"]
    own = DOCS.parent / "plugins"
    for one in everything():
        if Path(one.file).is_relative_to(own):
            rows.append(f"| `{one.command}` | {one.summary} | {one.wants} |")
    return "\n".join(rows)


PARTS: dict[str, Callable[[], str]] = {"api": reference.api, "mine": transcripts.mine, "presets": presets}
TYPED: dict[str, Callable[[], str]] = {"first_run": transcripts.first_run}
"""Transcripts: they take a minute, and are stale only where something else than a number differs."""


def written(page: str) -> str:
    """A page's text, with what it takes from the code."""

    def write(found: re.Match[str]) -> str:
        name = found[2]
        if name in TYPED:
            new = f"{found[1]}\n{TYPED[name]()}\n\n{found[3]}"
            return found[0] if transcripts.masked(new) == transcripts.masked(found[0]) else new
        return f"{found[1]}\n{PARTS[name]()}\n\n{found[3]}"

    return BLOCK.sub(write, page)


def stale() -> dict[Path, str]:
    """Pages that do not say what the code says → what they should be."""
    found = {}
    for page in sorted([*DOCS.rglob("*.md"), DOCS.parent / "README.md"]):
        text = page.read_text(encoding="utf-8")
        if (now := written(text)) != text:
            found[page] = now
    return found


def main() -> int:
    """Write, or check."""
    pages = stale()
    for page, text in pages.items():
        print(page.relative_to(DOCS.parent))
        if "--check" not in sys.argv:
            page.write_text(text, encoding="utf-8")
    return 1 if pages and "--check" in sys.argv else 0


if __name__ == "__main__":
    raise SystemExit(main())
