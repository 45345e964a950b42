"""Starts a run from a model that Forge did not train."""

from __future__ import annotations

from pathlib import Path

from forge_train import Job, Model, Plugin, hookimpl
from forge_train_kit.contract import InitialWeights


class Pretrained(Plugin):
    """Starts a run from a folder in Hugging Face layout, or from weights that `train.init_map` changes.

    It is a default of every run that sets `train.init_from`. The plugin of the model describes its folders
    (`import_hf`).
    """

    api = (1, 0)

    @hookimpl
    def initial_weights(self, path: Path, model: Model, job: Job) -> InitialWeights | None:
        from forge_train_kit.hf.start import initial_weights

        return initial_weights(path, model, job)
