"""The examples of the page on state maps print what it shows."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "state-map.md"


def test_every_example_gives_what_is_shown() -> None:
    blocks = re.findall(r"^```pycon\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    examples = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, str(PAGE), 0)
    told: list[str] = []
    doctest.DocTestRunner().run(examples, out=told.append)
    assert len(examples.examples) > 10
    assert not told, "".join(told)
