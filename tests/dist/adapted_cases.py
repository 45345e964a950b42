"""What `test_adapted_layouts.py` has ranks do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_train_tools.generation.generate import Generation, worker
from forge_train_tools.generation.sampling import Sampling


def answers(base: str, adapters: Mapping[str, float], plugins: Sequence[str], values: Sequence[str]) -> Any:
    """Answer two prompts with a base and its adapters: tokens, and their log-probabilities."""
    asked = Generation(
        path=Path(base),
        prompts=("say 3", "say one and then two"),
        sampling=Sampling(tokens=6, temperature=0.8),
        logprobs=True,
        adapters=adapters,
        plugins=tuple(plugins),
        set=("run.device=cpu", *values),
    )
    found = worker(dataclasses.asdict(asked))["generated"]["answers"]
    return [(one["ids"], one["model_log_probabilities"]) for one in found]
