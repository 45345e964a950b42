"""A request that starts from the model of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from forge_train.checkpoint import checkpoint
from forge_train.config.validate import plain
from forge_train.plugin.calls import implemented
from forge_train_kit import foreign
from forge_train_kit.facts import ADDS

from ..configuration.request import Request
from ..configuration.setup import resolve
from .hf_request import PRESET, kernel_for
from .opening import setup_of

OF_MODEL = {
    *("build_model", "attention", "feed_forward", "modalities", "fusion", "head", "tail", "classes", "tokenizer"),
}
"""Hooks whose plugins make a model and its tokenizer; what shards or adapts it is the new run's to say."""


def from_run(request: Request) -> Request:
    """A request with the model, weights and tokenizer of the run or checkpoint that it starts from.

    Args:
        request: its `model_from` is a run, whose newest whole checkpoint counts, or a checkpoint. If it has no
            configuration, it gets the one for fine-tuning.

    Raises:
        ConfigError: as in `setup_of`.
    """
    path = foreign.resolve(Path(request.model_from))
    setup = setup_of(path, checkpoint.read_state(path))
    asked = dataclasses.replace(request, config=request.config or PRESET, model_from="")
    bare = resolve(dataclasses.replace(asked, set=(), environment=""), training=False)
    enabled = setup.hooks.enabled
    again = {name for name, one in bare.hooks.enabled.items() if name in enabled and ADDS.of(one.cls)}
    names = [name for name, one in enabled.items() if implemented(one.cls) & OF_MODEL or name in again]
    sections = {
        name: {key: value for key, value in plain(setup.config.sections[name]).items() if value is not None}
        for name in names
    }
    train: dict[str, Any] = {"sequence": setup.config.train.sequence, "init_from": str(path.absolute())}
    if again:
        train["init_missing"] = []  # what they add is in the checkpoint
    request = dataclasses.replace(
        asked,
        sections={**sections, "train": train},
        sections_from=str(path / "config.toml"),
        brought=tuple(name for name in names if name not in bare.hooks.enabled),
    )
    return dataclasses.replace(request, brought=(*request.brought, *kernel_for(request)))
