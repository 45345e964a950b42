"""What the tests of layouts share: ranks that verify, and the model and text that compositions are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import compositions
from forge_train_tools.testing import Pool, Verifier


def pytest_report_header() -> str:
    return f"covering array of compositions: seed {compositions.SEED} ({compositions.SEED_VARIABLE}=… for another)"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave layouts to `make test-dist`, but for one of two ranks of each kind."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name != "test_two_ranks.py":
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def verify(ranks: Pool) -> Verifier:
    """`forge verify`, on ranks that are there already."""
    return Verifier(ranks)


@pytest.fixture(scope="session")
def composition_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration that compositions lay their settings over."""
    return compositions.write(tmp_path_factory.mktemp("compositions"))


@pytest.fixture(scope="session")
def ends(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Where one process ends, trained once for each model and optimizer."""
    known: dict[str, dict[str, Any]] = {}

    def ends(plugins: tuple[str, ...], config: Mapping[str, Any]) -> dict[str, Any]:
        key = repr((plugins, sorted(config.items())))
        if key not in known:
            folder = tmp_path_factory.mktemp("alone")
            arguments = {"folder": str(folder), "plugins": plugins, "config": dict(config)}
            ranks.run("muon_cases:train", 1, timeout=300, **arguments)
            known[key] = torch.load(folder / "run.pt")
        return known[key]

    return ends
