"""The conformance suite finds what is wrong with a plugin at work: configured, composed, trained and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import pluggy
import pytest
import torch
from torch import Tensor, nn

from forge_train import (
    Applied,
    Batch,
    Gt,
    Job,
    LogRecord,
    Model,
    Phase,
    Plugin,
    PrepareStep,
    StepResult,
    Task,
    Transform,
    hookimpl,
    section,
)
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.layers import AttentionOptions
from forge_train_plugins.attention._eager import Kernel as Eager
from forge_train_tools.testing import Installed, Report, assert_conforms, check


def failed(report: Report) -> set[str]:
    return {one.name for one in report.of("fail")}


def detail(report: Report, name: str) -> str:
    return next(one.detail for one in report.checks if one.name == name)


def test_a_required_key_has_to_be_given(tmp_path: Path) -> None:
    class Asking(Plugin):
        """Has no default."""

        api = (1, 0)

        @section
        class Config:
            rate: Annotated[float, Gt(0)]

        @hookimpl
        def on_step(self, step: StepResult) -> None: ...

    assert "asking.rate: is required" in detail(check(Asking, folder=tmp_path), "is configured")
    assert check(Asking, {"asking": {"rate": 2.0}}, folder=tmp_path).passed
    assert check(Asking, sets=["asking.rate=2"], folder=tmp_path).passed


@pytest.mark.slow
def test_an_example_stands_for_what_the_caller_does_not_say(tmp_path: Path) -> None:
    class Exemplary(Plugin):
        """Says how it can be tried."""

        api = (1, 0)
        facts = {"check.example": ("exemplary.rate=3", "train.clip_norm=0.5")}

        @section
        class Config:
            rate: Annotated[float, Gt(2)]

        @hookimpl
        def on_start(self, job: Job) -> None:
            assert (self.config.rate, job.config.train.clip_norm) in ((3, 0.5), (4, 1))

    assert_conforms(Exemplary, folder=tmp_path)
    assert_conforms(Exemplary, {"exemplary.rate": 4.0}, folder=tmp_path)


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (lambda rows: torch.ones(rows), ""),
        (lambda rows: torch.ones(1), "'weighs.rows' is [1], and its batch axis is said to be 0, of 2"),
        (None, "expected one batch for one, found None"),
    ],
)
def test_a_preparation_of_a_step_gives_a_batch_for_each(tmp_path: Path, weights: Any, says: str) -> None:
    class Weighs(Plugin):
        """Adds a target."""

        api = (1, 0)

        @hookimpl
        def prepare_batch(self, job: Job) -> PrepareStep:
            def weigh(batches: Any) -> Any:
                return weights and [one.with_targets({"weighs.rows": weights(len(one.inputs))}) for one in batches]

            return PrepareStep(weigh)

    report = check(Weighs, folder=tmp_path)
    assert report.passed == (not says)
    assert says in detail(report, "prepare_batch: gives a batch for a batch")


class Counter(Plugin):
    """Counts steps, and forgets them at a resume."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.count = 0

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        self.count += 1
        step.add("count", self.count)


def test_state_that_is_not_saved_fails_at_the_resume(tmp_path: Path) -> None:
    report = check(Counter, folder=tmp_path)
    assert failed(report) == {"resumes exactly"}
    assert "counter.count of step 3 is 1 instead of 3" in detail(report, "resumes exactly")


def test_chance_that_differs_between_runs_fails(tmp_path: Path) -> None:
    class Dicing(Plugin):
        """Draws from a generator that nobody seeds."""

        api = (1, 0)

        @hookimpl
        def on_step(self, step: StepResult) -> None:
            step.add("dice", torch.Generator().seed() % 10**9)

    assert failed(check(Dicing, folder=tmp_path)) == {"trains alike every time", "resumes exactly"}


def test_an_observer_that_fails_does_not_pass(tmp_path: Path) -> None:
    class Careless(Plugin):
        """Fails where core only warns."""

        api = (1, 0)

        @hookimpl
        def on_log(self, record: LogRecord) -> None:
            raise KeyError("no such metric")

    report = check(Careless, folder=tmp_path)
    assert failed(report) == {"trains three steps"}
    assert "no such metric" in detail(report, "trains three steps")


def test_what_a_plugin_requires_is_enabled_with_it(tmp_path: Path, forge_plugins: Installed) -> None:
    class Needing(Plugin):
        """Works beside another one only."""

        api = (1, 0)
        requires = ("counter_of_layers", "optimizer")

        @hookimpl
        def on_start(self, job: Job) -> None:
            assert "counter_of_layers" in job.hooks.plugins

    class CounterOfLayers(Plugin):
        """The other one."""

        api = (1, 0)

        @hookimpl
        def on_log(self, record: LogRecord) -> None: ...

    forge_plugins.restore()
    forge_plugins.add(CounterOfLayers)
    assert_conforms(Needing, folder=tmp_path)


