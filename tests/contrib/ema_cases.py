"""What the tests of `ema` have several ranks do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge_train_tools.testing import run_forge

CONFIG = {"train.evaluate_every": 1, "train.evaluate_batches": 2, "adamw.lr": 1e-2}


def sharded(folder: str, name: str, stop_at: int | None) -> dict[str, Any]:
    """Train over all ranks; a run of the same name goes on where it was stopped."""
    config = {**CONFIG, "parallel.dp_shard": 2}
    run = run_forge(["ema", "fsdp2"], config, steps=4, name=name, stop_at=stop_at, folder=Path(folder))
    average = run.plugin("ema").state_dict()["average"]
    return {
        "types": sorted({type(mean).__name__ for mean in average.values()}),
        "average": {key: mean.full_tensor().tolist() for key, mean in average.items()},
        "evaluations": [event["loss"] for event in run.events if event["event"] == "evaluation"],
        "numbers": run.numbers,
    }
