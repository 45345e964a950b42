"""Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from forge_train import Bins, ConfigError, Volatile, section
from forge_train_kit.tracking import Tracker

if TYPE_CHECKING:
    from pathlib import Path

    from forge_train.run.run import Run


class WandB(Tracker):
    """Sends scalars, histograms, texts and the configuration to Weights & Biases.

    A resumed run continues in the same run there. Offline runs lie in the run's `wandb/` folder, for `wandb sync`.
    """

    api = (1, 0)
    needs: ClassVar[Mapping[str, str]] = {"wandb": "pip install 'forge-train[wandb]'"}
    facts = {"check.example": ("wandb.mode=offline",)}

    @section
    class Config:
        project: Annotated[str, Volatile()] = "forge"
        """The project that the run belongs to."""
        mode: Annotated[Literal["online", "offline"], Volatile()] = "online"
        """`offline` keeps the run on disk, for `wandb sync`."""
        artifacts: Annotated[bool, Volatile()] = False
        """Also send files that plugins record on the main rank."""

    config: Config

    def check(self) -> None:
        if self.config.mode == "offline" or os.environ.get("WANDB_API_KEY"):
            return
        import wandb

        if not wandb.login(prompt=False):
            raise ConfigError(
                "wandb: there is no login here. Run `wandb login`, set WANDB_API_KEY, or use -s wandb.mode=offline"
            )

    def open(self, run: Run, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        own = run.dir / "wandb"
        self._run = wandb.init(
            project=self.config.project,
            name=run.id,
            id=self.keep(own / "id", lambda: os.urandom(4).hex()),
            resume="allow" if self.config.mode == "online" else None,
            mode=self.config.mode,
            dir=run.dir,
            config=dict(config),
            settings=wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float], histograms: Mapping[str, Bins]) -> None:
        import wandb

        drawn = {name: wandb.Histogram(np_histogram=(bins.counts, bins.edges)) for name, bins in histograms.items()}
        self._run.log({"step": step, **values, **drawn})

    def text(self, name: str, text: str, step: int) -> None:
        self._run.summary[name] = text

    def artifact(self, path: Path, name: str) -> None:
        folder = path.absolute().parents[name.count("/")]
        self._run.save(str(path.absolute()), base_path=str(folder), policy="now")

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=0 if outcome != "failed" else 1)
