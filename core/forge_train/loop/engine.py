"""A run, from its configuration to how it ended."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from ..composition.compose import compose
from ..config.rules import Layout, world_size
from ..errors import ConfigError, DivergedError, ForgeError, describe
from ..events import Finished
from ..job import Job
from ..processes.distributed import DistributedContext
from ..registry.setup import Setup
from ..storage import checkpoint, disk, state
from ..storage.resume import compare
from ..storage.run import Run, Start, begin, is_run, plugin_list, write_json
from .control import Control, signals
from .out_of_memory import Memory
from .training import Training

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
        if start is None:
            start = dist.on_main(lambda: begin(config, run_dir, resume, notable))
        elif dist.place.attempt:
            start = start.again(saved=checkpoint.newest(start.dir / "checkpoints", dist) is not None)
        run, control = Run(start.dir), Control(dist)
        job = Job(config, hooks, run, dist, control)
        hooks.bind(job)
        found = _found(run, start, dist)
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
                with disk.writing(run.dir / "composition.json"):
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


def _record_failure(job: Job, training: Training | None, error: BaseException) -> None:
    """Write down how the run failed, and tell the plugins; the error goes on."""
    step, loss = (training.progress.step, training.loss) if training else (0, None)
    outcome = "diverged" if isinstance(error, DivergedError) else "failed"
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    refused = isinstance(error, ConfigError) and training is None  # and nothing of it is left in the folder
    ended = {"outcome": outcome, "step": step, "loss": loss, "code": getattr(error, "code", 1)}
    records: list[Callable[[], object]] = [lambda: job.hooks.on_error(error)]
    if job.dist.main and not refused:
        event = {"outcome": outcome, "loss": loss, "reason": reason}
        records = [lambda: job.run.event("run_finished", step, **event), lambda: job.run.end(ended), *records]
    full = isinstance(error, disk.DiskError)
    for record in records:
        try:
            record()
        except Exception as another:  # a full disk, or a plugin: what went wrong first is what is told
            told = log.info if full and isinstance(another, (OSError, disk.DiskError)) else log.warning
            told("Nor could it be recorded how the run ended: %s", describe(another))


def _found(run: Run, start: Start, dist: DistributedContext) -> Path | None:
    """The checkpoint that the run goes on from, of which every file was verified."""
    if start.checkpoint is not None:
        return checkpoint.whole(start.checkpoint, dist)
    saved = checkpoint.newest(run.checkpoints, dist) if start.continues else None
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
    handler = disk.LogFile(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)

    def close() -> None:
        log.removeHandler(handler)
        handler.close()

    return close
