"""The reference's log-probabilities in a file: computed once, and looked up by the tokens of each answer."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from forge_train import MASKED, Batch, ConfigError, Job
from forge_train.base.files import write_json

from .. import hookspecs
from ..foreign import resolve
from ..model import answers_of, row_log_probabilities
from ..stored import weights_digest
from .plugin import REFERENCE, ReferencePlugin

TARGET = "reference_log_probability"
"""The target with the summed log-probability of each answer, `[batch]` fp64; `[batch, answers]` where rows hold several
pairs."""
Split = Literal["train", "validation"]


_log = logging.getLogger("forge_train")


@contextmanager
def _warned_already() -> Iterator[None]:
    """A block without warnings: the run has built the same data before, and given them."""

    def other(record: logging.LogRecord) -> bool:
        return record.levelno != logging.WARNING

    _log.addFilter(other)
    try:
        yield
    finally:
        _log.removeFilter(other)


@dataclass
class StoredReference:
    """Adds the reference's log-probabilities to each batch; in its first call, reads the file or makes it.

    An answer is known by a hash of its labels and of the tokens before them, so the file depends neither on the order
    of batches nor on the layout that computed it.

    Args:
        job: the run.
        plugin: whose answers these are.
    """

    job: Job
    plugin: ReferencePlugin
    imagined: bool = False
    """True in a plan, whose model and data are not there."""
    _known: dict[str, float] = field(default_factory=dict)
    _keys: list[str] | None = None
    """Of the batch that the reference is about to see, while the file is computed."""

    def __call__(self, batch: Batch) -> Batch:
        answers = answers_of(batch)
        shape = batch.inputs.shape[:1] if answers is None else (len(batch.inputs), answers[1])
        if self.imagined:
            return batch.with_targets({TARGET: batch.inputs.new_zeros(shape, dtype=torch.float64)})
        keys = [*_keys(batch, answers)]
        if self._keys is not None:
            self._keys = keys
            return batch
        if not self._known:
            self._known = {"": 0.0, **self._obtained()}  # padding has no key
        if not self._known.keys() >= {*keys}:
            plugin = self.plugin
            raise ConfigError(
                f"{plugin.key}.stored: {plugin.config.stored} has no log-probability for an answer of the data."
            )
        found = [self._known[key] for key in keys]
        return batch.with_targets({TARGET: torch.tensor(found, dtype=torch.float64).view(shape)})

    def _obtained(self) -> dict[str, float]:
        """The file's content, which the reference computes where there is no file.

        Raises:
            ConfigError: if the file is of another reference, or of other data.
        """
        file, job = Path(self.plugin.config.stored), self.job
        splits: tuple[Split, ...] = ("train", "validation") if job.config.train.evaluate_every else ("train",)
        with _warned_already():
            loaders = {split: job.hooks.build_data(split) for split in splits}
        data = {
            split: {key: value for key, value in one.state_dict().items() if key != "sequences"}
            for split, one in loaders.items()
        }
        tokenizer = hookspecs.tokenizer(job).digest if job.hooks.provider("tokenizer") else ""
        made_of = {"reference": self._reference_digest(), "tokenizer": tokenizer}
        if (reference := job.models.get(REFERENCE)) is not None:
            known: dict[str, float] = {}
            self._keys = []
            for split, loader in loaders.items():
                for batch in self._epoch(loader, split):
                    for one in self.plugin.views(batch):
                        known |= self._computed(reference, one)
            self._keys = None
            reference.free_gathered()
            known = {key: value for part in reversed(job.dist.gather_objects(known)) for key, value in part.items()}
            content: dict[str, Any] = {
                "made_of": made_of,
                "data": data,
                "log_probabilities": dict(sorted(known.items())),
            }
            job.dist.on_main(lambda: write_json(file, content))
        else:
            content = job.dist.on_main(lambda: read(file, f"{self.plugin.key}.stored"))
            for name, what in (("reference", "another reference"), ("tokenizer", "another tokenizer")):
                if content["made_of"][name] != made_of[name]:
                    raise ConfigError(f"{self.plugin.key}.stored: {file} was computed with {what}; name a new file.")
            for split, identity in data.items():
                if content["data"].get(split) != identity:
                    raise ConfigError(
                        f"{self.plugin.key}.stored: {file} was computed from other {split} data, or with another "
                        "template, tokenizer, packing or train.sequence; name a new file."
                    )
        found: dict[str, float] = content["log_probabilities"]
        return found

    def _reference_digest(self) -> str:
        """Identifies the reference: its weights, the sections that make a model of them, and its precision."""
        job, mine = self.job, self.plugin.config
        weights = weights_digest(resolve(Path(mine.weights or job.config.train.init_from), job.dist))
        provider = job.hooks.provider("build_model")
        section = asdict(job.config.sections[provider]) if provider else {}
        parts = (weights, provider, section, dict(mine.reference), mine.without, job.config.train.precision)
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def _epoch(self, loader: Any, split: Split) -> Iterator[Batch]:
        """Micro-batches of this rank that cover all pairs, as many on every rank."""
        dist, epoch = self.job.dist, int(getattr(loader, "epoch", None) or 0)
        first = next(loader)
        plugin, rows = self.plugin, self.plugin.member
        if rows not in first.targets or (split == "train" and not epoch):
            raise ConfigError(f"{plugin.key}.stored: these data don't say where they end; use those of {plugin.data}.")
        each = self.job.config.train.micro_batch * dist.data_ranks
        rest = range(each, epoch, each) if split == "train" else count()
        yield first
        last = first
        for _ in rest:
            padding = (last.targets[rows].view(len(last.inputs), -1) < 0).all(1)  # packed rows are partly filled
            if split == "validation" and any(dist.gather_objects(bool(padding.any()))):
                return
            yield (last := next(loader))

    @torch.no_grad()
    def _computed(self, reference: Any, batch: Batch) -> Mapping[str, float]:
        """Log-probabilities of a batch's answers, by their keys."""
        job = self.job
        batch = job.hooks.prepare_batch()([batch], 0)[0].to(job.device)
        hidden = reference(batch.inputs, **batch.model_inputs())
        head = reference.parts[-1].get_submodule("head")
        chunk = self.plugin.config.chunk
        answers = answers_of(batch)
        sums, _ = row_log_probabilities(hidden, head, batch.labels, job, chunk=chunk, gathered=True, answers=answers)
        return {key: value for key, value in zip(self._keys or (), sums.tolist(), strict=True) if key}


def _keys(batch: Batch, answers: tuple[Tensor, int] | None) -> Iterator[str]:
    """A key for each answer of a batch: the same whether it has a row for itself or not."""
    for row, (inputs, labels) in enumerate(zip(batch.inputs, batch.labels, strict=True)):
        if answers is None:
            yield answer_key(inputs, labels)
            continue
        for number in range(answers[1]):
            own = answers[0][row] == number
            yield answer_key(inputs[own], labels[own])


def answer_key(inputs: Tensor, labels: Tensor) -> str:
    """A hash of a row up to its last label; empty for padding."""
    learned = (labels != MASKED).nonzero()
    if not len(learned):
        return ""
    end = int(learned[-1]) + 1
    both = torch.stack([inputs[:end], labels[:end]]).numpy()
    return hashlib.blake2b(both.tobytes(), digest_size=16).hexdigest()


def read(file: Path, key: str) -> dict[str, Any]:
    """The content of a file, which a key of the configuration names.

    Raises:
        ConfigError: if it is no such file.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if {"made_of", "data", "log_probabilities"} <= content.keys():
            return dict(content)
    except (ValueError, AttributeError):
        pass
    raise ConfigError(f"{key}: {file} holds no log-probabilities of a reference.")
