"""Learning from another model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forge_train import (
    BatchPhase,
    ConfigError,
    Ge,
    Gt,
    Le,
    Phase,
    Plugin,
    Preparation,
    PrepareBatch,
    Problem,
    Task,
    Transform,
    Volatile,
    hookimpl,
    section,
)
from forge_train.config.schema import FilePath
from forge_train_kit.contract import ExtraModel
from forge_train_kit.hookspecs import loss

if TYPE_CHECKING:
    from forge_train import Job, Metric, Model, Span, SpanName
    from forge_train.config import Config as RunConfig
    from forge_train_kit.state_map import StateMap

    from ._distill.hidden import HiddenStates
    from ._distill.stored import StoredLogits

TEACHER, PROJECTION = "teacher", "hidden_projection"


class Distill(Plugin):
    """Next-token prediction from a teacher's soft targets and the labels (Hinton et al. 2015, arXiv:1503.02531).

    The teacher is frozen. It is built by the run's plugins, with the values that were saved with its weights, and
    sharded like the student. `distill.divergence` in the metrics is the mean divergence per token. Evaluation uses the
    loss on labels alone. It also gives the divergence on held-out data, and `distill.agreement`: the share of their
    tokens at which both models find the same one likeliest. If the teacher has moved, resume the run with its new path
    in `distill.weights` and `checkpoint.allow_changes = ["distill.weights"]`; its weights must be identical.
    """

    api = (1, 0)
    requires = ("loss",)

    @section
    class Config:
        weights: Annotated[str, FilePath()] = ""
        """The teacher: a run, or a checkpoint."""
        teacher: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
        """Values of the teacher, by section, as in `[distill.teacher.decoder]`. Those that are not given are the ones
        that were saved with its weights."""
        share: Annotated[float, Gt(0), Le(1)] = 0.5
        """Weight of the divergence from the teacher in the loss; the rest is the loss on labels."""
        divergence: Literal["forward", "reverse", "jensen_shannon"] = "forward"
        """forward is KL(teacher ‖ student): the student covers all that the teacher says. reverse is KL(student ‖
        teacher): it keeps to what the teacher finds likely (arXiv:2306.08543). jensen_shannon is the mean of both
        models' divergences from their mean (arXiv:2306.13649, eq. 1, with β = ½)."""
        temperature: Annotated[float, Gt(0)] = 1.0
        """Divides both models' logits in the divergence, which is multiplied by its square."""
        chunk: Annotated[int, Ge(0)] = 0
        """Tokens whose logits exist at once; 0 chooses by vocabulary and batch."""
        hidden: tuple[tuple[str, str], ...] = ()
        """Blocks of the student whose outputs are to be those of the teacher's, in pairs: `[["layers.*", "layers.*"]]`.
        Of n blocks that a pattern names, the i-th learns from the ⌈i · m / n⌉-th of the teacher's m."""
        hidden_loss: Literal["mse", "cosine"] = "mse"
        """mse is the mean over features of the squared difference (TinyBERT, arXiv:1909.10351, eq. 9), cosine is one
        less the cosine of both vectors (DistilBERT, arXiv:1910.01108)."""
        hidden_weight: Annotated[float, Gt(0)] = 1.0
        """Weight of the mean of `hidden_loss` over the pairs, which is added to the loss."""
        hidden_width: Annotated[int, Ge(0)] = 0
        """Width of the teacher's vectors, if a linear projection of the student's is to be learned and compared with
        them (TinyBERT's W_h), one for all pairs. Checkpoints hold it, and exports leave it out. With `train.init_from`,
        set `train.init_missing = ["hidden_projection.*"]`."""
        stored: Annotated[str, FilePath(), Volatile()] = ""
        """Folder of the log-probabilities of the teacher's likeliest tokens. What it lacks is computed before the first
        step; a run that finds it complete loads no teacher, so it needs neither its memory nor its time, and may be a
        pipeline."""
        top_k: Annotated[int, Ge(0)] = 0
        """Tokens of each position in `stored`. The divergence is that over these and all others together, which is
        exact for as many as the vocabulary has; without the others, the student would be biased towards the likeliest
        (arXiv:2503.16870)."""
        stored_dtype: Literal["fp16", "fp32"] = "fp16"
        """Of log-probabilities in `stored`: `top_k` × (4 + 2) + 2 bytes each token, or `top_k` × (4 + 4) + 4."""
        stored_sequences: Annotated[int, Ge(0), Volatile()] = 0
        """Sequences in `stored`, from the beginning of the run's data on; 0 for an epoch."""

    config: Config
    _observed: Mapping[str, Metric] | None = None
    _stored: StoredLogits | None = None
    _hidden: HiddenStates | None = None

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        mine = self.config
        if not mine.weights:
            yield Problem("distill.weights", "is required: the teacher's run or its checkpoint.")
        if mine.stored and not mine.top_k:
            yield Problem(
                "distill.top_k", "is required with distill.stored: how many tokens of each position to store."
            )
        for name, plain in (("hidden_loss", "mse"), ("hidden_weight", 1.0), ("hidden_width", 0)):
            if not mine.hidden and getattr(mine, name) != plain:
                yield Problem(f"distill.{name}", "has no effect without distill.hidden.")
        if mine.stored and mine.hidden:
            yield Problem("distill.hidden", "needs the teacher beside the student; leave distill.stored out.")
        if mine.stored:
            yield from self._check_folder(Path(mine.stored), config)
            return
        for name, plain in (("top_k", 0), ("stored_dtype", "fp16"), ("stored_sequences", 0)):
            if getattr(mine, name) != plain:
                yield Problem(f"distill.{name}", "has no effect without distill.stored.")

    def _check_folder(self, stored: Path, config: RunConfig) -> Iterator[Problem]:
        if stored.is_file():
            yield Problem("distill.stored", f"{stored} is a file; name a folder.")
        elif not stored.parent.is_dir():
            yield Problem("distill.stored", f"there is no folder {stored.parent}; make it first.", data=True)
        elif config.parallel.pp > 1:
            try:
                complete = self._is_complete(config)
            except ConfigError:  # told when the folder is read
                return
            if not complete:
                yield Problem(
                    "distill.stored",
                    f"{stored} is not complete, and a pipeline can't run the teacher beside the model; let a run with "
                    "parallel.pp = 1 and train.steps = 1 compute it first.",
                )

    @hookimpl
    def parallelize(self, job: Job) -> Transform | None:
        if not self.config.hidden_width:
            return None
        from ._distill.hidden import add_projection

        apply = partial(add_projection, width=self.config.hidden_width)
        return Transform(Phase.ADAPT, PROJECTION, apply, after=("freeze", "lora", "new_rows"))

    @hookimpl
    def merge_weights(self, job: Job) -> StateMap | None:
        from forge_train_kit.state_map import Drop

        return Drop((f"{PROJECTION}.weight",)) if self.config.hidden_width else None

    @hookimpl
    def extra_models(self, job: Job) -> Iterable[ExtraModel]:
        from forge_train_kit.facts import tuners
        from forge_train_kit.own_sections import own_sections

        mine, keys = self.config, "distill.weights, distill.teacher"
        own = [name for name, plugin in job.hooks.plugins.items() if plugin is self]  # a teacher has no projection
        if not (mine.stored and job.dist.on_main(lambda: self._is_complete(job.config))):
            sections = own_sections(job, mine.weights, mine.teacher)
            yield ExtraModel(TEACHER, sections, mine.weights, without=(*tuners(job), *own), keys=keys)

    @hookimpl
    def prepare_batch(self, job: Job) -> list[Preparation]:
        stored = self._logits(job)
        return [PrepareBatch(BatchPhase.MASK, stored)] if stored else []

    @hookimpl
    def around(self, span: SpanName) -> Span | None:
        return self._with_rows if span == "step" and self.config.stored else None

    @contextmanager
    def _with_rows(self) -> Iterator[None]:
        """Have the teacher fill the folder before the first step, and before what watches the time of steps begins."""
        if self._stored is not None and not self._stored.imagined:
            self._stored.obtain()
        yield

    @hookimpl
    def on_start(self, job: Job) -> None:
        """Compare the tokenizers.

        Raises:
            ConfigError: the teacher has another one.
        """
        from forge_train_kit.model_files import expect_same_words

        expect_same_words(job, self.config.weights, "distill.weights")

    @hookimpl
    def task(self, job: Job) -> Task:
        from ._distill.task import Distillation

        mine = self.config
        return Distillation(
            loss(job),
            job.models,
            mine.share,
            mine.temperature,
            mine.chunk,
            mine.divergence,
            lambda: self._observed,
            self._logits(job),
            mine.hidden_weight,
            lambda: self._hidden,
        )

    @hookimpl
    def metrics(self, model: Model, job: Job) -> Mapping[str, Metric]:
        from forge_train_kit.metrics import Ratio
        from forge_train_kit.model import is_imagined

        mine = self.config
        if self._stored is not None:
            self._stored.imagined = any(map(is_imagined, model.parameters()))
        self._observed = {"divergence": Ratio(), "agreement": Ratio()}
        if mine.hidden and TEACHER in job.models:
            from ._distill.hidden import HiddenStates

            self._hidden = HiddenStates(mine.hidden, mine.hidden_loss, model, job.models[TEACHER], job)
            self._observed = {**self._observed, "hidden": Ratio()}
        return self._observed

    def wanted(self, config: RunConfig) -> dict[Literal["train", "validation"], int]:
        """Return how many sequences of each split the run needs; 0 for an epoch."""
        train = config.train
        wanted: dict[Literal["train", "validation"], int] = {"train": self.config.stored_sequences}
        if train.evaluate_every:
            wanted["validation"] = train.evaluate_batches * train.global_batch
        return wanted

    def _logits(self, job: Job) -> StoredLogits | None:
        if self.config.stored and self._stored is None:
            from ._distill.stored import StoredLogits

            self._stored = StoredLogits(job, self)
        return self._stored

    def _is_complete(self, config: RunConfig) -> bool:
        from ._distill.manifest import lacks, read_manifest

        content = read_manifest(Path(self.config.stored))
        return not any(lacks(content, split, count, config.run.seed) for split, count in self.wanted(config).items())
