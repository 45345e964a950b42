"""Ten trials, one of each kind; `make bench ARGS=chaos` does a hundred."""

from __future__ import annotations

import os

import pytest

from chaos_trials import Ground, choose

pytestmark = [
    *(pytest.mark.e2e, pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1800)),
]
SEED = int(os.environ.get("FORGE_SEED", "0"))
TRIALS = 10


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("chaos"), preloaded=True)


@pytest.mark.parametrize("seed", range(SEED, SEED + TRIALS))
def test_a_run_survives(ground: Ground, seed: int) -> None:
    trial = choose(seed)
    verdict = ground.run(trial)
    print(f"{trial.kind}: {trial.words}: exit codes {verdict.codes}, resumed at {verdict.resumed}")
    assert not verdict.wrong, [f"{trial.kind}: {trial.words}", verdict.wrong, *verdict.said]
