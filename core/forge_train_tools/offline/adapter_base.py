"""The model that an adapter of PEFT was trained on, and the one that it is added to."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from forge_train.run.run import is_checkpoint, is_run
from forge_train_kit.hf.folder import is_hugging_face

log = logging.getLogger("forge_train")

LONGEST = 20
"""Runs, each of which starts from another, that are followed to the folder of the first."""


def warn_of_another_base(adapter: str, model: Path) -> None:
    """Warn if an adapter names another folder as its base than the one that a model comes from, and both are there.

    Args:
        adapter: a folder of PEFT, which has an `adapter_config.json`.
        model: a folder in Hugging Face layout, a run, a checkpoint, or the configuration in one of them; anything else
            is of no known folder.
    """
    table = json.loads((Path(adapter) / "adapter_config.json").read_text(encoding="utf-8"))
    named, own = Path(str(table.get("base_model_name_or_path") or "")), _folder(model)
    if own is not None and is_hugging_face(named) and not named.samefile(own):
        log.warning(
            "--adapter %s: its adapter_config.json names the base %s, and this model is that of %s; use its own.",
            *(adapter, named, own),
        )


def _folder(model: Path) -> Path | None:
    """The Hugging Face folder that a model was tuned from; None where that is not known."""
    model = model.parent if model.name == "config.toml" else model
    for _ in range(LONGEST):
        if is_hugging_face(model):
            return model
        state = _state(model)
        found = state.get("imported", {}).get("from") or state.get("config", {}).get("train.init_from")
        if not found:
            return None
        model = Path(found)
    return None


def _state(path: Path) -> dict[str, dict[str, str]]:
    """Return the state of a checkpoint, or of a run's newest one; empty for another path."""
    from forge_train.checkpoint import checkpoint  # which imports torch

    if is_run(path):
        path = max((saved.path for saved in checkpoint.found(path / "checkpoints")), default=path)
    return dict(checkpoint.read_state(path)) if is_checkpoint(path) else {}
