"""A plugin that observes what each rank is given, unevenly. As `metric_cases:Observing`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_train import Batch, BatchPhase, Job, LogRecord, Metric, Plugin, PrepareBatch, hookimpl
from forge_train_tools.testing import run_forge


class Observing(Plugin):
    """Everything that metrics can be, over sequences of which ranks have different numbers, or none."""

    api = (1, 0)

    @hookimpl
    def metrics(self, job: Job) -> Mapping[str, Metric]:
        from forge_train_kit import metrics

        self.mean, self.spread, self.histogram = metrics.Mean(), metrics.Quantile(), metrics.Histogram(0, 256, bins=8)
        self.least, self.auroc, self.seldom = metrics.Min(), metrics.AUROC(64), metrics.Sum()
        self.own, self.unused = metrics.Sum(), metrics.Mean()
        self.own.per_rank = True
        self.replicas = job.dist.world // job.dist.data_ranks
        return {
            "mean": self.mean,
            "spread": self.spread,
            "histogram": self.histogram,
            "least": self.least,
            "auroc": self.auroc,
            "seldom": self.seldom,
            "own": self.own,
            "unused": self.unused,
        }

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareBatch:
        def observe(batch: Batch) -> Batch:
            for row in batch.inputs:
                if row.sum() % 3:  # of which a rank may have none in a step
                    self.mean.update(row / 7)
                    self.spread.update(row.float())
                    self.histogram.update(row)
                    self.least.update(row)
                    self.auroc.update(row / 256, row % 2)
                if row.sum() % 11 == 0:
                    self.seldom.update(row.sum())
                self.own.update(row.sum() / self.replicas)  # of which each rank of a group has a share
            return batch

        return PrepareBatch(BatchPhase.MASK, observe)

    @hookimpl
    def on_log(self, record: Any) -> None:
        if isinstance(record, LogRecord):
            Observing.histograms.append([list(record.histograms["observing.histogram"].counts)])

    histograms: list[Any] = []


def train(folder: str, plugins: list[str], config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Train; the plugin's metrics in each line, in each evaluation, and its histograms."""
    Observing.histograms = []
    run = run_forge(["metric_cases:Observing", *plugins], config, folder=Path(folder), **more)
    own = [{key: value for key, value in line.items() if key.startswith("observing.")} for line in run.metrics]
    evaluations = [one["metrics"] for one in run.events if one["event"] == "evaluation"]
    return {"lines": own, "evaluations": evaluations, "histograms": Observing.histograms, "numbers": run.numbers}


def count_messages(folder: str, plugins: list[str], config: dict[str, Any]) -> dict[str, Any]:
    """How often ranks speak to each other in a run, without and with metrics."""
    import torch.distributed as dist

    counts = []
    real = dist.all_reduce
    for own in ([], ["metric_cases:Observing"]):
        calls = [0]

        def counted(*arguments: Any, calls: list[int] = calls, **named: Any) -> Any:
            calls[0] += 1
            return real(*arguments, **named)

        dist.all_reduce = counted
        try:
            run_forge([*own, *plugins], config, steps=6, name=f"messages{len(own)}", folder=Path(folder))
        finally:
            dist.all_reduce = real
        counts.append(calls[0])
    return {"counts": counts}
