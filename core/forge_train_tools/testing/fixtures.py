"""The pytest plugin. Every pytest of an environment with forge imports this file, so it imports nothing itself."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .environment import Installed
    from .pool import Pool
    from .runs import RunForge


@pytest.fixture
def forge_plugins() -> Iterator[Installed]:
    """An environment in which no plugin is installed; see `forge_train_tools.testing.Installed` for how to fill it."""
    from .environment import installed

    with installed(keep=False) as plugins:
        yield plugins


@pytest.fixture
def run_forge(tmp_path: Path) -> RunForge:
    """`forge_train_tools.testing.run_forge` with its run folders under this test's `tmp_path`."""
    from .runs import run_forge as run

    return partial(run, folder=tmp_path / "runs")


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Up to eight processes over gloo that live as long as the session; see `forge_train_tools.testing.Pool`."""
    from .pool import Pool

    with Pool(tmp_path_factory.mktemp("ranks")) as pool:
        yield pool
