"""The base of plugins whose task compares the model with a frozen reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from forge_train import (
    BatchPhase,
    ConfigError,
    Ge,
    Plugin,
    Preparation,
    PrepareBatch,
    Problem,
    Volatile,
    hookimpl,
    section,
)
from forge_train.config.schema import FilePath

from ..contract import ExtraModel

if TYPE_CHECKING:
    import torch

    from forge_train import Batch, CheckpointEvent, Job, Model, Span, SpanName, StepResult
    from forge_train.config import Config as RunConfig

    from .scores import AnswerScores
    from .stored import StoredReference

REFERENCE = "reference"
DIFFERS_BY = 20
"""The step by which a model has moved away from its reference, even with a long warm-up."""


@section
class ReferenceSection:
    """Options of every task that compares the model with a reference."""

    weights: Annotated[str, FilePath()] = ""
    """The reference: a run, or a checkpoint; empty for `train.init_from`."""
    reference: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Values of the reference, by section: `reference.decoder.rope.theta = 1e6`. With `weights`, those that are not
    given are the ones that were saved with them; otherwise they are the run's."""
    without: tuple[str, ...] = ()
    """Plugins that take no part in the reference. Those that tune a model, as an adapter does, never do."""
    stored: Annotated[str, FilePath(), Volatile()] = ""
    """File of the reference's log-probabilities. If it doesn't exist, the first step computes it for all answers; a
    run that finds it loads no reference, so it needs neither its memory nor its time, and may be a pipeline."""
    chunk: Annotated[int, Ge(0)] = 0
    """Tokens whose logits exist at once; 0 chooses by vocabulary and batch."""


