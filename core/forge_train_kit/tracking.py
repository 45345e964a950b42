"""Base class of trackers: a queue, and a thread that training never waits for."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from forge_train.base.errors import ForgeError, PluginError, describe
from forge_train.contract.events import Bins, CheckpointEvent, Evaluation, Finished, LogRecord
from forge_train.plugin.plugin import Plugin, hookimpl

if TYPE_CHECKING:
    from forge_train.plugin.job import Job
    from forge_train.run.run import Run

__all__ = ["Tracker"]

log = logging.getLogger("forge_train")


class Tracker(Plugin):
    """The base of plugins that send what a run logs somewhere else.

    A subclass implements `open` and `log`, and the other methods as it needs them. `check` is called at start-up, all
    others in a thread of the tracker's own, one after the other; all on the main rank alone, so none of them may use
    `torch.distributed`, and one that does is stopped. A step never waits for them. A tracker that raises is left out
    after one warning; for one that is too slow, what does not fit into the queue is lost, also with one warning.
    """

    after_observers = True

    capacity: ClassVar[int] = 1000
    """Records that wait in the queue at most."""
    patience: ClassVar[float] = 10.0
    """Seconds that the end of a run waits for the queue to empty."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        lacking = [name for name in ("open", "log") if getattr(type(self), name) is getattr(Tracker, name)]
        if lacking:
            raise PluginError(f"{type(self).__name__} lacks {' and '.join(lacking)}, which every tracker implements.")
        self._sender: _Sender | None = None
        self._sent = 0  # artifacts

    # -- for subclasses ---------------------------------------------------------------------------

    def check(self) -> None:
        """Check that the run can be tracked, as far as is known at start-up: a missing login, for example.

        Raises:
            ConfigError: to refuse the run.
        """

    def open(self, run: Run, config: Mapping[str, Any]) -> None:
        """Begin to track, or continue a run that was tracked before.

        Args:
            run: its `id` and `dir` are the same after a resume.
            config: every value of the configuration, by dotted key.
        """
        raise NotImplementedError

    def log(self, step: int, values: Mapping[str, float], histograms: Mapping[str, Bins]) -> None:
        """Take the numbers of a logged step, or of an evaluation (`evaluation.loss`, …)."""
        raise NotImplementedError

    def rewind(self, step: int) -> None:
        """The run continues from a checkpoint: what comes after `step` will be logged again."""

    def text(self, name: str, text: str, step: int) -> None:
        """Take a text, such as a sample."""

    def artifact(self, path: Path, name: str) -> None:
        """Take a file that a plugin of the main rank has recorded (`job.record`). Called if the tracker's section has
        the option `artifacts`, and it is true.

        Args:
            path: where it is.
            name: relative to the run's `artifacts/`, or its last part if it lies elsewhere.
        """

    def close(self, outcome: str) -> None:
        """End, with everything written: `done`, `interrupted` or `failed`."""

    @staticmethod
    def keep(file: Path, make: Callable[[], str]) -> str:
        """Return the run's name in the tracker: made once, then kept in a file of the run's folder for resuming."""
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(make(), encoding="utf-8")
        return file.read_text(encoding="utf-8")

    # -- hooks ------------------------------------------------------------------------------------

    @hookimpl
    def on_start(self, job: Job) -> None:
        if job.dist.main:
            name = next(name for name, plugin in job.hooks.plugins.items() if plugin is self)
            try:
                self.check()
            except ForgeError:
                raise
            except Exception as error:  # as any other failure of a tracker
                _leave_out(name, "check", error)
                return
            self._sender = _Sender(name, self.capacity, job.run)
            self._send("open", job.run, job.config.values())

    @hookimpl
    def on_log(self, record: LogRecord | Evaluation) -> None:
        values = dict(record.metrics)
        if isinstance(record, Evaluation):
            values["evaluation.loss"] = record.loss
        self._send("log", record.step, _numbers(values), record.histograms)
        self._send_artifacts()

    @hookimpl
    def on_checkpoint(self, event: CheckpointEvent) -> None:
        if event.kind == "loaded":
            self._send("rewind", event.step)

    @hookimpl
    def on_end(self, finished: Finished) -> None:
        for title, text in finished.closing:
            self._send("text", title, text, finished.step)
        self._end("failed" if finished.error else finished.outcome)

    def _send(self, method: str, *arguments: Any) -> None:
        if self._sender is not None:
            self._sender.put(getattr(self, method), arguments)

    def _send_artifacts(self) -> None:
        """Those that were recorded since the last time."""
        if self._sender is None or not getattr(self.config, "artifacts", False):
            return
        run = self._sender.tracked
        files = run.artifacts.files
        for file in files[self._sent :]:
            inside = file.is_relative_to(run.dir / "artifacts")
            self._send("artifact", file, file.relative_to(run.dir / "artifacts").as_posix() if inside else file.name)
        self._sent = len(files)

    def _end(self, outcome: str) -> None:
        self._send_artifacts()
        if self._sender is not None:
            self._sender.put(self.close, (outcome,), wait=self.patience)
            self._sender.join(self.patience)
            self._sender = None


class _Sender(threading.Thread):
    """Calls functions one after the other, until one raises."""

    def __init__(self, name: str, capacity: int, run: Run) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self.tracked = run
        self._label, self._lost, self._failed = name, 0, False
        self._queue: queue.Queue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.Queue(capacity)
        self.start()

    def put(self, function: Callable[..., None], arguments: tuple[Any, ...], wait: float = 0.0) -> None:
        if self._failed:
            return
        try:
            self._queue.put((function, arguments), block=wait > 0, timeout=wait or None)
        except queue.Full:
            self._lost += 1
            if self._lost == 1:
                log.warning("Plugin %r does not keep up: what it is too slow for is lost.", self._label)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the queue is empty, but no longer than this."""
        if not self._failed:
            try:
                self._queue.put(None, timeout=timeout)
            except queue.Full:
                timeout = 0.0
        super().join(timeout)
        if self.is_alive() or self._lost:
            level = logging.INFO if self._lost else logging.WARNING  # of what was lost, the run has been warned
            left = self._queue.qsize()
            log.log(level, "Plugin %r did not take everything: %d records are lost.", self._label, self._lost + left)

    def run(self) -> None:
        with _alone():
            self._work()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            function, arguments = item
            try:
                function(*arguments)
            except BaseException as error:  # a library may even try to end the process
                self._failed = True
                _leave_out(self._label, function.__name__, error)
                return


def _leave_out(name: str, method: str, error: BaseException) -> None:
    log.warning("Plugin %r failed in %s and is left out from here on: %s", name, method, describe(error))
    log.warning("How plugin %r failed:", name, exc_info=error, extra={"screen": False})


def _alone() -> AbstractContextManager[Any]:
    """Refuse collectives in this thread: the other ranks make none, so all would wait for ever."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in ("c10d", "_c10d_functional"):
                raise PluginError(f"it calls {func}, which waits for all ranks, on the main rank alone")
            return func(*args, **(kwargs or {}))

    return Alone()  # type: ignore[no-untyped-call]


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that trackers plot. `step` is the axis; values that are not numbers stay in metrics.jsonl."""
    return {
        name: value
        for name, value in values.items()
        if name not in ("step", "version") and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
