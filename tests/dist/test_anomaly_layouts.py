"""`anomaly` on layouts: NaN in one rank's gradients has the documented outcome on every rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from crossed import marked
from forge_train_tools.testing import Pool

pytestmark = [pytest.mark.dist]

LAYOUTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "fsdp2": (["fsdp2"], {"poison.parameter": "layers.1"}),
    "tp2": (["tp"], {"parallel.tp": 2, "poison.parameter": "norm"}),  # of which the ranks' gradients are summed
    "ep2": (["fsdp2", "moe", "ep"], {"parallel.ep": 2, "poison.parameter": "experts"}),
    "pp2": (["pp"], {"parallel.pp": 2}),
}
STEPS = 8
CONFIG = {"train.global_batch": 4, "train.micro_batch": 2, "checkpoint.every": 3, "log.every": 2}


EXTENDED = ("tp2", "ep2", "pp2")
"""They take long; tests/plugins/test_anomaly.py has the policies on one process."""


@pytest.mark.parametrize("layout", marked(LAYOUTS, EXTENDED))
def test_every_policy_has_its_outcome_on_every_rank(ranks: Pool, tmp_path: Path, layout: str) -> None:
    chance = random.Random(layout)
    at, rank = chance.choice([5, 7]), chance.choice([0, 1])
    plugins, settings = LAYOUTS[layout]
    config = {**CONFIG, **settings, "poison.at": at, "poison.rank": rank}

    def both(policy: str) -> list[Any]:
        arguments = {"plugins": plugins, "config": {**config, "anomaly.not_finite": policy}, "steps": STEPS}
        found = ranks.run("poison:train", 2, timeout=200, folder=str(tmp_path / policy), **arguments)
        steps = [{key: one[key] for key in one.keys() & {"steps", "state", "diverged"}} for one in found]
        assert steps[0] == steps[1], policy
        return found

    (skipped, _) = both("skip")
    assert [step for step, _, was in skipped["steps"] if was] == [at]
    assert [first // 4 for _, (first, _), _ in skipped["steps"]] == list(range(STEPS))
    ((step, kind, reason),) = skipped["anomalies"]
    assert (step, kind) == (at, "not_finite")
    assert settings.get("poison.parameter", "") in reason
    assert reason.endswith("on ranks 0, 1" if layout == "tp2" else f"on rank {rank}")

    (back, _) = both("roll_back")
    told, saved = at + 1, (at - 1) // 3 * 3  # the logged or saved step after it, and the checkpoint before it
    numbers = [(step, first // 4) for step, (first, _), _ in back["steps"]]
    again = [(n + 1, n) for n in range(saved, at - 1)]
    assert numbers == [*((n + 1, n) for n in range(told)), *again, *((n + 1, n + 1) for n in range(at - 1, STEPS))]
    assert back["logged"] == list(range(2, STEPS + 1, 2))

    alone = ranks.run(
        "poison:train",
        1,
        timeout=300,
        folder=str(tmp_path / "alone"),
        plugins=[name for name in plugins if name == "moe"],
        config={**CONFIG, "anomaly.not_finite": "roll_back", "poison.at": at},
        steps=STEPS,
    )[0]
    assert back["losses"] == pytest.approx(alone["losses"], rel=1e-5), "as on one process, with the same data"

    (stopped, _) = both("stop")
    assert stopped["diverged"].startswith(f"Training diverged at step {at}: the gradient norm is not finite; ")
    (warned, _) = both("warn")
    assert "is nan at step" in warned["diverged"] or "not finite" in warned["diverged"], "the run ends by itself"


@pytest.mark.parametrize("policy", ["skip", "roll_back", "stop"])
def test_a_norm_that_is_nan_on_one_rank_alone(ranks: Pool, tmp_path: Path, policy: str) -> None:
    """As after a bit that flipped in one copy of a gradient that all ranks hold: no rank decides alone."""
    config = {**CONFIG, "parallel.dp_replicate": 2, "anomaly.not_finite": policy}
    arguments = {"plugins": ["ddp", "poison:Alone"], "config": config, "steps": STEPS}
    one, other = ranks.run("poison:train", 2, timeout=60, folder=str(tmp_path), **arguments)
    assert one.get("steps") == other.get("steps")
    if policy == "stop":
        assert one["diverged"] == other["diverged"]
    elif policy == "skip":
        assert [step for step, _, was in one["steps"] if was] == [5]
    else:
        assert [(step, first // 4) for step, (first, _), _ in one["steps"]][5:] == [
            (6, 5),
            (4, 3),
            (5, 5),
            (6, 6),
            (7, 7),
            (8, 8),
        ]
