"""MLflow."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from forge_train import Bins, Volatile, section
from forge_train_kit.tracking import Tracker

if TYPE_CHECKING:
    from forge_train.run.run import Run


class MLflow(Tracker):
    """Sends scalars, texts and the configuration to an MLflow server, or to a local database.

    A resumed run continues in the same run there. Histograms are left out: MLflow has none.
    """

    api = (1, 0)
    needs: ClassVar[Mapping[str, str]] = dict.fromkeys(("mlflow", "sqlalchemy"), "pip install 'forge-train[mlflow]'")

    @section
    class Config:
        uri: Annotated[str, Volatile()] = ""
        """Of the server or the database; empty for MLFLOW_TRACKING_URI, or else for `mlflow.db` beside the runs."""
        experiment: Annotated[str, Volatile()] = "forge"
        """The experiment that the run belongs to."""
        artifacts: Annotated[bool, Volatile()] = False
        """Also send files that plugins record on the main rank."""

    config: Config

    def open(self, run: Run, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        runs = run.dir.absolute().parent
        uri = self.config.uri or os.environ.get("MLFLOW_TRACKING_URI")
        files = {} if uri else {"artifact_location": str(runs / "mlflow-artifacts")}
        self._client = client = MlflowClient(uri or f"sqlite:///{runs}/mlflow.db")
        own = run.dir / "mlflow" / "id"
        known = own.exists()
        found = client.get_experiment_by_name(self.config.experiment)
        experiment = found.experiment_id if found else client.create_experiment(self.config.experiment, **files)
        self._run = self.keep(own, lambda: str(client.create_run(experiment, run_name=run.id).info.run_id))
        if known:
            client.update_run(self._run, status="RUNNING")
        for some in _parts([] if known else [Param(key, str(value)[:500]) for key, value in config.items()], 100):
            client.log_batch(self._run, params=some)

    def log(self, step: int, values: Mapping[str, float], histograms: Mapping[str, Bins]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        for some in _parts([Metric(name, value, now, step) for name, value in values.items()], 1000):
            self._client.log_batch(self._run, metrics=some)

    def text(self, name: str, text: str, step: int) -> None:
        self._client.log_text(self._run, text, f"{name}.txt")

    def artifact(self, path: Path, name: str) -> None:
        self._client.log_artifact(self._run, str(path), str(Path(name).parent) if "/" in name else None)

    def close(self, outcome: str) -> None:
        status = {"done": "FINISHED", "interrupted": "KILLED"}.get(outcome, "FAILED")
        self._client.set_terminated(self._run, status)


def _parts(items: list[Any], size: int) -> list[list[Any]]:
    """MLflow limits how many it takes at once."""
    return [items[at : at + size] for at in range(0, len(items), size)]
