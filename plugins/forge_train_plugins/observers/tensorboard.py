"""TensorBoard."""

from __future__ import annotations

import os
import socket
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

        values = [
            Summary.Value(tag=name.replace(".", "/"), simple_value=float(value))
            for name, value in metrics.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        ]
        self._add(Event(step=step, wall_time=time.time(), summary=Summary(value=values)))

    def _add(self, event: Any) -> None:
        """Without tensorboard's own writer, whose thread has nobody to tell of a full disk."""
        if self._writer is None:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.summary.writer.record_writer import RecordWriter

            assert self._job is not None
            folder = self._job.run.dir / "tensorboard"
            folder.mkdir(exist_ok=True)
            file = folder / f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
            self._writer = RecordWriter(file.open("ab", buffering=0))
            self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._writer.write(event.SerializeToString())

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