def test_a_transform_that_matches_nothing_is_not_composed(tmp_path: Path) -> None:
    class Blind(Plugin):
        """Finds nothing."""

        api = (1, 0)

        @hookimpl
        def parallelize(self, job: Job) -> Transform:
            return Transform(Phase.ADAPT, "blind", Applied)

    report = check(Blind, folder=tmp_path)
    assert failed(report) == {"is composed"}
    assert "matched nothing" in detail(report, "is composed")


class Mean(Plugin):
    """A loss that is a mean, and reads masked positions."""

    api = (1, 0)

    @hookimpl
    def loss(self, job: Job) -> Any:
        def mean(hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(head(hidden).flatten(0, 1), labels.flatten().clamp(min=0))

        return mean


class Scaleless(Plugin):
    """An executor that forgets the scale."""

    api = (1, 0)

    @hookimpl
    def executor(self, model: Model, task: Task) -> Any:
        class Forgetful:
            def train(self, batches: list[Batch], scale: float) -> Tensor:
                losses = [self.loss(batch) for batch in batches]
                for loss in losses:
                    torch.autograd.backward(loss)
                return torch.stack([loss.detach() for loss in losses]).sum()

            def evaluate(self, batch: Batch) -> Tensor:
                with torch.no_grad():
                    return self.loss(batch)

            def loss(self, batch: Batch) -> Tensor:
                return task.loss(model.parts[0], model(batch.inputs, **batch.model_inputs()), batch)

        return Forgetful()


class Stateless(Plugin):
    """A momentum that no state_dict knows of."""

    api = (1, 0)

    @hookimpl
    def optimizer(self, model: Model) -> torch.optim.Optimizer:
        class Hidden(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                self.taken = getattr(self, "taken", 0) + 1
                self.param_groups[0]["lr"] = 0.1 / self.taken
                super().step()
                self.param_groups[0]["lr"] = 0.1

        return Hidden(model.parameters(), lr=0.1)


class OfDocuments(Plugin):
    """A kernel that declares documents, and nothing else."""

    api = (1, 0)
    kernel_capabilities = KernelCapabilities(documents=True)

    @hookimpl
    def attention_kernel(self) -> Any:
        return self.attend

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        out: Tensor = Eager()(query, key, value, options)
        return out


class Leaky(OfDocuments):
    """Attention that sees the future."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        options.check(self.kernel_capabilities, query, key)
        heads = query.shape[2] // key.shape[2]
        return value.repeat_interleave(heads, 2).mean(1, keepdim=True).expand_as(query)


class Heedless(OfDocuments):
    """Attention that ignores what it does not support, without an error."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        known = AttentionOptions(scale=options.scale, document_ids=options.document_ids)
        return super().attend(query, key, value, known)


class Shapeless(OfDocuments):
    """Attention that checks options, but not whether there are more keys than queries."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        options.check(self.kernel_capabilities, key, key)
        return super().attend(query, key, value, options)


class Swallowing(Plugin):
    """A span that hides errors."""

    api = (1, 0)

    @hookimpl
    def around(self, span: str) -> Any:
        @contextmanager
        def quiet() -> Iterator[None]:
            try:
                yield
            except Exception:
                return

        return quiet


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "broken"),
    [
        (Mean, {"loss: is a sum over tokens", "loss: ignores masked labels"}),
        (Scaleless, {"executor: accumulates the right gradients", "executor: tells the model the last micro-batch"}),
        (Stateless, {"optimizer: its state goes round", "resumes exactly"}),
        (Leaky, {"attention_kernel: agrees with the formula"}),
        (Heedless, {"attention_kernel: refuses what it does not declare"}),
        (Shapeless, {"attention_kernel: refuses what it does not declare"}),
        (Swallowing, {"around: lets errors through"}),
    ],
)
def test_a_slot_that_breaks_its_protocol_fails(plugin: type[Plugin], broken: set[str], tmp_path: Path) -> None:
    assert failed(check(plugin, folder=tmp_path)) == broken


def test_a_loss_that_needs_a_head_of_its_own_is_told_so(tmp_path: Path) -> None:
    class Demanding(Plugin):
        """A loss that asks more of the head than hidden states."""

        api = (1, 0)

        @hookimpl
        def loss(self, job: Job) -> Any:
            return lambda hidden, head, labels: head(hidden, each=True).float().sum()

    found = {one.name: one for one in check(Demanding, folder=tmp_path).checks}
    said = "it calls `head(hidden, each=…)`; a head that gives token_logits takes hidden states alone"
    assert found["loss: is a sum over tokens"].detail == said


def test_options_of_pluggys_own_marker_are_refused(tmp_path: Path) -> None:
    class Pushing(Plugin):
        """Wants to be first, which changes nothing."""

        api = (1, 0)

        @pluggy.HookimplMarker("forge_train")(tryfirst=True)
        def on_step(self, step: StepResult) -> None: ...

    assert "arguments fit the hooks" in failed(check(Pushing, folder=tmp_path))
