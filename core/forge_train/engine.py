"""A run, from its configuration to how it ended."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from .base.errors import ConfigError, DivergedError, ForgeError, describe
from .base.files import DiskError, disk_errors, plain, remove_remains, write_json
from .checkpoint import checkpoint
from .compose.compose import Composition
from .contract.events import Finished, Outcome
from .contract.model import Model
from .loop.assembly import assemble, joined, prepare_process
from .loop.describe import describe_run
from .loop.resume import compare
from .loop.saver import Saver
from .loop.training import Training
from .loop.weights import Weights
from .plugin.job import Job
from .registry.setup import Setup
from .run.run import Run, is_kept, is_run
from .run.start import Start
from .step.step import Watcher

log = logging.getLogger("forge_train")


def train(
    setup: Setup,
    *,
    run_dir: Path = Path("runs"),
    resume: str = "auto",
    notable: tuple[str, ...] = (),
    start: Start | None = None,
    watcher: Watcher | None = None,
) -> Finished:
    """Train as configured, and say how it ended.

    Args:
        setup: a checked configuration and its plugins.
        run_dir: where run folders are made.
        resume: `auto`, `never`, or the path of a run or a checkpoint.
        notable: plugins to name in a new run's id.
        start: where the run begins, if the process that started this one has claimed it.
        watcher: who looks at the run from inside.

    Raises:
        ForgeError: for what the user can mend; anything else is a plugin's, or forge's, fault.
    """
    config, hooks = setup.config, setup.hooks
    with ExitStack() as stack:
        dist = stack.enter_context(joined(setup))
        if start is None:
            start = stack.enter_context(setup.claim(dist, config, run_dir, plain(resume), notable))
        elif dist.place.attempt:
            start = start.again(saved=checkpoint.newest(start.dir / "checkpoints", dist) is not None)
        run = Run(start.dir, start.check_lock, setup.recorder)
        job = Job.of(config, hooks, run, dist)
        saver: Saver = (setup.saver or Saver)(job)
        weights: Weights = (setup.weights or Weights)(job)
        found = _found(job, start, saver)
        setup.check_allowed(job, found)
        if found is not None:  # before anything is written: a refused run stays as it is
            setup.tell_changes(job, found, compare(job, found))
        if finished := dist.on_main(lambda: _finished_before(job, saver, start)):
            return finished
        prepare_process(job)
        fresh, known = found is None or not start.continues, is_run(run.dir)
        stack.enter_context(_opened(job, setup, start))
        stack.callback(run.artifacts.settle)
        training: Training | None = None
        model: Model | None = None

        def allocate(composition: Composition, job: Job) -> None:
            nonlocal model
            model = composition.model
            composition.allocate(job)
            weights.start_extra(found)
            if dist.main:
                setup.tell_idle(job, composition.idle)
                if known and fresh:  # not before the new layout has been found to hold it
                    setup.start_over(job)
                with disk_errors(run.dir / "composition.json"):
                    write_json(run.dir / "composition.json", composition.report)

        try:
            describe = partial(describe_run, run, setup, fresh=fresh)
            training = Training(
                assemble(job, watcher, allocate), setup, weights, saver, describe if known and dist.main else None
            )
            stack.callback(training.close)
            stack.enter_context(setup.listen(job.control))
            training.start(found)
            return training.run()
        except BaseException as error:
            hooks.note_plugin(error, hooks.enabled.values(), hooks.specs)
            shown = _record_failure(job, setup, training, model, error)
            if shown is not error:
                raise shown from error
            raise


def _record_failure(
    job: Job, setup: Setup, training: Training | None, model: Model | None, error: BaseException
) -> BaseException:
    """Write down how the run failed, and tell the plugins. Returns the error to show: this one, or one that a plugin
    explains it by."""
    step, loss, optimizer = (
        (training.progress.step, training.loss, training.stepper.optimizer) if training else (0, None, None)
    )
    outcome: Outcome = "diverged" if isinstance(error, DivergedError) else "failed"
    code, began, rank = getattr(error, "code", 1), time.time(), job.dist.rank
    finished = Finished(outcome, step, loss, code, job.run.dir, describe(error), error=error)
    finished.model, finished.optimizer = model, optimizer
    finished.log = file if (file := _log_file(job)).is_file() else None
    refused = isinstance(error, ConfigError) and not (training and (training.stepped or not job.run.outcome()))
    full = isinstance(error, DiskError)

    def record(write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as another:  # a full disk, or a plugin: what went wrong first is what is told
            told = log.info if full and isinstance(another, (OSError, DiskError)) else log.warning
            told("Nor could it be recorded how the run ended: %s", describe(another))

    if job.dist.main and not refused:
        record(lambda: job.run.fail(setup.failure(error, rank), code, step, loss))
    for name in job.hooks.implementers("on_end"):  # one that fails keeps no other from closing its files
        if not (training and name in training.told_of_end):
            record(partial(job.hooks.on_end, finished, only=name))
    shown = finished.error or error
    if finished.explained:
        log.error("The run failed.", exc_info=error, extra={"screen": False})
        if job.dist.main and not refused:
            record(lambda: job.run.fail_again(setup.failure(shown, rank), finished.code, step, since=began))
    return shown


def _found(job: Job, start: Start, saver: Saver) -> Path | None:
    """The checkpoint that the run continues from, of which every file was verified; one elsewhere, if it is newer."""
    config, run, dist = job.config, job.run, job.dist
    if start.checkpoint is not None:
        return checkpoint.resolve(start.checkpoint, dist)
    if start.continues:
        dist.on_main(lambda: remove_remains(run.checkpoints))
    saved = checkpoint.newest(run.checkpoints, dist) if start.continues else None
    if not (config.run.name or start.continues):  # nobody else has the name of such a run
        return None
    path, after = (saved.path, saved.step) if saved else (None, -1)
    return dist.on_main(lambda: saver.bring(after=after)) or path


def _finished_before(job: Job, saver: Saver, start: Start) -> Finished | None:
    """Return the result of a run that had already finished; None for other runs."""
    if not start.continues:
        return None
    outcome = job.run.outcome()
    if outcome.get("outcome") != "done" or outcome["step"] < job.steps:
        return None
    saver.finished()
    reason = f"the run had finished before: {outcome['step']} steps. Train longer with -s {job.config.train.length}=…"
    return Finished("done", outcome["step"], outcome["loss"], 0, start.dir, reason)


@contextmanager
def _opened(job: Job, setup: Setup, start: Start) -> Iterator[None]:
    """Open the run folder and its log; a mistake found while composing removes a new folder again."""
    if job.dist.main:
        job.run.open()
        if not is_run(start.dir):
            describe_run(job.run, setup, fresh=True)
    job.dist.barrier()
    try:
        with setup.log_to(_log_file(job)):
            for note in start.notes if job.dist.main else ():
                log.warning(note)
            try:
                yield
            except Exception as error:
                job.hooks.note_plugin(error, job.hooks.enabled.values(), job.hooks.specs)
                if not isinstance(error, ForgeError):  # whose message says all there is to say
                    log.error("The run failed.", exc_info=error, extra={"screen": False})
                raise
    except ConfigError:
        if start.new and job.dist.main and not is_kept(job.run.dir):
            shutil.rmtree(job.run.dir, ignore_errors=True)
        raise


def _log_file(job: Job) -> Path:
    return job.run.dir / "log" / f"rank-{job.dist.rank}.log"
