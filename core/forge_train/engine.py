"""A run, from its configuration to its last checkpoint."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from . import checkpoint, state
from .compose import Composition, compose
from .control import Control, Requests, signals
from .distributed import DistributedContext
from .errors import ConfigError, DivergedError, ForgeError, describe
from .job import Job
from .meter import Meter
from .out_of_memory import Memory
from .protocols import CheckpointEvent, Evaluation, Finished, LogRecord, StepResult
from .resume import capture, compare, load_weights, restore
from .rules import Layout, world_size
from .run import Run, Start, begin, is_run, plugin_list, write_json
from .setup import Setup
from .step import Progress, Stepper

log = logging.getLogger("forge_train")


def train(
    setup: Setup,
    *,
    run_dir: Path = Path("runs"),
    resume: str = "auto",
    notable: tuple[str, ...] = (),
    start: Start | None = None,
) -> Finished:
    """Train as configured, and say how it ended.

    Args:
        setup: a checked configuration and its plugins.
        run_dir: where run folders are made.
        resume: `auto`, `never`, or the path of a run or a checkpoint.
        notable: plugins to name in a new run's id.
        start: where the run begins, if that was decided from these before.

    Raises:
        ForgeError: for what the user can mend; anything else is a plugin's, or forge's, fault.
    """
    config, hooks = setup.config, setup.hooks
    layout = Layout.of(config.parallel, world_size())
    with ExitStack() as stack:
        dist = stack.enter_context(DistributedContext.join(layout, config.run.device, timeout=config.run.start_timeout))
        dist.agree({**config.values(), **{f"plugin {entry['name']}": entry for entry in plugin_list(hooks)}})
        start = start or dist.on_main(lambda: begin(config, run_dir, resume, notable))
        run, control = Run(start.dir), Control(dist)
        job = Job(config, hooks, run, dist, control)
        hooks.bind(job)
        found = dist.on_main(lambda: _found(run, start))
        if found is not None:
            compare(job, found)  # before anything is written: a refused run stays as it is
        if finished := dist.on_main(lambda: _finished_before(job, start)):
            return finished
        prepare_process(job)
        fresh, known = found is None or not start.continues, is_run(run.dir)
        stack.enter_context(_opened(job, start, fresh=fresh))
        training, memory = None, Memory(job)
        try:
            composition = compose(job, allocate=False)
            memory.holds(composition.model)
            composition.allocate(job)
            if dist.main:
                if known:  # which is not touched before the new layout has been found to hold it
                    run.describe(config, hooks, fresh=fresh)
                write_json(run.dir / "composition.json", composition.report)
            training = Training(job, composition)
            memory.holds(training.model, training.stepper.optimizer)
            stack.enter_context(signals(control))
            training.start(found)
            return training.run()
        except BaseException as error:
            if told := memory.explain(error, training.progress.step if training else 0, _log_file(job)):
                log.error("Out of memory.", exc_info=error, extra={"screen": False})
                _record_failure(job, training, told)
                raise told from error
            _record_failure(job, training, error)
            raise


def prepare_process(job: Job) -> None:
    """Seed this process, and make it deterministic if asked.

    Raises:
        ConfigError: if a plugin does not run on the device.
    """
    for name, enabled in job.hooks.enabled.items():
        if enabled.cls.devices and job.device.type not in enabled.cls.devices:
            only = ", ".join(enabled.cls.devices)
            raise ConfigError(f"Plugin {name!r} runs on {only} only; this run's device is {job.device.type}.")
    state.seed_everything(job.seed, job.dist.rank)
    if job.config.run.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


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
        elif init_from := self.job.config.train.init_from:
            load_weights(self.model, self.job, checkpoint.whole(Path(init_from)))
        self._event("run_started", run=self.job.run.id, plugins=list(self.job.hooks.enabled), world=self.job.dist.world)

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
        raise DivergedError(
            f"Training diverged: {reason}. The newest checkpoint is from before it; "
            "try a lower learning rate, more warm-up, or train.clip_norm."
        )

    def _evaluate(self) -> None:
        """The mean loss over held-out batches, the same ones every time."""
        held_out = self.held_out
        assert held_out is not None
        count = -(-self.job.config.train.evaluate_batches // self.job.dist.data_ranks)
        with self._meter.paused(), self._around_evaluate():
            held_out.load_state_dict(self._held_out_start)
            self.model.train(False)
            total, weight = torch.zeros((), dtype=torch.float64, device=self.job.device), 0.0
            for _ in range(count):
                batches, part = self.stepper.fetch(held_out, 1)
                total += self.stepper.executor.evaluate(batches[0])
                weight += part
            self.model.release()
            self.model.train()
            total = self.job.dist.all_reduce(total, axis="loss")
        evaluation = Evaluation(self.progress.step, float(total) / (weight or 1.0), int(weight))
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
        found = self.job.dist.on_main(lambda: checkpoint.newest(self.job.run.checkpoints))
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
        started = time.perf_counter()
        with self._meter.paused(), self._around_save():
            self.job.hooks.on_checkpoint(CheckpointEvent("saving", step, run.checkpoints / f"step-{step:08d}"))
            beside = [run.dir / "config.toml", run.dir / "plugins.json"]
            saved = checkpoint.save(
                run.checkpoints, step, capture(self.stepper, self.progress), self.job.dist, beside=beside
            )
            self.progress.last_saved = step
            self._event(
                "checkpoint_saved", path=saved.path.name, seconds=time.perf_counter() - started, bytes=saved.bytes
            )
            self.job.hooks.on_checkpoint(CheckpointEvent("saved", step, saved.path))
            if self.job.dist.main:
                for gone in checkpoint.prune(run.checkpoints, config.keep, config.keep_every):
                    self._event("checkpoint_pruned", path=gone.path.name)
                    self.job.hooks.on_checkpoint(CheckpointEvent("pruned", gone.step, gone.path))

    def _finish(self, outcome: str, code: int, reason: str = "") -> Finished:
        finished = Finished(outcome, self.progress.step, self.loss, code, self.job.run.dir, reason)  # type: ignore[arg-type]
        self._event("run_finished", outcome=outcome, loss=self.loss, reason=reason)
        self.job.hooks.on_finish(finished)
        if self.job.dist.main:
            self.job.run.end({"outcome": outcome, "step": finished.step, "loss": finished.loss, "code": code})
        return finished

    def _event(self, name: str, **fields: object) -> None:
        if self.job.dist.main:
            self.job.run.event(name, self.progress.step, **fields)


def _record_failure(job: Job, training: Training | None, error: BaseException) -> None:
    """Write down how the run failed, and tell the plugins; the error goes on."""
    step, loss = (training.progress.step, training.loss) if training else (0, None)
    outcome = "diverged" if isinstance(error, DivergedError) else "failed"
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    refused = isinstance(error, ConfigError) and training is None  # and nothing of it is left in the folder
    try:
        if job.dist.main and not refused:
            job.run.event("run_finished", step, outcome=outcome, loss=loss, reason=reason)
            job.run.end({"outcome": outcome, "step": step, "loss": loss, "code": getattr(error, "code", 1)})
        job.hooks.on_error(error)
    except Exception as another:  # a full disk, or a plugin: what went wrong first is what is told
        log.warning("Nor could it be recorded how the run ended: %s", describe(another))


def _found(run: Run, start: Start) -> Path | None:
    """The checkpoint that the run goes on from."""
    if start.checkpoint is not None:
        return checkpoint.whole(start.checkpoint)
    saved = checkpoint.newest(run.checkpoints) if start.continues else None
    return saved.path if saved else None


def _finished_before(job: Job, start: Start) -> Finished | None:
    """What a run that reached its last step long ago has to say."""
    if not start.continues:
        return None
    outcome = job.run.outcome()
    if outcome.get("outcome") != "done" or outcome["step"] < job.steps:
        return None
    return Finished("done", outcome["step"], outcome["loss"], 0, start.dir, "the run had finished before")


@contextmanager
def _opened(job: Job, start: Start, *, fresh: bool) -> Iterator[None]:
    """Open the run folder and its log; a mistake found while composing removes a new folder again."""
    new = not start.dir.exists()
    if job.dist.main:
        job.run.open()
        if not is_run(start.dir):
            job.run.describe(job.config, job.hooks, fresh=fresh)
    job.dist.barrier()
    close = _log_to(_log_file(job))
    try:
        yield
    except ConfigError:
        close()
        if new and job.dist.main and not any(checkpoint.found(job.run.checkpoints)):
            shutil.rmtree(job.run.dir, ignore_errors=True)
        raise
    except Exception as error:
        job.hooks.accuse(error)
        if not isinstance(error, ForgeError):  # whose message says all there is to say
            log.error("The run failed.", exc_info=error, extra={"screen": False})
        raise
    finally:
        close()


def _log_file(job: Job) -> Path:
    return job.run.dir / "log" / f"rank-{job.dist.rank}.log"


def _log_to(file: Path) -> Callable[[], None]:
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)

    def close() -> None:
        log.removeHandler(handler)
        handler.close()

    return close
