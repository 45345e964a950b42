"""Trackio."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from forge_train import Bins, Volatile, section
from forge_train_kit.tracking import Tracker

if TYPE_CHECKING:
    from pathlib import Path

    from forge_train.run.run import Run


class Trackio(Tracker):
    """Keeps scalars, histograms, texts and the configuration for Trackio's dashboard: `trackio show`.

    A resumed run continues in the same run there. TRACKIO_DIR, TRACKIO_SERVER_URL and TRACKIO_SPACE_ID say where to.
    """

    api = (1, 0)
    needs: ClassVar[Mapping[str, str]] = {"trackio": "pip install 'forge-train[trackio]'"}

    facts = {"check.example": ("trackio.project=forge-check",)}

    @section
    class Config:
        project: Annotated[str, Volatile()] = "forge"
        """The project that the run belongs to."""
        artifacts: Annotated[bool, Volatile()] = False
        """Also send files that plugins record on the main rank."""

    config: Config

    def open(self, run: Run, config: Mapping[str, Any]) -> None:
        import trackio
        from trackio import run as runs
        from trackio import utils

        for module in (trackio, runs, utils):
            vars(module)["print"] = _quiet  # which would end up among the lines of `--json`
        name = self.keep(run.dir / "trackio" / "name", lambda: f"{run.id}-{os.urandom(3).hex()}")
        settings = {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}
        self._run = trackio.init(
            self.config.project,
            name,
            config=settings,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float], histograms: Mapping[str, Bins]) -> None:
        import trackio

        drawn = {name: trackio.Histogram(np_histogram=(bins.counts, bins.edges)) for name, bins in histograms.items()}
        self._run.log({**values, **drawn}, step=step)

    def text(self, name: str, text: str, step: int) -> None:
        import trackio

        self._run.log({name: trackio.Markdown(text)}, step=step)

    def artifact(self, path: Path, name: str) -> None:
        self._run.log_artifact(path, name=re.sub(r"[^A-Za-z0-9._-]", "-", name), type="file")

    def close(self, outcome: str) -> None:
        self._run.finish()


def _quiet(*what: Any, **how: Any) -> None:
    """In the place of `print`."""
