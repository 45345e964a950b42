"""TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forge_train import Bins
from forge_train_kit.tracking import Tracker

if TYPE_CHECKING:
    from forge_train.run.run import Run

    from ._tensorboard import EventFile


class TensorBoard(Tracker):
    """Writes scalars, histograms, texts and the configuration to the run's `tensorboard/` folder."""

    api = (1, 0)
    _file: EventFile

    def open(self, run: Run, config: Mapping[str, Any]) -> None:
        from ._tensorboard import EventFile

        self._file = EventFile(run.dir / "tensorboard")
        self._file.hparams(config)

    def log(self, step: int, values: Mapping[str, float], histograms: Mapping[str, Bins]) -> None:
        self._file.add(step, values, histograms)

    def rewind(self, step: int) -> None:
        self._file.rewind(step)

    def text(self, name: str, text: str, step: int) -> None:
        self._file.text(name, text, step)

    def close(self, outcome: str) -> None:
        self._file.close(outcome)
