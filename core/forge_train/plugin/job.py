"""The job, which every hook is given, and `job.hooks`: the run's plugins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..base.errors import PluginError, Problem
from ..contract.batch import CurrentStep, Preparation, PrepareBatch, PrepareStep
from ..contract.model import Precision
from ..contract.protocols import (
    Loader,
    Schedule,
)
from ..run.control import Control
from .calls import at_home
from .dispatch import Dispatch
from .guards import Prepare, first_state, preparing

if TYPE_CHECKING:
    import torch

    from ..config import Config
    from ..contract.events import CheckpointEvent, Evaluation, Finished, LogRecord, StepResult, Update
    from ..contract.model import Model
    from ..mesh.distributed import DistributedContext
    from ..run.run import Run

_T = TypeVar("_T")


class Hooks(Dispatch):
    """The enabled plugins of a run: `job.hooks`. Its methods check or combine the answers of the kernel's hooks; a hook
    without a method is called by its spec: `hookspecs.task(job)`."""

    _job: Job | None = None

    def bind(self, job: Job) -> None:
        """Give the job that hooks are called with."""
        self._job = job

    @property
    def job(self) -> Job:
        if self._job is None:
            raise PluginError("A hook was called before the job exists.")
        return self._job

    @property
    def run(self) -> Run | None:
        """The folder of the run, once there is a job."""
        return self._job.run if self._job else None

    def _ask(self, hook: str, **arguments: Any) -> Any:
        """Call one of the kernel's hooks; its spec takes the job, so it is defined after both."""
        return self.specs[hook](**arguments, job=self.job)

    def _each(self, hook: str, kind: type[_T] | tuple[type[Any], ...]) -> list[tuple[str, _T]]:
        """Everything that plugins answered, one thing or several each, with the plugin's name."""
        answers = self._calls.collect(hook, {"job": self.job})
        return [(n, one) for n, answer in answers for one in ([answer] if isinstance(answer, kind) else answer or ())]

    # -- the kernel's slots -----------------------------------------------------------------------

    def build_data(self, split: Literal["train", "validation"]) -> Loader:
        loader: Loader = self._ask("build_data", split=split)
        state = first_state(loader, self.whose("build_data"), self.inspection)
        if not isinstance(state.get("sequences"), int):
            raise PluginError(
                f"{self.whose('build_data')}: state_dict must have the integer 'sequences', found {state}."
            )
        return loader

    def lr_schedule(self, optimizer: torch.optim.Optimizer) -> Schedule:
        schedule: Schedule = self._ask("lr_schedule", optimizer=optimizer)
        first_state(schedule, self.whose("lr_schedule"), self.inspection)
        return schedule

    # -- its other hooks --------------------------------------------------------------------------

    def prepare_batch(self) -> Prepare:
        """All preparations as one function, for what a loader gives in a step: by phase, then by plugin name."""
        answers: list[tuple[str, Preparation]] = self._each("prepare_batch", (PrepareBatch, PrepareStep))
        return preparing(self.whose("build_data"), answers, self._calls, self.job.dist)

    def check_config(self, config: Config) -> list[Problem]:
        return [one for _, found in self._calls.collect("check_config", {"config": config}) for one in found or ()]

    # -- events; `only` is the one plugin to tell, for tools that tell them one by one ------------

    def on_start(self, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self._calls.announce("on_start", {"job": self.job, "model": model, "optimizer": optimizer})

    def on_gradients(self, update: Update) -> None:
        self._calls.tell("on_gradients", "update", update)

    def on_step(self, step: StepResult) -> None:
        self._calls.tell("on_step", "step", step)

    def on_log(self, record: LogRecord | Evaluation, only: str | None = None) -> None:
        self._calls.tell("on_log", "record", record, only)

    def on_checkpoint(self, event: CheckpointEvent, only: str | None = None) -> None:
        self._calls.tell("on_checkpoint", "event", event, only)

    def on_end(self, finished: Finished, only: str | None = None) -> None:
        self._calls.announce("on_end", {"finished": finished, "job": self.job}, only=only)


@dataclass(frozen=True)
class Job:
    """One run of this process, as plugins see it."""

    config: Config
    hooks: Hooks
    run: Run
    dist: DistributedContext
    control: Control
    extra: dict[str, Any] = field(default_factory=dict)
    """Models that a hook of the kit, `extra_models`, asked for, once they are composed: `Extra` by name."""
    step: CurrentStep = field(default_factory=CurrentStep)
    """The step under way, with its micro-batches."""

    @property
    def models(self) -> Mapping[str, Model]:
        """The extra models by name: of use once the run is composed, as in `task` and `on_start`."""
        return {name: extra.model for name, extra in self.extra.items()}

    @classmethod
    def of(cls, config: Config, hooks: Hooks, run: Run, dist: DistributedContext) -> Job:
        """A run on these processes; its plugins are told of it."""
        job = cls(config, hooks, run, dist, Control(dist))
        hooks.bind(job)
        return job

    @property
    def device(self) -> torch.device:
        return self.dist.device

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.train.total_steps

    def logs(self, step: int) -> bool:
        """Return True if a step's metrics are logged."""
        return step == self.steps or step % self.config.log.every == 0

    def record(self, path: Path | str, author: object) -> None:
        """Record a file that a plugin has written, or a folder of them, with size and hash: `forge runs show` lists it,
        and trackers may send it. It is read in the background, so it must not change any more.

        Args:
            path: in the run's folder, as `run.artifact` gives it, or elsewhere.
            author: the plugin (`self`), or an object of a class in its modules.

        Raises:
            FileNotFoundError: if there is no such file.
            PluginError: if there is no such plugin.
        """
        hooks = self.hooks
        names = [name for name, plugin in hooks.plugins.items() if plugin is author]
        names += [one.name for one in at_home(type(author).__module__, hooks.enabled.values())]
        if not names:
            raise PluginError(f"{type(author).__name__} belongs to no enabled plugin.")
        self.run.artifacts.record(Path(path), names[0], f"rank-{self.dist.rank}")

    @property
    def precision(self) -> Precision:
        return Precision.of(self.config.train.precision)
