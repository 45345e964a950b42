"""Run of the test kit: a model of a few thousand weights on some kilobytes of made-up text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ..configuration import request
from ..configuration.presets import base_preset, presets
from ..configuration.toml import read

PRESET = "tiny"
VOCABULARY = 320
"""Of the model where the data's plugin brings no tokenizer to take it from."""

_DEFAULTS = Path(__file__).with_suffix(".toml")

_WORDS = "the model reads a line of text and says which byte is next so that its loss falls step by step"


@contextmanager
def preset(folder: Path, filled: Iterable[str]) -> Iterator[None]:
    """Have a preset `tiny` for as long as the block lasts. Its sections of displaced defaults are left out by core.

    Args:
        folder: where its text is written.
        filled: slots that plugins under test fill.
    """
    import json

    slots = set(filled)
    vocabulary = VOCABULARY if "build_data" in slots and "tokenizer" not in slots else 0
    text = folder / "text"
    _write_text(text)
    file = folder / f"{PRESET}.toml"
    _write(
        file,
        _DEFAULTS.read_text(encoding="utf-8").format(
            vocabulary=vocabulary, path=json.dumps(str(text)), cache=json.dumps(str(folder / "text-cache"))
        ),
    )
    known = {**presets(), PRESET: file}
    with patch.object(request, "presets", lambda: known):
        yield


def base_plugins() -> tuple[str, ...]:
    """The plugins that every run has by default because they watch it."""
    beneath = base_preset()
    found: Mapping[str, Any] = read(beneath).data if beneath else {}
    return tuple(found.get("plugins", ()))


def _write_text(folder: Path) -> None:
    """Eight files of about four kilobytes, the same everywhere."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(_texts()):
        _write(folder / f"{number}.txt", text)


@cache
def _texts() -> tuple[str, ...]:
    state, vocabulary, texts = 1, _WORDS.split(), list[str]()
    for _ in range(8):
        words: list[str] = []
        length = 0
        while length < 3000:
            state = (state * 48271) % 2147483647  # the minimal standard generator: no library may change it
            words.append(vocabulary[state % len(vocabulary)])
            length += len(words[-1])
        lines = [" ".join(words[at : at + 12]) for at in range(0, len(words), 12)]
        texts.append(".\n".join(lines) + ".\n")
    return tuple(texts)


def _write(file: Path, text: str) -> None:
    """Write a file that other ranks of a test may be reading or writing; what is the same already stays untouched."""
    if file.is_file() and file.read_text(encoding="utf-8") == text:
        return
    own = file.with_name(f".{file.name}.{os.getpid()}")
    own.write_text(text, encoding="utf-8")
    own.replace(file)
