"""How-to pages as the tests read them: what a reader would type."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import chat_model

HOW_TO = Path(__file__).parents[1] / "docs" / "how-to"


def at_a_desk(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Be in a folder with a cache of its own, a model in `hf` and a text in `texts`."""
    patch.chdir(folder)
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    chat_model.write_model(folder / "hf")
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("say one and then say two\n" * 400, encoding="utf-8")


def blocks(page: str, kind: str) -> list[str]:
    """The blocks of a kind, such as `console` or `toml`, of a how-to page."""
    text = (HOW_TO / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def typed(page: str) -> list[list[str]]:
    """The words after `forge` of each command on a how-to page."""
    lines = [line.removeprefix("$ ") for block in blocks(page, "console") for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("forge ")]


def parse(line: str) -> None:
    """Parse a command line; it fails for an option or a command that does not exist."""
    from click import Context, Group

    from forge_train_cli.app import forge

    words = shlex.split(line, comments=True)[1:]
    command, context = forge, Context(forge)
    while isinstance(command, Group):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, name
        command = found
    command.make_context(line, words)
