"""`forge eval --task`: tasks on a trained model, on one process or a layout of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from forge_train.base.errors import ConfigError
from forge_train.base.files import DiskError, check_new, disk_errors, write_whole
from forge_train.base.strict_json import dumps
from forge_train.compose.compose import compose
from forge_train.run.run import is_run
from forge_train_kit.format import format_number, format_plural
from forge_train_kit.starting import load_extra

from ..inference.infer import Inference
from ..launching.once import launch_once
from ..launching.world import here
from ..offline.opening import Source, run_folder
from ..offline.read_only import ReadOnlyRun
from ..process import prepared
from . import results
from .asking import Asked
from .generating import Generation
from .harness import YAML, Harness, open_harness
from .local_tasks import Answers, LocalTask, Sample, prepare, summary
from .paired import Difference, all_differences
from .results import TaskResult
from .task_files import open_file

Told = Callable[[str], None]
Prepared = Callable[[], tuple[list[LocalTask], Harness | None]]


class EvaluationOptions(TypedDict, total=False):
    """Some fields of `Evaluation`, as keywords."""

    limit: int
    batch: int
    samples: Path | None
    against: Path | None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Tasks on a model, as they were asked for.

    Args:
        path: a run, a checkpoint or a Hugging Face folder.
        tasks: files of tasks or of records.
        limit: records of each task; 0 takes all.
        batch: rows that pass through the model together.
        samples: folder for each request and answer; None keeps none.
        against: results to compare with: a run, a checkpoint or a folder of samples.
        plugins: to enable too; so is `set`, values to override.
    """

    path: Path
    tasks: tuple[str, ...]
    limit: int = 0
    batch: int = 8
    samples: Path | None = None
    against: Path | None = None
    plugins: tuple[str, ...] = ()
    set: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ConfigError(f"--limit: expected at least 0 (which means all), found {self.limit}.")

    def source(self, world: int) -> Source:
        """The weights and their configuration, with data left out."""
        asked = Inference(path=self.path, data=(), out=Path(), batch=self.batch, plugins=self.plugins, set=self.set)
        return asked.source(world)

    def prepared(self) -> tuple[list[LocalTask], Harness | None]:
        """The tasks of all files, and those of lm-evaluation-harness.

        Raises:
            ConfigError: one can't be asked, two have the same name, or there is something where samples would be.
        """
        if self.samples is not None:
            check_new(self.samples)
        local = [one for one in self.tasks if Path(one).suffix and Path(one).suffix not in YAML]
        found = [prepare(one) for task in local for one in open_file(_file(task), self.limit)]
        others = tuple(one for one in self.tasks if one not in local)
        harness = open_harness(others, self.limit) if others else None
        names = [one.file.name for one in found] + (harness.names if harness else [])
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"--task: two tasks are named {min(twice)!r}; rename a table or a file.")
        return found, harness


@dataclass(frozen=True)
class EvaluatedTasks:
    """Results of all tasks on a model."""

    checkpoint: str
    step: int
    world: int
    tasks: dict[str, TaskResult]
    recorded: str = ""
    """Folder of the run that has them; empty for a model without a run."""
    differences: dict[str, dict[str, Difference]] | None = None
    """By task and metric, from `against`."""

    def plain(self) -> dict[str, Any]:
        """As JSON, without what each record contributes."""
        found = {**vars(self), "tasks": {name: one.plain(whole=False) for name, one in self.tasks.items()}}
        if self.differences is None:
            del found["differences"]
        else:
            found["differences"] = {
                task: {name: dataclasses.asdict(one) for name, one in table.items()}
                for task, table in self.differences.items()
            }
        return found


def evaluate_tasks(asked: Evaluation, *, nproc: int = 1, told: Told = lambda text: None) -> EvaluatedTasks:
    """Evaluate a model on tasks. The results are written to its run, if it has one.

    Args:
        asked: the job.
        nproc: local processes to use, including this one.
        told: is given a line about each task; only with one process.

    Raises:
        ConfigError: for a path, a task or a record that can't be, before anything is computed.
        ForgeError: with the message of the rank that failed first.
    """
    tasks = asked.prepared()  # before a model is composed, and so that a mistake is reported only once
    before = None if asked.against is None else results.read(asked.against)  # of the same run too, until they are new
    found = _evaluate(asked, lambda: tasks, told) if nproc == 1 else _on_several(asked, nproc)
    return found if before is None else dataclasses.replace(found, differences=all_differences(found.tasks, before))


