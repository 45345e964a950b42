"""A teacher's likeliest tokens in a folder: computed once, and looked up by the tokens of each row."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from forge_train import MASKED, Batch, ConfigError, Job
from forge_train.base.format import format_bytes
from forge_train.checkpoint.checkpoint import resolve
from forge_train.contract.batch import TOKENS
from forge_train.step.forward import close
from forge_train_kit import hookspecs
from forge_train_kit.data.stages import sequences
from forge_train_kit.facts import tuners
from forge_train_kit.stored import weights_digest

from ..distill import TEACHER
from .divergence import top_of
from .folder import Rows, Writer, hashes, number_of, parts, row_keys
from .manifest import lacks, read_manifest, write_manifest

if TYPE_CHECKING:
    from ..distill import Distill

log = logging.getLogger("forge_train")

TOKENS_OF, VALUES_OF = "teacher_tokens", "teacher_log_probabilities"
"""Targets: the teacher's likeliest tokens `[batch, sequence, k]`, and the log-probabilities of these and of all others
together, `[batch, sequence, k + 1]`."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
TELL_AFTER = 30.0
"""Seconds."""
Split = Literal["train", "validation"]


@dataclass
class StoredLogits:
    """Adds what the teacher says to each batch; before that, reads the folder or has the teacher fill it.

    A row is known by a hash of what the model and the task are given, so the folder depends neither on the order of
    batches nor on the layout that computed it.
    """

    job: Job
    plugin: Distill
    vocabulary: int = 0
    """Tokens that the teacher knows."""
    imagined: bool = False
    """True in a plan, whose model and data are not there."""
    _rows: Rows | None = None
    _seen: list[tuple[list[int], Tensor]] | None = None
    """Keys and unmasked positions of the batch that the teacher is about to see, while the folder is filled."""

    @property
    def folder(self) -> Path:
        return Path(self.plugin.config.stored)

    def __call__(self, batch: Batch) -> Batch:
        k, dtype = self.plugin.config.top_k, DTYPES[self.plugin.config.stored_dtype]
        kept, device = batch.labels != MASKED, batch.inputs.device
        tokens = torch.zeros((*batch.inputs.shape, k), dtype=torch.int32, device=device)
        values = torch.zeros((*batch.inputs.shape, k + 1), dtype=dtype, device=device)
        if not self.imagined:
            keys = row_keys(batch)
            if self._seen is not None:
                self._seen.append((keys, kept))
                return batch
            rows = self.obtain()
            if not all(map(rows.has, keys)):
                raise ConfigError(
                    f"distill.stored: {self.folder} has no log-probabilities for a sequence of the data; name a new "
                    "folder."
                )
            for row, key in enumerate(keys):
                if key:
                    tokens[row, kept[row]], values[row, kept[row]] = rows.row(key)
        return batch.with_targets({TOKENS_OF: tokens, VALUES_OF: values}, TOKENS)

    def obtain(self) -> Rows:
        """The rows of the folder, which the teacher fills where it lacks some.

        Raises:
            ConfigError: if the folder is of another teacher, of other data, or damaged.
        """
        if self._rows is None:
            loaders = {split: self.job.hooks.build_data(split) for split in self.plugin.wanted(self.job.config)}
            try:
                self._rows = self._obtained(loaders)
            finally:
                for loader in loaders.values():
                    close(loader)
        return self._rows

    def _obtained(self, loaders: Mapping[Split, Any]) -> Rows:
        job, dist = self.job, self.job.dist
        data = {split: _identity(loader, job.config.train.sequence) for split, loader in loaders.items()}
        made_of = self._made_of()
        content = dist.on_main(lambda: self._compared(made_of, data))
        for split, count in self.plugin.wanted(job.config).items():
            if not lacks(content, split, count, job.seed):
                continue
            if TEACHER not in job.models:
                raise ConfigError(
                    f"distill.stored: {self.folder} lacks {split} data, and no teacher is there to add it."
                )
            covers = self._fill(split, loaders[split], count)
            files = self._hashed(dist.on_main(lambda: parts(self.folder)))
            content = {**content, "files": files, "covers": {**content["covers"], split: covers}}
            content["vocabulary"] = self._teaching.out_features
            dist.on_main(lambda content=content: write_manifest(self.folder, content))  # type: ignore[misc]
        if self._hashed([*content["files"]]) != content["files"]:
            raise ConfigError(
                f"distill.stored: files of {self.folder} were changed, or some processes lack them; copy it again, or "
                "name a new folder."
            )
        covered = content["covers"]["train"]
        if not covered["whole"] and covered["sequences"] < sequences(job):
            raise self._too_few(covered["sequences"])
        self.vocabulary = content["vocabulary"]
        return Rows([self.folder / name for name in content["files"]])

    def _made_of(self) -> dict[str, Any]:
        """Identifies the teacher, what it reads and what is stored of it."""
        job, mine = self.job, self.plugin.config
        weights = weights_digest(resolve(Path(mine.weights), job.dist))
        provider = job.hooks.provider("build_model") or ""
        section = asdict(job.config.sections[provider]) if provider else {}
        sections = {**dict(mine.teacher), provider: {**section, **mine.teacher.get(provider, {})}}
        parts = (weights, provider, sections, tuners(job), job.config.train.precision)
        return {
            "teacher": hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest(),
            "tokenizer": hookspecs.tokenizer(job).digest if job.hooks.provider("tokenizer") else "",
            **{f"distill.{name}": getattr(mine, name) for name in ("top_k", "temperature", "stored_dtype")},
        }

    def _compared(self, made_of: Mapping[str, Any], data: Mapping[Split, Any]) -> dict[str, Any]:
        """The manifest, which is written where there is none; on the main process.

        Raises:
            ConfigError: if the folder was computed with something else.
        """
        content = read_manifest(self.folder)
        for name, value in made_of.items():
            if content and content["made_of"][name] != value:
                what = f"{name} = {content['made_of'][name]}" if "." in name else f"another {name}"
                raise ConfigError(f"distill.stored: {self.folder} was computed with {what}; name a new folder.")
        for split, identity in data.items():
            if content and content["data"].get(split, identity) != identity:
                raise ConfigError(
                    f"distill.stored: {self.folder} was computed from other {split} data, or with another template, "
                    "tokenizer or train.sequence; name a new folder."
                )
        empty: dict[str, Any] = {"made_of": made_of, "data": {}, "covers": {}, "files": {}}
        content = content or empty
        content["data"] = {**content["data"], **data}
        write_manifest(self.folder, content)
        for left in self.folder.glob(".part-*.partial"):  # of a process that was killed
            left.unlink()
        return content

    def _hashed(self, names: list[str]) -> dict[str, str | None]:
        """The hashes of files; each process reads a share."""
        dist = self.job.dist
        mine = hashes([self.folder / name for name in names[dist.rank :: dist.world]])
        known = {name: one for found in dist.gather_objects(mine) for name, one in found.items()}
        return {name: known[name] for name in names}

    @property
    def _teaching(self) -> Any:
        return self.job.models[TEACHER].parts[-1].get_submodule("head")

    def _fill(self, split: Split, loader: Any, count: int) -> dict[str, Any]:
        """Have the teacher read what the folder lacks; gives what it then covers.

        Every data-parallel rank reads its own micro-batches and writes its own parts. All take part in each forward
        pass, as sharded teachers ask for; none is made of sequences that a killed process has finished.
        """
        job, dist, mine = self.job, self.job.dist, self.plugin.config
        if mine.top_k > (vocabulary := self._teaching.out_features):
            raise ConfigError(
                f"distill.top_k: is {mine.top_k:,}, and the teacher's vocabulary has {vocabulary:,} tokens."
            )
        epoch = int(getattr(loader, "epoch", None) or 0) if split == "train" else 0
        if not (count or epoch):
            raise ConfigError("distill.stored: these data don't say where they end; set distill.stored_sequences.")
        whole = split == "train" and bool(epoch) and (not count or count >= epoch)
        if split == "train" and not whole and count < sequences(job):
            raise self._too_few(count)
        count = epoch if whole else count
        have = dist.on_main(lambda: parts(self.folder))
        known, ranks = Rows([self.folder / name for name in have]), dist.gather_objects(dist.data_rank)
        first = max((number_of(name) for name in have), default=-1) + 1 + dist.rank
        writer = Writer(self.folder, first, dist.world, DTYPES[mine.stored_dtype])
        writes, told, added = ranks.index(dist.data_rank) == dist.rank, time.monotonic(), set[int]()
        each = job.config.train.micro_batch * dist.data_ranks
        if dist.main:
            most = format_bytes(
                count * job.config.train.sequence * ((mine.top_k + 1) * writer.dtype.itemsize + mine.top_k * 4)
            )
            log.info("distill.stored: the teacher reads %s sequences (%s), once; at most %s", f"{count:,}", split, most)
        for start in range(0, count, each):
            self._seen = []
            batch = job.hooks.prepare_batch()([next(loader)], 0)[0]
            ((keys, kept),) = self._seen
            fresh = {key: row for row, key in enumerate(keys) if key not in added and not known.has(key)}
            if any(dist.gather_objects(bool(fresh))):
                tokens, values = self._said(batch.to(job.device), kept.shape[1])
                for key, row in fresh.items() if writes else ():
                    at = kept[row].to(tokens.device)
                    writer.add(key, tokens[row, at], values[row, at])
                added |= fresh.keys()
            if dist.main and time.monotonic() - told > TELL_AFTER:
                told = time.monotonic()
                log.info("distill.stored: %s of %s sequences (%s)", f"{start:,}", f"{count:,}", split)
        writer.flush()
        self._seen = None
        job.models[TEACHER].free_gathered()
        dist.barrier()
        return {"sequences": count, "whole": whole, "seed": job.seed if split == "train" else None}

    @torch.no_grad()
    def _said(self, batch: Batch, length: int) -> tuple[Tensor, Tensor]:
        """The teacher's likeliest tokens at each position of whole rows, and their log-probabilities."""
        job, mine = self.job, self.plugin.config
        hidden = job.models[TEACHER](batch.inputs, **batch.model_inputs())
        found = top_of(self._teaching, hidden, mine.top_k, mine.temperature, mine.chunk)
        if batch.positions is None:
            return found
        whole = [one.new_zeros(one.shape[0], length, one.shape[2]) for one in found]
        for one, part in zip(whole, found, strict=True):  # of context parallelism
            one[:, batch.positions] = part
            job.dist.all_reduce(one, axis="cp")
        return whole[0], whole[1]

    def _too_few(self, count: int) -> ConfigError:
        return ConfigError(
            f"distill.stored_sequences: this run takes {sequences(self.job):,} sequences, and {count:,} are stored; "
            "raise it, or leave it out for a whole epoch."
        )


def _identity(loader: Any, sequence: int) -> dict[str, Any]:
    """The parts of a loader's state that identify its data, and the length of a row."""
    return {**{key: value for key, value in loader.state_dict().items() if key != "sequences"}, "sequence": sequence}
