"""The one typed way in which core, and plugins, call hooks: `job.hooks`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from ..base.errors import ConfigError, PluginError, Problem
from ..contract.attention import KernelCapabilities
from ..contract.batch import Preparation, PrepareBatch, PrepareStep
from ..contract.events import metric_key
from ..contract.extra import ExtraModel
from ..contract.metric import Metric
from ..contract.model import InitialWeights
from ..contract.protocols import (
    CheckpointCopies,
    EvaluatedWeights,
    Evaluator,
    Executor,
    Loader,
    LossScale,
    Schedule,
    Span,
    SpanName,
    Task,
    Tokenizer,
)
from ..contract.transform import Transform
from . import hookspecs
from .calling import Caller
from .guards import Guarded, Prepare, first_state, preparing
from .returns import kind_of

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from ..config import Config
    from ..contract.events import CheckpointEvent, Evaluation, Finished, LogRecord, StepResult, Update
    from ..contract.model import Model


class Hooks(Caller):
    """The enabled plugins of a run, with a typed method for each of the kernel's hooks."""

    # -- the kernel's slots -----------------------------------------------------------------------

    def build_model(self) -> nn.Module:
        return hookspecs.build_model(self.job)

    def build_data(self, split: Literal["train", "validation"]) -> Loader:
        loader = hookspecs.build_data(self.job, split)
        state = first_state(loader, self.whose("build_data"))
        if not isinstance(state.get("sequences"), int):
            raise PluginError(
                f"{self.whose('build_data')}: state_dict must have the integer 'sequences', found {state}."
            )
        return loader

    def tokenizer(self) -> Tokenizer:
        tokenizer = hookspecs.tokenizer(self.job)
        guard = Guarded(tokenizer, Tokenizer, self.whose("tokenizer"))
        guard.decode(guard.encode("a"))
        return tokenizer

    def task(self) -> Task:
        return hookspecs.task(self.job)

    def executor(self, model: Model, task: Task) -> Executor:
        return hookspecs.executor(model, task, self.job)

    def optimizer(self, model: Model) -> torch.optim.Optimizer:
        return hookspecs.optimizer(model, self.job)

    def lr_schedule(self, optimizer: torch.optim.Optimizer) -> Schedule:
        schedule = hookspecs.lr_schedule(optimizer, self.job)
        first_state(schedule, self.whose("lr_schedule"))
        return schedule

    def loss_scale(self) -> LossScale | None:
        return hookspecs.loss_scale(self.job) if self.provider("loss_scale") else None

    # -- its other hooks --------------------------------------------------------------------------

    def parallelize(self) -> list[tuple[str, Transform]]:
        """Every transform with the name of its plugin."""
        return self._each("parallelize", Transform)

    def prepare_batch(self) -> Prepare:
        """All preparations as one function, for what a loader gives in a step: by phase, then by plugin name."""
        answers: list[tuple[str, Preparation]] = self._each("prepare_batch", (PrepareBatch, PrepareStep))
        return preparing(self.whose("build_data"), answers, self._calls, self.job.dist)

    def span(self, name: SpanName) -> Span:
        """All context managers around a span, nested in order of plugin names, as one factory."""
        return hookspecs.around(name, self.job)

    def check_config(self, config: Config) -> list[Problem]:
        return [one for _, found in self._calls.collect("check_config", {"config": config}) for one in found or ()]

    def initial_weights(self, path: Path, model: Model) -> InitialWeights | None:
        return hookspecs.initial_weights(path, model, self.job)

    def extra_models(self) -> list[tuple[str, ExtraModel]]:
        return [(name, one) for name, found in hookspecs.extra_models(self.job) for one in found]

    def kernel_needs(self, config: Config) -> list[tuple[str, KernelCapabilities]]:
        """Return each plugin's needs of the attention kernel, labelled; without the data's if no data is read."""
        idle = self.provider("build_data") if self.opened else None
        answers = dict(self._calls.collect("kernel_needs", {"config": config}))
        return [(f"plugin {name!r} asks for it", one) for name, one in answers.items() if one and name != idle]

    def checkpoint_copies(self, config: Config, run: Path) -> CheckpointCopies:
        """Return the copies of the checkpoints of a run with this folder.

        Raises:
            ConfigError: if the configuration asks for copies that no plugin makes.
        """
        answers = self._calls.collect("checkpoint_copies", {"config": config, "run": run})
        given = [one for one in answers if one[1] is not None]
        if len(given) > 1:
            names, way_out = self._several(given)
            raise ConfigError(f"Plugins {names} both answer checkpoint_copies; {way_out}.")
        for key in ("folder", "mirror") if not given else ():
            if getattr(config.checkpoint, key):
                raise ConfigError(f"checkpoint.{key}: no enabled plugin makes copies; add --plugins copies.")
        return cast("CheckpointCopies", given[0][1]) if given else CheckpointCopies()

    def evaluators(self) -> list[tuple[str, Evaluator]]:
        """Every evaluator, with whose it is."""
        return [(self.whose("evaluators", name), one) for name, one in self._each("evaluators", Evaluator)]

    def evaluated_weights(self) -> dict[str, EvaluatedWeights]:
        """Plugin → its answer for the span `evaluate`, if that puts other weights in and says which.

        Raises:
            ConfigError: if several plugins do.
            PluginError: if terms are not numbers by name.
        """
        answers = self._calls.collect("around", {"span": "evaluate", "job": self.job})
        given = {name: one for name, one in answers if isinstance(one, EvaluatedWeights)}
        if len(given) > 1:
            names, way_out = self._several(list(given.items()))
            raise ConfigError(f"Plugins {names} both evaluate other weights than those trained; {way_out}.")
        kind = kind_of(Mapping[str, float])
        for name, one in given.items():
            if text := kind.problem(one.terms):
                raise PluginError(f"{self.whose('around', name)}: `terms` must be {kind.words}, {text}.")
        return given

    def metrics(self, model: Model) -> dict[str, Metric]:
        """Every plugin's metrics, as `plugin.name`."""
        found = hookspecs.metrics(model, self.job)
        return {metric_key(plugin, name): one for plugin, metrics in found for name, one in metrics.items()}

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
