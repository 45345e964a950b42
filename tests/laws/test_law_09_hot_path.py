"""Law 9, one process. No work on the hot path that training does not need: nothing is read from the device between
logged steps, and no hook is asked again. What the loop costs is measured in benchmarks/."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import toys
from forge_train import Batch, BatchPhase, Metric, Plugin, PrepareBatch, StepResult, hookimpl
from forge_train.plugin.calls import Implementations
from forge_train_kit import metrics
from forge_train_tools.testing import run_forge
from hot_path import Watch, counting, waits

pytestmark = [pytest.mark.unit]


def train(folder: Path, *plugins: Any, **config: Any) -> None:
    settings = {"log.every": 4, **{key.replace("__", "."): value for key, value in config.items()}}
    run_forge(
        ["console", "csv", "tensorboard", "ema", Watch, *plugins],
        settings,
        steps=12,
        folder=folder,
        name=f"r{len(plugins)}",
    )


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_nothing_is_read_between_logged_steps(
    tmp_path: Path, optimizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with counting(4) as found:
        train(tmp_path, **{} if optimizer == "adamw" else {"defaults__optimizer": "lion"})
    assert waits(found) == {}
    assert Watch.step == 12


@pytest.mark.parametrize("read", ["item", "__float__", "__bool__", "cpu", "tolist"])
def test_a_read_would_be_seen(tmp_path: Path, read: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Reads(Plugin):
        @hookimpl
        def on_step(self, step: StepResult) -> None:
            getattr(step.loss, read)()

    with counting(4) as found:
        train(tmp_path, Reads)
    assert sum(waits(found).values()) == len([2, 3, 6, 7, 10, 11])  # neither in the first step nor beside a logged one
    assert {place[0] for place in waits(found)} == {read}


def test_metrics_that_are_tensors_are_read_only_when_they_are_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Adds(Plugin):
        @hookimpl
        def on_step(self, step: StepResult) -> None:
            step.add("value", step.loss * 2)

    with counting(4) as found:
        train(tmp_path, Adds)
    assert waits(found) == {}


class Observes(Plugin):
    """Updates every kind of metric in every step."""

    api = (1, 0)

    @hookimpl
    def metrics(self, job: Any) -> dict[str, Metric]:
        self.made = {name: getattr(metrics, name) for name in metrics.__all__}
        arguments = {"Histogram": (0, 10), "ConfusionMatrix": (3,), "Norm": (job,)}
        self.made = {name.lower(): cls(*arguments.get(name, ())) for name, cls in self.made.items()}
        return self.made

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        scores, labels = step.loss.expand(4, 3), torch.arange(4) % 3
        for name, metric in self.made.items():
            if name in ("ratio", "perplexity"):
                metric.update(step.loss, step.grad_norm)
            elif name == "mean":
                metric.update(scores, labels[:, None])
            elif name == "accuracy":
                metric.update(scores, labels)
            elif name in ("confusionmatrix", "auroc"):
                metric.update(labels, labels.clamp(max=1))
            elif name == "norm":
                metric.update([scores, labels.float()])
            else:
                metric.update(scores)


def test_metrics_that_accumulate_are_read_only_when_they_are_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with counting(4) as found:
        train(tmp_path, Observes)
    assert waits(found) == {}
    lines = [json.loads(line) for line in (tmp_path / "r1" / "metrics.jsonl").read_text().splitlines()]
    assert len([key for key in lines[-1] if key.startswith("observes.")]) == 16  # all but the histogram


def test_hooks_are_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Everything(Plugin):
        """Answers all that could be asked again and again."""

        @hookimpl
        def around(self, span: str, job: Any) -> Any:
            return None

        @hookimpl
        def prepare_batch(self, job: Any) -> Any:
            return PrepareBatch(BatchPhase.MAKE, lambda batch: Batch(batch.inputs, batch.labels))

        @hookimpl
        def on_step(self, step: StepResult) -> None:
            seen.append(step.step)

    seen: list[Any] = []
    real = Implementations.collect

    def collect(self: Implementations, hook: str, *arguments: Any, **more: Any) -> Any:
        seen.append(hook)
        return real(self, hook, *arguments, **more)

    monkeypatch.setattr(Implementations, "collect", collect)
    config = {"checkpoint.every": 2, "train.evaluate_every": 2}
    toys.run(tmp_path, Everything, toys.Noise, toys.Average, steps=6, config=config)
    first = seen.index(1)
    assert {"around", "prepare_batch", "executor", "optimizer", "build_data"} <= set(seen[:first])
    assert seen[first:] == [1, 2, 3, 4, 5, 6]  # nor do evaluations and saves ask anything


def test_events_of_a_step_cost_one_call_for_each_who_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    real = Implementations._invoke

    def invoke(self: Implementations, hook: str, *arguments: Any) -> Any:
        calls[hook] += 1
        return real(self, hook, *arguments)

    monkeypatch.setattr(Implementations, "_invoke", invoke)
    toys.run(tmp_path, toys.Noise, toys.Average, steps=5, config={"log.every": 5})
    assert calls["on_step"] == 5
    assert calls["on_gradients"] == 5
    toys.run(tmp_path, steps=1)
    assert calls["on_step"] == 5


def test_the_norm_and_the_clipping_stay_on_the_device(tmp_path: Path) -> None:
    """On the meta device no value exists: whoever reads one fails."""
    from forge_train.mesh.distributed import DistributedContext
    from forge_train.mesh.layout import Layout
    from forge_train.step.step import clip, total_norm

    gradients: list[Tensor] = [torch.ones(3, 2, device="meta"), torch.ones(5, device="meta")]
    norm = total_norm(gradients, DistributedContext(Layout(), torch.device("meta")))
    clip(gradients, norm, 1.0)
    assert norm.is_meta
    with pytest.raises(RuntimeError):
        norm.item()


def test_the_norm_of_narrow_gradients_takes_no_wide_copy_of_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 billion gradients in bf16 would take 30 GiB more in fp32, all at once."""
    from forge_train.mesh.distributed import DistributedContext
    from forge_train.mesh.layout import Layout
    from forge_train.step.step import total_norm

    gradients = [torch.full((1000,), 0.1, dtype=torch.bfloat16) for _ in range(5)]
    given: list[Tensor] = []
    real = torch._foreach_norm

    def foreach_norm(tensors: list[Tensor], *order: Any, **more: Any) -> Any:
        given.extend(tensors)
        return real(tensors, *order, **more)

    monkeypatch.setattr(torch, "_foreach_norm", foreach_norm)
    norm = total_norm(gradients, DistributedContext(Layout(), torch.device("cpu")))
    assert [one.data_ptr() for one in given] == [one.data_ptr() for one in gradients]
    assert norm.dtype is torch.float32
    exact = torch.linalg.vector_norm(torch.cat(gradients).double())
    assert norm.double().item() == pytest.approx(exact.item(), rel=1e-6)
