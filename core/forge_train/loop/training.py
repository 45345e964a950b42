"""The steps of a run, and what happens between them."""

from __future__ import annotations

import math
import time
from pathlib import Path

from ..composition.compose import Composition
from ..errors import ConfigError, DivergedError
from ..events import CheckpointEvent, Evaluation, Finished, LogRecord, StepResult
from ..job import Job
from ..storage import checkpoint, model_files
from ..storage.resume import capture, load_initial, optimizer_to_save, restore
from .control import Requests
from .meter import Meter
from .step import Progress, Stepper


class Training:
    """A composed run: steps, and what happens between them."""

    def __init__(self, job: Job, composition: Composition) -> None:
        self.job, self.composition, self.model = job, composition, composition.model
        self.progress = Progress()
        optimizer = job.hooks.optimizer(self.model)
        schedule = job.hooks.lr_schedule(optimizer)
        self.stepper = Stepper(job, self.model, optimizer, schedule, job.hooks.build_data("train"))
        self.held_out = job.hooks.build_data("validation") if job.config.train.evaluate_every else None
        self._held_out_start = self.held_out.state_dict() if self.held_out else {}
        self._around_step = job.hooks.span("step")
        self._around_evaluate = job.hooks.span("evaluate")
        self._around_save = job.hooks.span("save")
        self._meter = Meter(job, self.model)
        self.loss: float | None = None

    def start(self, found: Path | None) -> None:
        """Tell the plugins, then resume, or take the weights the configuration names."""
        self.job.hooks.on_start(self.model, self.stepper.optimizer)
        if found is not None:
            self._load(found)
            if self.progress.step >= self.job.steps and found.parent != self.job.run.checkpoints:
                raise ConfigError(
                    f"{found}: is at step {self.progress.step}, and this run ends at {self.job.steps}; "
                    "raise train.steps."
                )
        else:
            load_initial(self.model, self.job)
        hooks = self.job.hooks
        active = [name for name in hooks.enabled if name not in hooks.unused]
        self._event("run_started", run=self.job.run.id, plugins=active, world=self.job.dist.world)

    def run(self) -> Finished:
        """Step until done, or told to stop."""
        config = self.job.config
        self.model.train()
        self._meter.start(self.progress.tokens, self.progress.step)
        settled = False
        while self.progress.step < self.job.steps:
            with self._around_step():
                result = self.stepper.run(self.progress)
            if not settled:
                settled = True
                self.job.dist.settle(self.job.config.run.timeout)
                optimizer_to_save(self.stepper)  # what can't be saved is told now, not at the first checkpoint
            self.job.hooks.on_step(result)
            last = result.step == self.job.steps
            if last or result.step % config.log.every == 0:
                self._log(result)
            if self.held_out and (last or result.step % config.train.evaluate_every == 0):
                self._evaluate()
            if asked := self._requests(result):
                return asked
            if last or (config.checkpoint.every and result.step % config.checkpoint.every == 0):
                self._save(result)
        return self._finish("done", 0)

    def _log(self, result: StepResult) -> None:
        """The one place where the host waits for the device."""
        line = self._meter.line(result)
        self.loss = line["loss"]
        self._check_finite(line["loss"], line["grad_norm"], result)
        if self.job.dist.main:
            self.job.run.metrics(line)
        self.job.hooks.on_log(LogRecord(result.step, self.job.steps, line))

    def _check_finite(self, loss: float, norm: float, result: StepResult) -> None:
        if (math.isfinite(loss) and math.isfinite(norm)) or result.skipped:
            return
        kind = "loss" if not math.isfinite(loss) else "grad_norm"
        value = loss if kind == "loss" else norm
        reason = f"{kind} is {value} at step {result.step}"
        self._event("anomaly", kind=kind, reason=reason)
        saved = checkpoint.newest(self.job.run.checkpoints, self.job.dist)
        kept = (
            f"{saved.path.name}, from before it, is whole" if saved else "There is no whole checkpoint from before it"
        )
        raise DivergedError(
            f"Training diverged: {reason}. {kept}; try a lower learning rate, more warm-up, or train.clip_norm."
        )

    def _evaluate(self) -> None:
        """The mean loss over held-out batches, the same ones every time."""
        held_out = self.held_out
        assert held_out is not None
        count = self.job.config.train.evaluate_batches * self.stepper.accumulation
        with self._meter.paused(), self._around_evaluate():
            held_out.load_state_dict(self._held_out_start)
            loss, weight = self.stepper.evaluate(held_out, count)
        evaluation = Evaluation(self.progress.step, loss, int(weight))
        self.job.hooks.on_evaluate(evaluation)
        self._event("evaluation", loss=evaluation.loss, tokens=evaluation.tokens, metrics=evaluation.metrics)

    def _requests(self, result: StepResult) -> Finished | None:
        """Act on what was asked of `job.control` during the step."""
        asked: Requests = self.job.control.take()
        if asked.roll_back:
            self._roll_back(*asked.roll_back)
        elif asked.stop or asked.save:
            self.loss = float(result.loss)
            self._save(result)
        if asked.stop:
            reason, code = asked.stop
            self._event("interrupted", reason=reason)
            return self._finish("interrupted", code, reason)
        return None

    def _roll_back(self, reason: str, skip: int) -> None:
        found = checkpoint.newest(self.job.run.checkpoints, self.job.dist)
        if found is None:
            raise DivergedError(f"A plugin asked to roll back ({reason}), but the run has no checkpoint yet.")
        self._event("anomaly", kind="roll_back", reason=reason)
        self._load(found.path)
        self.stepper.loader.skip(skip * self.job.config.train.global_batch)
        self._meter.start(self.progress.tokens, self.progress.step)

    def _load(self, path: Path) -> None:
        changes = restore(self.stepper, self.progress, path)
        if self.job.dist.main:
            self.job.run.cut_metrics(self.progress.step)
            self.loss = self.job.run.last_loss()
        own = path.parent == self.job.run.checkpoints
        self.progress.last_saved = self.progress.step if own else -1
        self._event("resumed", checkpoint=str(path), changes=changes)
        self.job.hooks.on_checkpoint(CheckpointEvent("loaded", self.progress.step, path))

    def _save(self, result: StepResult) -> None:
        if self.progress.last_saved == self.progress.step:
            return
        self._check_finite(float(result.loss), float(result.grad_norm), result)
        run, step, config = self.job.run, self.progress.step, self.job.config.checkpoint
        run.check_lock()
        started = time.perf_counter()
        with self._meter.paused(), self._around_save():
            self.job.hooks.on_checkpoint(CheckpointEvent("saving", step, run.checkpoints / f"step-{step:08d}"))
            names = ("config.toml", "plugins.json", model_files.FOLDER)
            beside = [path for name in names if (path := run.dir / name).exists()]
            saved = checkpoint.save(
                run.checkpoints, step, capture(self.stepper, self.progress), self.job.dist, beside=beside
            )
            self.progress.last_saved = step
            self._event(
                "checkpoint_saved", path=saved.path.name, seconds=time.perf_counter() - started, bytes=saved.bytes
            )
            self.job.hooks.on_checkpoint(CheckpointEvent("saved", step, saved.path))
            for gone in checkpoint.prune(run.checkpoints, config.keep, config.keep_every, self.job.dist):
                self._event("checkpoint_pruned", path=gone.path.name)
                self.job.hooks.on_checkpoint(CheckpointEvent("pruned", gone.step, gone.path))

    def _finish(self, outcome: str, code: int, reason: str = "") -> Finished:
        finished = Finished(outcome, self.progress.step, self.loss, code, self.job.run.dir, reason)  # type: ignore[arg-type]
        self._event("run_finished", outcome=outcome, loss=self.loss, reason=reason, error=None)
        self.job.hooks.on_finish(finished)
        if self.job.dist.main:
            last = {"step": finished.step, "loss": finished.loss, "code": code, "error": None}
            self.job.run.end({"outcome": outcome, **last})
        return finished

    def _event(self, name: str, **fields: object) -> None:
        if self.job.dist.main:
            self.job.run.event(name, self.progress.step, **fields)
