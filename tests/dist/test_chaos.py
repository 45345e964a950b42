"""Ten trials, one of each kind; CI takes three of them, and `make bench ARGS=chaos` does a hundred."""

from __future__ import annotations

import os

import pytest

from chaos_trials import Ground, choose
from crossed import marked

pytestmark = [
    *(pytest.mark.e2e, pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1800)),
]
SEED = int(os.environ.get("FORGE_SEED", "0"))
TRIALS = 10
EXTENDED = (0, 1, 2, 3, 4, 5, 6, 7)
"""Killed ranks, signals, a full or slow disk, a damaged checkpoint, a hung rank: CI has tests of each."""


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("chaos"), preloaded=True)


@pytest.mark.parametrize("seed", marked(range(SEED, SEED + TRIALS), [SEED + number for number in EXTENDED]))
def test_a_run_survives(ground: Ground, seed: int) -> None:
    trial = choose(seed)
    verdict = ground.run(trial)
    print(f"{trial.kind}: {trial.words}: exit codes {verdict.codes}, resumed at {verdict.resumed}")
    assert not verdict.wrong, [f"{trial.kind}: {trial.words}", verdict.wrong, *verdict.said]
