"""The model family on its page: every command typed as it stands there, and the page's own tests."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_train_cli.app import run as forge
from forge_train_kit.fingerprint import fingerprint
from test_examples import unpack

pytest.importorskip("transformers")

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "how-to" / "family.md"


def forget() -> None:
    """As in a new process."""
    fingerprint.cache_clear()
    for name in [name for name in sys.modules if name.startswith("forge_train_file_")]:
        del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with the files of the page and a text."""
    unpack("docs/how-to/family.md", tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "squares.txt").write_text("\n".join(f"line {n}: {n * n % 97}" for n in range(2000)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = list(sys.path)
    forget()
    yield tmp_path
    forget()
    sys.path[:] = before


@pytest.mark.slow
def test_the_family_is_imported_trained_and_exported_as_written(folder: Path) -> None:
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    commands = [shlex.split(line.removeprefix("$ ")) for block in blocks for line in block.splitlines()]
    assert len(commands) > 3
    for program, *arguments in commands:
        if program == "python":
            runpy.run_path(*arguments, run_name="__main__")
        else:
            assert program == "forge"
            assert forge(arguments) == 0, arguments
    tests = {name: one for name, one in runpy.run_path("test_arcee.py").items() if name.startswith("test_")}
    assert len(tests) == 2
    for test in tests.values():
        test()


@pytest.mark.parametrize("hook", ["import_hf", "export_hf"])
def test_the_page_of_a_hook_shows_the_same_code(hook: str) -> None:
    shown = re.findall(
        r"^( {4}@hookimpl\n.*?)^```", (DOCS / "hooks" / f"{hook}.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(shown) == 1
    assert shown[0] in PAGE.read_text(encoding="utf-8")