def _on_several(asked: Evaluation, nproc: int) -> EvaluatedTasks:
    asked.source(nproc)
    found = dict(launch_once(f"{__name__}:worker", {"asked": _plain(asked)}, nproc)["evaluated"])
    return EvaluatedTasks(**found | {"tasks": {one["name"]: TaskResult.of(one) for one in found["tasks"]}})


def worker(asked: dict[str, Any]) -> dict[str, Any]:
    """The work of each process."""
    tuples = {name: tuple(asked[name]) for name in ("tasks", "plugins", "set")}
    paths = {name: Path(asked[name]) for name in ("path", "samples") if asked[name] is not None}
    job = Evaluation(**(asked | tuples | paths | {"against": None}))
    found = _evaluate(job, job.prepared)
    return {"code": 0, "evaluated": {**vars(found), "tasks": [one.plain(whole=True) for one in found.tasks.values()]}}


def _plain(asked: Evaluation) -> dict[str, Any]:
    return {name: str(one) if isinstance(one, Path) else one for name, one in dataclasses.asdict(asked).items()}


def _evaluate(asked: Evaluation, prepared_tasks: Prepared, told: Told = lambda text: None) -> EvaluatedTasks:
    """Do it on this process alone, or on one of those that a launcher started."""
    world = here().size
    source = asked.source(world)
    with prepared(source.setup, ReadOnlyRun(run_folder(source.path))) as job:
        model = compose(job).model
        answering = Asked(job, model, asked.batch)
        load_extra(job)
        source.load(model, job)
        job.dist.settle(job.config.run.timeout)  # data is opened by one process, while the others wait
        found = answering.lead(partial(_lead, asked, prepared_tasks, told))
        recorded = job.dist.on_main(partial(_record, source.path, found)) if source.saved is not None else ""
    return EvaluatedTasks(str(source.path), source.step, world, {one.name: one for one in found}, recorded)


def _lead(asked: Evaluation, prepared_tasks: Prepared, told: Told, answering: Asked) -> list[TaskResult]:
    """The work of the main process."""
    tasks, harness = prepared_tasks()
    for one in tasks:
        answering.check(one.questions.pairs, one.questions.texts, one.questions.prompts, one.questions.shown)
    if harness is not None and harness.writes:
        answering.check((), (), [Generation("", 1)])
    found = []
    for task in tasks:
        told(f"{task.file.name}: {format_plural(len(task.file.records), 'record')}")
        questions = task.questions
        answers = Answers(
            answering.log_likelihoods(questions.pairs, questions.shown),
            answering.rolling(questions.texts),
            answering.generate(questions.prompts),
        )
        metrics, samples = task.result(answers)
        found.append(_kept(asked, summary(task, metrics, answers), samples))
    if harness is not None:
        told(f"lm-eval: {', '.join(harness.names)}")
        found += [_kept(asked, one, samples) for one, samples in harness.run(answering)]
    return found


def _kept(asked: Evaluation, one: TaskResult, samples: Sequence[Sample]) -> TaskResult:
    """Write a task's samples and its result where they are wanted, once they are there."""
    if asked.samples is not None:
        with _numbers_stay(asked.samples, [one]):
            results.write(asked.samples, one)
            lines = (f"{dumps({'record': at, **sample})}\n" for at, sample in enumerate(samples))
            write_whole(asked.samples / results.file_name(one.name, "jsonl"), "".join(lines))
    return one


def _record(checkpoint: Path, found: Sequence[TaskResult]) -> str:
    """Write the results to the checkpoint's run; gives their folder."""
    if not is_run(run := run_folder(checkpoint)):
        return ""
    folder = run / results.FOLDER / checkpoint.name
    with _numbers_stay(folder, found):
        for one in found:
            results.write(folder, one)
    return str(folder)


@contextmanager
def _numbers_stay(folder: Path, found: Sequence[TaskResult]) -> Iterator[None]:
    """A block that writes results to a folder.

    Raises:
        DiskError: the disk refuses; with the numbers, which may have taken hours.
    """
    try:
        with disk_errors(folder):
            yield
    except DiskError as error:
        numbers = (
            f"{one.name} {name} {format_number(value.value)}" for one in found for name, value in one.metrics.items()
        )
        raise DiskError(f"{error}\nComputed and not written: {', '.join(numbers)}.") from error


def _file(task: str) -> Path:
    path = Path(task)
    if not path.exists():
        raise ConfigError(f"--task: there is no file {task}.")
    return path
