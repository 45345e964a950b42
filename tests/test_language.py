"""Docstrings read as a native speaker would say them: they begin with a verb or the noun they describe."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[1]
FOLDERS = ("core", "plugins", "cli", "contrib", "examples")
CLAUSE = re.compile(r"\s*(What|Whether|Who|Whose|Whom|Where|How|When|Which)\b")
"""Beginnings of docstrings: “Shards that this rank writes” says more than “What this rank writes”."""
TURNS = {
    r"\bbelongs? into\b": "belongs in",
    r"\bis other than\b": "differs from",
    r"\btells of\b": "describes",
    r"\b(run|training|reading) goes on\b": "continues",
    r"\b(goes|go|went) on (from|with)\b": "continues from, continues with",
    r"\berror goes on\b": "propagates",
}
"""Turns of phrase that read as translated → what to write."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring: of the module, of classes and functions, and below attributes."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for at, child in enumerate(body if isinstance(body, list) else ()):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                described = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
                below = at > 0 and isinstance(body[at - 1], (ast.Assign, ast.AnnAssign))
                if isinstance(child.value.value, str) and ((at == 0 and described) or below):
                    yield child.lineno, child.value.value


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string, docstrings and messages alike."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def files() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.slow
def test_no_docstring_begins_with_a_noun_clause() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0]}"
        for path in files()
        for line, text in docstrings(path.read_text(encoding="utf-8"))
        if CLAUSE.match(text)
    ]
    assert wrong == []


@pytest.mark.slow
def test_no_text_has_a_banned_turn() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {found[0]!r}; write {better}"
        for path in files()
        for line, text in texts(path.read_text(encoding="utf-8"))
        for turn, better in TURNS.items()
        if (found := re.search(turn, text))
    ]
    assert wrong == []


def test_sees_docstrings_of_every_kind() -> None:
    source = (
        '"""A."""\nclass B:\n    """C."""\n    x = 1\n    """What D is."""\n'
        '    def e(self):\n        """Return F."""\n        """no docstring"""\n'
    )
    assert [text for _, text in docstrings(source)] == ["A.", "C.", "What D is.", "Return F."]
    assert CLAUSE.match("What D is.")
    assert not CLAUSE.match("Whatever D is.")
