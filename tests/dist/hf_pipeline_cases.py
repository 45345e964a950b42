"""What ranks do for test_hf_pipelines.py: a run in two halves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_train_tools.testing import run_forge


def trained(folder: str, plugins: Sequence[str], config: Mapping[str, Any], stop_at: int | None) -> dict[str, Any]:
    """Four steps, or the first of them; a run that is there goes on."""
    run = run_forge(plugins, config, steps=4, name="run", stop_at=stop_at, folder=Path(folder))
    evaluated = [event["loss"] for event in run.events if event["event"] == "evaluation"]
    losses = [line["loss"] for line in run.numbers]
    return {"losses": losses, "evaluated": evaluated, "run": str(run.run)}
