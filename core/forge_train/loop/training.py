"""The steps of a run, and what happens between them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from ..base.errors import ConfigError, DivergedError, during
from ..checkpoint import checkpoint
from ..checkpoint.found import begin_roll_back, left_out
from ..contract.events import CheckpointEvent, Finished, LogRecord, Outcome, StepResult
from ..mesh.process_group import collect, scheduled_collections
from ..plugin import hookspecs
from ..registry.setup import Setup
from ..run.control import Requests, RollBack
from ..step.aggregate import Meter, split
from ..step.forward import Evaluations, close
from ..step.step import Progress, Stepper
from .resume import capture, optimizer_to_save, restore
from .saver import Saver
from .weights import Weights


class Training:
    """An assembled run: steps, and what happens between them.

    Args:
        stepper: takes the steps.
        setup: how they were configured.
        weights: the run's.
        saver: saves the run.
        describe: describes the run anew, from a step on, once it has taken one; if it fails before, it can be continued
            as it was.
    """

    @during("build")
    def __init__(
        self,
        stepper: Stepper,
        setup: Setup,
        weights: Weights,
        saver: Saver,
        describe: Callable[[int], None] | None = None,
    ) -> None:
        self.stepper, self.job, self.model = stepper, stepper.job, stepper.model
        self.progress, job = Progress(), stepper.job
        self._weights = weights
        self.evaluations: Evaluations | None = None
        if stepper.held_out:
            self.evaluations = (setup.evaluations or Evaluations)(stepper, stepper.held_out)
        self._around_step = hookspecs.around("step", job)
        self.saver = saver
        saver.open()
        self._meter = Meter(job)
        self.loss: float | None = None
        self.stepped, self._describe = False, describe or (lambda _: None)
        self.told_of_end: set[str] = set()
        """Plugins that were told how the run ended. If a later one fails then, they are not told again."""

    def start(self, found: Path | None) -> None:
        """Tell the plugins, then resume, or take the weights the configuration names."""
        self.job.hooks.on_start(self.model, self.stepper.optimizer)
        self.job.hooks.at_stage(self.job.hooks, self.job.config, "start")
        if found is not None:
            self._load(found)
            if self.progress.step >= self.job.steps and found.parent != self.job.run.checkpoints:
                raise ConfigError(
                    f"{found}: is at step {self.progress.step}, and this run ends at {self.job.steps}; "
                    f"raise {self.job.config.train.length}."
                )
        elif taken := self._weights.start(self.model):
            self._event("initialised", **taken)
        self._weights.check(self.model)
        self.saver.start(self.progress.step)
        hooks = self.job.hooks
        active = [name for name in hooks.enabled if name not in hooks.unused]
        self._event("run_started", run=self.job.run.id, plugins=active, world=self.job.dist.world)

    def close(self) -> None:
        """End what loaders started, and the writing of checkpoints; the run takes no more batches."""
        self.saver.close()
        close(self.stepper.loader)
        if self.evaluations:
            self.evaluations.close()

    @during("loop")
    def run(self) -> Finished:
        """Step until done, or told to stop."""
        try:
            with scheduled_collections(active=self.job.device.type == "cuda"):
                return self._run()
        except BaseException:
            self.saver.settle()
            raise

    def _run(self) -> Finished:
        config = self.job.config
        self.model.train()
        self._meter.start(self.progress.tokens, self.progress.step)
        hours = config.train.max_hours
        over = time.monotonic() + hours * 3600 if hours else math.inf
        while self.progress.step < self.job.steps:
            with self._around_step():
                result = self.stepper.run(self.progress)
            if not self.stepped:
                self.stepped = True
                self._describe(result.step - 1)
                self.job.dist.settle(self.job.config.run.timeout)
                optimizer_to_save(
                    self.stepper, self._weights
                )  # what can't be saved is told now, not at the first checkpoint
            self.stepper.tell(result)
            collect(result.step)
            if time.monotonic() > over:
                self.job.control.stop(f"train.max_hours = {hours:g}")
            if self._rolled_back():
                continue
            last = result.step == self.job.steps
            if self.job.logs(result.step):
                self._log(result)
            if self.evaluations and (last or result.step % config.train.evaluate_every == 0):
                self._evaluate(self.evaluations)
            self.saver.look()
            self.saver.ask()
            if asked := self._requests(result):
                return asked
            if self.saver.due(result.step) or last:
                self._save(result, last=last)
                self._rolled_back()
        if not self.stepped:
            self._describe(self.progress.step)
        self.saver.wait()
        return self._finish("done", 0)

    def _log(self, result: StepResult) -> None:
        """Write a line of metrics: here the host waits for the device."""
        line = self._meter.line(result, self.stepper.waited)
        self.loss = line["loss"]
        self._check_finite(line["loss"], line["grad_norm"], result)
        metrics = self.stepper.metrics
        found = metrics.take()
        numbers, histograms = split(found)
        line |= numbers
        if timed := split({name: found[name] for name in metrics.timings & found.keys()})[0]:
            line["timing"] = sorted({*line.get("timing", ()), *timed})
        if self.job.dist.main:
            self.job.run.metrics(line)
        self.saver.measured(result.step, line)
        self.job.hooks.on_log(LogRecord(result.step, self.job.steps, line, histograms))

    def _check_finite(self, loss: float, norm: float, result: StepResult) -> None:
        if (math.isfinite(loss) and math.isfinite(norm)) or result.skipped:
            return
        kind = "loss" if not math.isfinite(loss) else "grad_norm"
        value = loss if kind == "loss" else norm
        reason = f"{kind} is {value} at step {result.step}"
        self._event("anomaly", kind=kind, reason=reason)
        self.saver.settle()
        saved = checkpoint.newest(self.job.run.checkpoints, self.job.dist)
        kept = (
            f"{saved.path.name}, from before it, is whole" if saved else "There is no whole checkpoint from before it"
        )
        raise DivergedError(
            f"Training diverged: {reason}. {kept}; try a lower learning rate, more warm-up, or train.clip_norm."
        )

    @during("evaluate")
    def _evaluate(self, evaluations: Evaluations) -> None:
        waited = self.stepper.waited
        with self._meter.paused(), self.stepper.around_evaluate():
            found = evaluations.run(self.progress.step)
        self.stepper.waited = waited
        self.job.hooks.on_log(found)
        self._event("evaluation", loss=found.loss, tokens=found.tokens, metrics=found.metrics)
        self.saver.measured(self.progress.step, {"loss": found.loss, **found.metrics}, evaluation=True)

    def _requests(self, result: StepResult) -> Finished | None:
        """Act on what was asked of `job.control` during the step."""
        asked: Requests = self.job.control.take()
        if asked.roll_back:
            self._roll_back(asked.roll_back)
        elif asked.stop or asked.save:
            self.loss = float(result.loss)
            self._save(result, last=bool(asked.stop))
        if asked.stop:
            self.saver.wait()
            reason, code = asked.stop
            self._event("interrupted", reason=reason)
            return self._finish("interrupted", code, reason)
        return None

    def _rolled_back(self) -> bool:
        """Roll back if all processes have agreed to; return True if they had."""
        if asked := self.job.control.take_agreed():
            self._roll_back(asked)
        return asked is not None

    def _roll_back(self, asked: RollBack) -> None:
        self.saver.wait()
        folder, dist = self.job.run.checkpoints, self.job.dist
        found = checkpoint.newest(folder, dist, before=asked.before)
        if asked.before and self.job.config.checkpoint.folder:
            after = found.step if found else -1
            dist.on_main(lambda: self.saver.bring(after=after, before=asked.before))
            found = checkpoint.newest(folder, dist, before=asked.before)
        if found is None:
            before = f" of a step before {asked.before}" if asked.before else " yet"
            raise DivergedError(f"A plugin asked to roll back ({asked.reason}), but the run has no checkpoint{before}.")
        self._event("anomaly", kind="roll_back", reason=asked.reason)
        dist.on_main(lambda: begin_roll_back(self.job.run.dir, asked.before, self._left_out(asked, found.path)))
        self.saver.undo()
        self._load(found.path)
        self._meter.start(self.progress.tokens, self.progress.step)

    def _left_out(self, asked: RollBack, path: Path) -> set[tuple[int, int]]:
        """The data that is left out once a roll-back has gone back to a checkpoint."""
        state = checkpoint.read_state(path)
        at, step = int(state["data"]["sequences"]), int(state["progress"]["step"])
        skipped = sum(self.job.config.train.batch_at(step + number) for number in range(asked.skip))
        return {*self.progress.left_out, *asked.leave_out, *([(at, at + skipped)] if skipped else ())}

    @during("load")
    def _load(self, path: Path) -> None:
        changes = restore(self.stepper, self.progress, path, self._weights)
        if self.job.dist.main:
            if self.stepped:  # else the run may be refused yet, and stays as it was
                self.job.run.cut_metrics(self.progress.step)
            self.loss = self.job.run.last_loss(self.progress.step)
        own = path.parent == self.job.run.checkpoints
        if own:  # a roll-back may have come after this checkpoint
            noted = self.job.dist.on_main(lambda: left_out(self.job.run.dir))
            self.progress.left_out = sorted({*self.progress.left_out, *noted})
        self.progress.last_saved = self.progress.step if own else -1
        self.job.hooks.on_checkpoint(CheckpointEvent("loaded", self.progress.step, path))
        self._event("resumed", checkpoint=str(path), changes=changes)  # a plugin may have refused

    @during("save")
    def _save(self, result: StepResult, *, last: bool) -> None:
        if self.progress.last_saved == self.progress.step:
            return
        run, step = self.job.run, self.progress.step
        run.check_lock()
        with self._meter.paused():
            self.saver.make_way(step)
            with self.saver.around():
                self.job.hooks.on_checkpoint(CheckpointEvent("saving", step, run.checkpoints / f"step-{step:08d}"))
                if self.job.control.rolls_back:  # what a plugin has found by now is not worth saving
                    return
                self._check_finite(float(result.loss), float(result.grad_norm), result)
                self.saver.save(step, capture(self.stepper, self.progress, self._weights), last=last)
        self.progress.last_saved = step

    def _finish(self, outcome: Outcome, code: int, reason: str = "") -> Finished:
        generates = not self.model.looks_ahead
        finished = Finished(outcome, self.progress.step, self.loss, code, self.job.run.dir, reason, generates)
        if outcome == "done":
            self.job.hooks.at_stage(self.job.hooks, self.job.config, "run")
        for name in self.job.hooks.implementers("on_end"):
            self.told_of_end.add(name)
            self.job.hooks.on_end(finished, only=name)
        self._event("run_finished", outcome=outcome, loss=self.loss, reason=reason, error=None)
        if self.job.dist.main:
            last = {"step": finished.step, "loss": finished.loss, "code": code, "error": None}
            self.job.run.end({"outcome": outcome, **last})
        return finished

    def _event(self, name: str, **fields: object) -> None:
        if self.job.dist.main:
            self.job.run.event(name, self.progress.step, **fields)
