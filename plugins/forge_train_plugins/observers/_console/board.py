"""The state of a run for display: facts from its start, and the latest of everything since."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forge_train.run.records import METRICS
from forge_train_kit.format import format_count, format_length, format_number, format_phase

if TYPE_CHECKING:
    from forge_train import Evaluation, Finished, Job, LogRecord, Model

KEPT = 512
"""Points of the loss curve; more are halved by taking the mean of neighbours."""


@dataclass
class Board:
    """A run as its watcher sees it."""

    name: str
    folder: str
    size: str
    """Device, parameters, how much is to be done."""
    plugins: list[str]
    """Plugins in the slots, each with its non-default options."""
    phases: list[str]
    """Transforms applied to the model, in order."""
    steps: int
    first: int = 0
    """The step it continued from."""
    step: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    evaluation: Evaluation | None = None
    saved: int | None = None
    finished: Finished | None = None
    failed: bool = False
    began: float = field(default_factory=time.perf_counter)
    _share: int = 1
    """Logged losses per point of the curve."""
    _waiting: list[float] = field(default_factory=list)
    _mark: tuple[int, float] | None = None
    """Step and time from which speed is reckoned: that of the first logged step, which pays for warming up."""

    @classmethod
    def of(cls, job: Job, model: Model) -> Board:
        return cls(job.run.id, str(job.run.dir), _size(job, model), list(_filled(job)), list(_phases(job)), job.steps)

    def resume(self, step: int) -> None:
        """The run continues from here."""
        self.first = self.step = step
        self._mark = None

    def log(self, record: LogRecord) -> None:
        self.step, self.steps, self.metrics = record.step, record.steps, record.metrics
        if self._mark is None:
            self._mark = (record.step, time.perf_counter())
        self._waiting.append(float(record.metrics["loss"]))
        if len(self._waiting) == self._share:
            self.losses.append(sum(self._waiting) / self._share)
            self._waiting.clear()
        if len(self.losses) == KEPT:
            self.losses = [(a + b) / 2 for a, b in zip(self.losses[::2], self.losses[1::2], strict=True)]
            self._share *= 2

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    @property
    def left(self) -> float:
        """Seconds to the end at the pace so far, evaluations and checkpoints included; NaN before the first log."""
        if self._mark is None:
            return float("nan")
        step, then = self._mark
        if self.step > step:
            pace = (time.perf_counter() - then) / (self.step - step)
        else:
            pace = float(self.metrics["step_seconds"])
        return pace * (self.steps - self.step)

    @property
    def held_out(self) -> list[tuple[str, float]]:
        """Return the latest evaluation as words and values, the best-known metric first."""
        if self.evaluation is None:
            return []
        lasts = ["loss", *(key.rpartition(".")[2] for key in self.evaluation.metrics)]
        found = [("loss", self.evaluation.loss)]
        for key, value in self.evaluation.metrics.items():
            last = key.rpartition(".")[2]
            words = last if lasts.count(last) == 1 else key.replace(".", " ")  # each source's loss, say
            found.append((words.replace("_", " "), value))
        return found

    @property
    def extras(self) -> dict[str, float]:
        """The numbers that plugins added to the newest line."""
        return {
            key: value
            for key, value in self.metrics.items()
            if key not in METRICS and isinstance(value, (int, float)) and not isinstance(value, bool)
        }


def _size(job: Job, model: Model) -> str:
    from forge_train_kit.model import elements_trained  # which imports torch

    train = job.config.train
    count = sum(parameter.numel() for parameter in model.parameters())
    trained = elements_trained(model)
    later = any(0 in getattr(module, "trained_at_first", {}).values() for _, module in model.named_modules())
    share = "" if trained == count else f", {format_count(trained)} trained{' at first' if later else ''}"
    ranks = f" · {job.dist.world} process{'es' if job.dist.world > 1 else ''}"
    here = " on this rank" if job.dist.layout.pp > 1 else ""
    precision = "" if train.precision == "fp32" else f" · {train.precision}"
    growing = f"{train.batches[0] * train.sequence:,} to " if train.batch_warmup else ""
    return (
        f"{_device(job)}{ranks}{precision} · {format_count(count)} parameters{share}{here} · "
        f"{format_length(train.epochs, job.steps)} of {growing}{train.tokens_per_step:,} tokens"
    )


def _device(job: Job) -> str:
    if job.device.type != "cuda":
        return str(job.device)
    import torch

    return torch.cuda.get_device_name(job.device)


def _filled(job: Job) -> Iterator[str]:
    """`decoder dim=128 layers=3` for every plugin that fills a slot or chain, or that the model asks: the model's parts
    first, then the others, both in the order of hooks."""
    specs = [spec for spec in job.hooks.specs.values() if spec.kind in ("slot", "chain") or spec.asked == "composition"]
    specs.sort(key=lambda spec: spec.asked != "composition")
    for name in dict.fromkeys(name for spec in specs for name in job.hooks.acting(spec.name)):
        yield " ".join([name, *changed(job.config.sections[name])])


def changed(section: Any) -> Iterator[str]:
    """The values of a section that are not its defaults, as `--set` takes them."""
    for one in dataclasses.fields(section):
        value = getattr(section, one.name)
        made = one.default_factory
        default = made() if made is not dataclasses.MISSING else one.default
        if value != default and not dataclasses.is_dataclass(value):
            yield f"{one.name}={_value(value)}"


FEW = 3
"""Entries of a table that are shown; more would fill the line."""


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple) and value and all(map(dataclasses.is_dataclass, value)):
        return str(len(value))  # of tables, which would fill the line
    if isinstance(value, tuple):
        return ",".join(map(_value, value))
    if isinstance(value, Mapping):
        entries = [f"{key}={_value(one)}" for key, one in value.items()]
        return f"{{{', '.join(entries) if len(entries) <= FEW else f'{len(entries)} keys'}}}"
    return format_number(value) if isinstance(value, float) else str(value)


def _phases(job: Job) -> Iterator[str]:
    file = job.run.dir / "composition.json"
    for entry in json.loads(file.read_text(encoding="utf-8")) if file.is_file() else ():
        names = dict.fromkeys([format_phase(entry["phase"], entry["slot"]).lower(), entry["plugin"]])
        yield f"{' '.join(names)} ({len(entry['matched'])})"
