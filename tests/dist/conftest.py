"""What the tests of layouts share: ranks that verify, and the model and text that compositions are made of."""

from __future__ import annotations

from pathlib import Path

import pytest

import compositions
from forge_train.testing import Pool, Verifier


def pytest_report_header() -> str:
    return f"covering array of compositions: seed {compositions.SEED} ({compositions.SEED_VARIABLE}=… for another)"


@pytest.fixture(scope="session")
def verify(ranks: Pool) -> Verifier:
    """`forge verify`, on ranks that are there already."""
    return Verifier(ranks)


@pytest.fixture(scope="session")
def composition_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration that compositions lay their settings over."""
    return compositions.write(tmp_path_factory.mktemp("compositions"))
