"""TensorBoard."""

from __future__ import annotations

import time
from typing import Any

from forge_train import Evaluation, Finished, Job, LogRecord, Plugin, hookimpl


class TensorBoard(Plugin):
    """Writes every logged metric and evaluation to the run's `tensorboard/` folder."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._writer: Any = None
        self._job: Job | None = None

    @hookimpl
    def on_start(self, job: Job) -> None:
        self._job = job if job.dist.main else None

    @hookimpl
    def on_log(self, record: LogRecord) -> None:
        self._write(record.step, {name: value for name, value in record.metrics.items() if name != "step"})

    @hookimpl
    def on_evaluate(self, evaluation: Evaluation) -> None:
        self._write(evaluation.step, {"evaluation.loss": evaluation.loss, **evaluation.metrics})

    @hookimpl
    def on_finish(self, finished: Finished) -> None:
        self._close()

    @hookimpl
    def on_error(self, error: BaseException) -> None:
        self._close()

    def _write(self, step: int, metrics: dict[str, Any]) -> None:
        if self._job is None:
            return
        # Imported with the first line that is written: it takes a second, which the first step should not wait for.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._writer = EventFileWriter(str(self._job.run.dir / "tensorboard"))
        values = [
            Summary.Value(tag=name.replace(".", "/"), simple_value=float(value))
            for name, value in metrics.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        ]
        self._writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=values)))

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