class ReferencePlugin(Plugin):
    """A plugin whose task compares the model with a frozen reference, by default the weights that the run starts from.

    With adapters that can be switched off, the reference is the run's own model without them; otherwise it is a second
    model, or a file of its log-probabilities. The section is a `ReferenceSection`, and the task is an `AnswerScores`
    that is kept as `_task`.
    """

    key: ClassVar[str]
    """The plugin's section, for messages."""
    data: ClassVar[str]
    """Data plugin whose answers a file can hold, for messages."""
    member: ClassVar[str]
    """Target of its batches that is -1 in rows that do not count, `[batch]`."""
    config: Any
    _task: AnswerScores
    _model: Model
    _begins = True
    _stored: StoredReference | None = None

    @property
    def compares(self) -> bool:
        """True if the task needs a reference with this configuration."""
        return True

    def views(self, batch: Batch) -> tuple[Batch, ...]:
        """The batches whose answers the task compares, for a batch of the loader: itself, unless the plugin adds
        some."""
        return (batch,)

    def check_reference(self, config: RunConfig, who: str, key: str, otherwise: str = "") -> Iterator[Problem]:
        """Yield what is wrong with the reference: for `check_config`.

        Args:
            config: of the run.
            who: needs the reference.
            key: asks for it, unless `stored` does.
            otherwise: how a pipeline does without it.
        """
        start, weights, stored = config.train.init_from, self._weights(config), self.config.stored
        if config.parallel.pp > 1 and not self._is_stored():
            yield Problem(
                f"{self.key}.stored" if stored else key,
                f"{who} needs a reference, which a pipeline can't run beside the model; let a run with "
                f"parallel.pp = 1 and train.steps = 1 compute {stored or f'a file for {self.key}.stored'} "
                f"first{otherwise}.",
            )
        if stored and Path(stored).is_dir():
            yield Problem(f"{self.key}.stored", f"{stored} is a folder; name a file in it.")
        elif not Path(stored).parent.is_dir():
            yield Problem(f"{self.key}.stored", f"there is no folder {Path(stored).parent}; make it first.", data=True)
        if not weights:
            yield Problem(
                f"{self.key}.weights",
                "the run starts from random weights, which can't be its reference; name a model to start from (forge "
                "train MODEL, or train.init_from), or the run or checkpoint of another reference.",
                data=True,
            )
        elif (Path(weights) / "config.json").is_file():
            yield Problem(
                f"{self.key}.weights" if self.config.weights else "train.init_from",
                f"the reference is read from a run or a checkpoint, and {weights} is a Hugging Face folder; `forge "
                f"train {weights}` or `forge checkpoint import` makes a checkpoint of it.",
            )
        if start and config.train.init_map and not self.config.weights:
            yield Problem(
                "train.init_map",
                f"changes the model and not its reference; set {self.key}.weights to a checkpoint of it.",
            )

    @hookimpl
    def extra_models(self, job: Job) -> Iterable[ExtraModel]:
        from forge_train_kit.facts import tuners
        from forge_train_kit.own_sections import own_sections

        if self.compares and not self.is_own_reference(job) and not job.dist.on_main(self._is_stored):
            mine, weights = self.config, self._weights(job.config)
            without, keys = (*mine.without, *tuners(job)), f"{self.key}.weights, {self.key}.reference"
            sections = own_sections(job, mine.weights, mine.reference)  # else it is the run's start, as the run is
            yield ExtraModel(REFERENCE, sections, weights, without=without, keys=keys)

    @hookimpl
    def prepare_batch(self, job: Job) -> list[Preparation]:
        if not self.config.stored:
            return []
        from .stored import StoredReference

        self._stored = self._stored or StoredReference(job, self)
        return [PrepareBatch(BatchPhase.MASK, self._stored)]

    def look_at(self, model: Model) -> None:
        """Look whether the model is a plan's, for which nothing is read: for `metrics`."""
        from forge_train_kit.model import is_imagined

        if self._stored is not None:
            self._stored.imagined = any(map(is_imagined, model.parameters()))

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        """Compare the vocabularies; of a model that is its own reference, see that only its updates are trained.

        Raises:
            ConfigError: it is not so.
        """
        from forge_train_kit.model_files import expect_same_words

        self._model = model
        if self.compares and self.is_own_reference(job):
            self._check_trained(model)
        if (reference := job.models.get(REFERENCE)) is None:
            return
        mine, theirs = (one.parts[-1].get_submodule("head").out_features for one in (model, reference))
        if mine != theirs:
            raise ConfigError(
                f"{self.key}.reference: the reference's vocabulary has {theirs:,} tokens, but the model's has "
                f"{mine:,}; they must be equal."
            )
        expect_same_words(job, job.extra[REFERENCE].spec.weights, f"{self.key}.weights")

    @hookimpl
    def on_checkpoint(self, event: CheckpointEvent) -> None:
        self._begins = self._begins and event.kind != "loaded"

    @hookimpl
    def around(self, span: SpanName) -> Span | None:
        return self._as_reference if span == "step" else None

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        """See that a model that is its own reference begins as the reference.

        Raises:
            ConfigError: it begins with updates.
        """
        from forge_train.base.format import format_list
        from forge_train_kit.model import updated_already

        if self._begins and self._task.own_reference and (found := updated_already(self._model)):
            raise ConfigError(
                f"{self.key}.weights: the reference is the model without its updates, and the run begins with some of "
                f"{format_list(found, 2)}, so it is not where the run starts. Put that adapter beneath a new one, "
                "unless it has magnitudes (DoRA), start from the tuned model merged (forge checkpoint export), or name "
                "a reference.",
                key=f"{self.key}.weights",
            )
        self._begins = False
        yield

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        """See that the updates of a model that is its own reference are switched off.

        Raises:
            ConfigError: none of its scores ever differed from the reference's.
        """
        if step.step == DIFFERS_BY and self._task.own_reference and not self._task.moved:
            raise ConfigError(
                f"{self.key}: after {step.step} steps the reference still scores every answer as the model does. Its "
                "adapter is not switched off in `without_updates` (the fact hf.switches), or nothing is learned.",
            )

    def is_own_reference(self, job: Job) -> bool:
        """True if the reference is the model itself, with the updates of its adapters switched off."""
        from forge_train_kit.facts import SWITCHES, tuners

        mine, added = self.config, tuners(job, adding=True)
        switches = all(SWITCHES.of(job.hooks.enabled[name].cls) for name in added)
        return bool(added) and switches and not (mine.weights or mine.reference or mine.without or mine.stored)

    def _weights(self, config: RunConfig) -> str:
        return str(self.config.weights or config.train.init_from)

    def _is_stored(self) -> bool:
        return bool(self.config.stored) and Path(self.config.stored).is_file()

    def _check_trained(self, model: Model) -> None:
        from forge_train.base.format import format_list
        from forge_train_kit.model import trained_beside

        if trained := trained_beside(model):
            raise ConfigError(
                f"{self.key}.weights: the reference is the model without its updates, and {format_list(trained, 3)} "
                "is trained beside them; name the checkpoint that the run starts from, of which a copy is then made.",
                key=f"{self.key}.weights",
            )
