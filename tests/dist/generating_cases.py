"""What `test_latent_attention.py` has ranks do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cases import tiny
from forge_train_tools.generation.completion import Completion
from forge_train_tools.generation.sampling import Sampling


def generated(folder: str, plugins: Sequence[str], config: Mapping[str, Any]) -> str:
    """Train for a step, and continue from a text."""
    run = tiny(folder, plugins, config, (), 1)
    return "".join(Completion(run.job, run.model, "the ", Sampling(tokens=16, temperature=0)))
