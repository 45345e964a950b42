"""A folder that tests of several data plugins begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

import chat_model


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with the tokenizer `hf`."""
    chat_model.write_tokenizer(tmp_path / "hf")
    return tmp_path
