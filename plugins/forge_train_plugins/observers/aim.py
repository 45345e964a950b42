"""Aim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from forge_train import Bins, Volatile, section
from forge_train_kit.tracking import Tracker

if TYPE_CHECKING:
    from forge_train.run.run import Run


class Aim(Tracker):
    """Keeps scalars, histograms, texts and the configuration in an Aim repository: `aim up`.

    A resumed run continues in the same run there.
    """

    api = (1, 0)
    needs: ClassVar[Mapping[str, str]] = {"aim": "pip install 'forge-train[aim]'"}

    @section
    class Config:
        repo: Annotated[str, Volatile()] = ""
        """Folder or server of the repository; empty for `.aim` beside the runs."""
        experiment: Annotated[str, Volatile()] = "forge"
        """The experiment that the run belongs to."""

    config: Config

    def open(self, run: Run, config: Mapping[str, Any]) -> None:
        from aim import Run as AimRun

        own = run.dir / "aim" / "id"
        self._run = AimRun(
            own.read_text(encoding="utf-8") if own.exists() else None,
            repo=self.config.repo or str(run.dir.absolute().parent),
            experiment=self.config.experiment,
            system_tracking_interval=None,
            log_system_params=False,
            capture_terminal_logs=False,
        )
        self.keep(own, lambda: str(self._run.hash))
        self._run.name = run.id
        self._run["config"] = {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}

    def log(self, step: int, values: Mapping[str, float], histograms: Mapping[str, Bins]) -> None:
        from aim import Distribution

        for name, value in values.items():
            self._run.track(value, name=name, step=step)
        for name, bins in histograms.items():
            whole = Distribution(hist=bins.counts, bin_range=(bins.edges[0], bins.edges[-1]))
            self._run.track(whole, name=name, step=step)

    def text(self, name: str, text: str, step: int) -> None:
        from aim import Text

        self._run.track(Text(text), name=name, step=step)

    def close(self, outcome: str) -> None:
        self._run.close()
