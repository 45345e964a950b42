"""Common parts of data plugins: reading ahead, handling of unreadable samples, and packing. Imports no torch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forge_train import ConfigError, Ge, Gt, Plugin, Problem, hookimpl, section

from ..facts import WEIGHS_LABELS
from ..stores.addresses import is_remote
from .files import find

if TYPE_CHECKING:
    from forge_train import Finished, Job, Loader, Metric, Model
    from forge_train.config import Config as RunConfig

    from ..metrics import Sum
    from .documents import Documents
    from .held_out import Side
    from .stream import Stream

log = logging.getLogger("forge_train")

_NAMED = 20
"""Samples that each rank names; those after them are only counted."""

_INSTEAD = {"skip": "The next one of its source stands in for it.", "replace": "An empty item stands in for it."}
_METRICS = {"skip": "skipped", "replace": "replaced"}

Packing = Literal["split", "best_fit", "pad", "buckets"]


@section
class Prefetch:
    """Reading of training data ahead of the step that uses it. Evaluations do not read ahead."""

    workers: Annotated[int, Ge(0)] = 0
    """Threads or processes of each rank that read ahead. With 0, data is read when a step needs it, which is fastest
    if the data is in memory or on a local disk. Where items such as images are decoded, 1 is the default."""
    kind: Literal["threads", "processes"] = "threads"
    """Threads cost less. Processes help if reading holds Python's global interpreter lock, and can be ended if they
    hang."""
    batches: Annotated[int, Gt(0)] = 2
    """Largest number of micro-batches per worker that are read or being read; at most workers × batches are in
    memory."""
    deadline: Annotated[float, Gt(0)] = 300.0
    """Seconds that a worker may take for a micro-batch; a worker that takes longer counts as hung."""
    on_error: Literal["stop", "skip", "replace"] = "stop"
    """Response to a sample that can't be read. `stop` ends the run. With `skip`, the next sample of the same source
    replaces it, and the metric `skipped` counts it; a process that dies or hangs is restarted, once per micro-batch.
    `replace` is for items beside text: an empty one, of zeros, stands in for one that can't be read, and the metric
    `replaced` counts it."""


class DataPlugin(Plugin):
    """A data plugin whose section has the option `prefetch: Annotated[Prefetch, Volatile()] = Prefetch()`.

    `build_data` returns `self.loader(stream, job, split)`. The metrics count the samples that were left out, or items
    that were replaced, and their number is reported at the end of the run.
    """

    _skips = 0
    _job: Job | None = None

    def loader(self, stream: Stream, job: Job, split: Side = "validation") -> Loader:
        """The loader of a stream, which reads ahead as configured if it is for training."""
        from .items import warn_of_none
        from .loader import StreamLoader, warn_of_few

        warn_of_few(getattr(stream, "samples", None), job)
        if split == "train" and getattr(stream, "costs", None) is None:
            warn_of_none(job)
        return StreamLoader(stream, job, self.prefetch(split), self.on_skip)

    def prefetch(self, split: Side) -> Prefetch:
        """The options for one side."""
        found: Prefetch = self.config.prefetch
        return found if split == "train" else dataclasses.replace(found, workers=0)

    def on_skip(self, skipped: tuple[str, ...]) -> None:
        """Samples were left out of a batch that is given now, or items replaced: one sentence each."""
        self._metric.update(float(len(skipped)))
        for one in skipped:
            self._skips += 1
            level = logging.WARNING if self._skips <= _NAMED else logging.DEBUG
            log.log(level, "%s %s", one, _INSTEAD[self.config.prefetch.on_error])

    @hookimpl
    def metrics(self, model: Model, job: Job) -> Mapping[str, Metric] | None:
        self._job = job
        name = _METRICS.get(self.config.prefetch.on_error)
        return {name: self._metric} if name else None

    @hookimpl
    def on_end(self, finished: Finished) -> None:
        """Tell how many samples were left out, or items replaced, over all ranks, since this process was started."""
        if finished.error or self._job is None or self.config.prefetch.on_error == "stop":
            return
        dist = self._job.dist
        skips = sum(dict(dist.gather_objects((dist.data_rank, self._skips))).values())
        if skips and dist.main:
            what = "items" if self.config.prefetch.on_error == "replace" else "samples"
            log.warning("%d %s could not be read, and others stood in for them: see the log of each rank.", skips, what)

    @cached_property
    def _metric(self) -> Sum:
        from ..metrics import Sum

        return Sum()


def bucket_values(packing: str) -> dict[str, Any]:
    """Return the values implied by packing in buckets: for `implied_values`."""
    return {"train.micro_batch": 1} if packing == "buckets" else {}


def check_path(path: str | tuple[str, ...], key: str, wants: str) -> Iterator[Problem]:
    """Check that there is data on this machine, before a model is built: for `check_config`.

    Args:
        path: files, folders, patterns or addresses; what is elsewhere is not asked for.
        key: that names them.
        wants: the data, for messages.
    """
    if not path:
        yield Problem(key, f"required: {wants}.", data=True)
    try:
        here = [one for one in ([path] if isinstance(path, str) else path) if one and not is_remote(one)]
        find(here, key=key)
    except ConfigError as error:
        yield Problem(key, str(error).removeprefix(f"{key}: "), data=True)


def item_values(key: str) -> dict[str, Any]:
    """Return the values implied by items that a data plugin decodes: for `implied_values`.

    Args:
        key: the data plugin's section.
    """
    return {f"{key}.prefetch.workers": 1}


def check_buckets(packing: str, config: RunConfig) -> Iterator[Problem]:
    """Check that micro-batches are buckets if packing is `buckets`: for `check_config`."""
    if packing == "buckets" and config.train.micro_batch != 1:
        yield Problem(
            "train.micro_batch",
            "must be 1 with packing 'buckets': a micro-batch is one bucket of at most train.sequence tokens.",
        )


def check_weights(documents: Documents, job: Job, key: str) -> None:
    """Refuse weights of messages that the run's task or its loss would ignore.

    Args:
        documents: which the run learns.
        job: of the run.
        key: that names the documents, for messages.

    Raises:
        ConfigError: naming the key, and the plugin that can't weigh labels.
    """
    if not documents.weighted:
        return
    from .. import hookspecs

    found = f"{key}: messages have weights other than 0 and 1, and plugin"
    task, loss = job.hooks.provider("task"), job.hooks.provider("loss")
    if task and not WEIGHS_LABELS.of(job.hooks.plugins[task]):
        raise ConfigError(
            f"{found} {task!r}, which provides the task, does not weigh labels (fact task.weighs_labels)."
        )
    # A guarded function has `weighted` through __getattr__, which isinstance does not ask since Python 3.12.
    if loss and getattr(hookspecs.loss(job), "weighted", None) is None:
        raise ConfigError(f"{found} {loss!r}, which provides the loss, can't weigh labels (WeightedLosses).")


def check_prefetch(prefetch: Prefetch, key: str, *, items: bool = False) -> Iterator[Problem]:
    """Check that options are not set without effect: for `check_config`.

    Args:
        prefetch: the options.
        key: the plugin's section.
        items: whether the data may have items beside text.
    """
    if prefetch.on_error == "replace" and not items:
        yield Problem(f"{key}.prefetch.on_error", "'replace' is for items beside text; choose 'stop' or 'skip'.")
    for name in ("kind", "batches", "deadline"):
        if not prefetch.workers and getattr(prefetch, name) != getattr(Prefetch(), name):
            yield Problem(
                f"{key}.prefetch.{name}", "has no effect without workers; set prefetch.workers, or remove it."
            )


def ahead(prefetch: Prefetch, job: Job) -> Iterator[tuple[str, str]]:
    """Describe reading ahead for `forge data show`."""
    if prefetch.workers:
        kind = prefetch.kind if prefetch.workers > 1 else {"threads": "thread", "processes": "process"}[prefetch.kind]
        yield (
            "batch",
            (
                f"read ahead by {prefetch.workers} {kind} of each rank; at most {prefetch.workers * prefetch.batches} "
                f"micro-batches of {job.config.train.micro_batch * job.config.train.sequence:,} tokens wait"
            ),
        )
