"""One step: accumulation, clipping, vetoes, scaling, spans; and what the engine does between steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
import torch
from torch import Tensor, nn

import toys
from crossed import few
from forge_train import (
    MASKED,
    Batch,
    BatchPhase,
    DivergedError,
    Init,
    Plugin,
    PrepareBatch,
    StepResult,
    Update,
    attach_loss,
    hookimpl,
    section,
)
from forge_train.contract.events import Evaluation
from forge_train.contract.protocols import SpanName
from forge_train_kit import hookspecs

pytestmark = pytest.mark.unit


class Gradients(Plugin):
    """Keeps a copy of every step's gradients and results."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gradients: list[dict[str, Tensor]] = []
        self.norms: list[float] = []
        self.steps: list[StepResult] = []

    @hookimpl
    def on_start(self, model: Any) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        self.model = model

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        pairs = zip(self.names, update.parameters, strict=True)
        self.gradients.append({name: p.grad.clone() for name, p in pairs if p.grad is not None})
        self.norms.append(float(update.grad_norm))

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        self.steps.append(step)


def gradients(folder: Path, *plugins: Any, steps: int = 2, **more: Any) -> Gradients:
    found: Gradients = toys.run(folder, Gradients, *plugins, steps=steps, **more).plugin("gradients")
    return found


def close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=tolerance, atol=tolerance)


# -- the mean over the global batch ---------------------------------------------------------------


@pytest.mark.parametrize("mask", [True, False])
def test_accumulation_changes_nothing_however_unevenly_labels_are_masked(tmp_path: Path, mask: bool) -> None:
    def run(micro: int) -> Gradients:
        return gradients(tmp_path, config={"train.micro_batch": micro, "train.global_batch": 8, "toy_data.mask": mask})

    whole = run(8)
    for micro in (1, 2, 4):
        parts = run(micro)
        for one, other in zip(whole.gradients, parts.gradients, strict=True):
            close(one, other)
        for a, b in zip(whole.steps, parts.steps, strict=True):
            assert float(a.loss) == pytest.approx(float(b.loss), rel=1e-6)
            assert (a.step, a.tokens, a.data_range, a.lr) == (b.step, b.tokens, b.data_range, b.lr)


def test_the_loss_and_its_gradient_are_those_of_all_unmasked_tokens(tmp_path: Path) -> None:
    run = toys.run(tmp_path, Gradients, steps=1, config={"train.micro_batch": 1})
    found: Gradients = run.plugin("gradients")
    with toys.job(folder=tmp_path) as job:
        from forge_train.compose.compose import compose

        (part,) = compose(job).model.parts
        loader = toys.ToyLoader(job, True, 0)
        batches = [next(loader), next(loader)]
    inputs, labels = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("inputs", "labels"))
    assert len({int(n) for n in (labels != MASKED).sum(1)}) > 1
    loss = nn.functional.cross_entropy(part.head(part(inputs)).flatten(0, 1), labels.flatten(), ignore_index=MASKED)
    loss.backward()
    close(found.gradients[0], {name: p.grad for name, p in part.named_parameters()})
    assert run.losses[0] == pytest.approx(float(loss), rel=1e-6)
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in part.parameters()))
    assert run.metrics[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_batch_without_any_label_is_no_division_by_zero(tmp_path: Path) -> None:
    class MaskAll(Plugin):
        @hookimpl
        def prepare_batch(self, job: Any) -> Any:
            return PrepareBatch(
                BatchPhase.MASK, lambda batch: Batch(batch.inputs, torch.full_like(batch.labels, MASKED))
            )

    found = gradients(tmp_path, MaskAll, steps=1)
    assert float(found.steps[0].loss) == 0.0
    assert found.norms == [0.0]


class Weighted(Plugin):
    """The same task with every token counted as a thousandth."""

    @hookimpl
    def task(self, job: Any) -> Any:
        from forge_train_plugins.tasks.next_token import NextTokenTask

        class Thousandth(NextTokenTask):
            def weight(self, batch: Batch) -> float:
                return super().weight(batch) / 1000

            def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
                return super().loss(part, hidden, batch) / 1000

        return Thousandth(hookspecs.loss(job))


def test_weights_below_one_weigh_what_they_say(tmp_path: Path) -> None:
    plain, weighted = gradients(tmp_path), gradients(tmp_path, Weighted)
    for one, other in zip(plain.gradients, weighted.gradients, strict=True):
        close(one, other)


@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_an_attached_loss_weighs_the_same_however_the_batch_is_split(tmp_path: Path, scale: float) -> None:
    class Attaches(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.norm, self.up, self.down = inner.norm, inner.up, inner.down

        forward_inner = toys.Block.forward

        def forward(self, x: Tensor) -> Tensor:
            return attach_loss(self.forward_inner(x), 0.1 * self.up(x).square().sum())

    class Auxiliary(Plugin):
        @hookimpl
        def build_model(self, job: Any) -> nn.Module:
            tower = toys.Tower(2)
            tower.layers["1"] = Attaches(tower.layers["1"])
            return tower

    class Scaled(Plugin):
        @hookimpl
        def loss_scale(self, job: Any) -> Any:
            return Constant(scale)

    def run(micro: int, *plugins: Any, without: tuple[str, ...] = ("toy_model",)) -> Gradients:
        config = {"train.micro_batch": micro, "toy_data.mask": False}
        return gradients(tmp_path, *plugins, config=config, without=without, steps=1)

    whole = run(4, Auxiliary, Scaled)
    for micro in (1, 2):
        close(whole.gradients[0], run(micro, Auxiliary, Scaled).gradients[0], 2e-6)
    plain = run(4, without=())
    assert not torch.allclose(whole.gradients[0]["layers.1.up.weight"], plain.gradients[0]["layers.1.up.weight"])
    torch.testing.assert_close(whole.gradients[0]["head.weight"], plain.gradients[0]["head.weight"])
    assert float(whole.steps[0].loss) == pytest.approx(float(plain.steps[0].loss))


class Apart(nn.Module):
    """A block with a weight that only its attached loss trains."""

    terms: ClassVar[list[tuple[float, int]]] = []
    """Of each forward pass: the derivative by that weight, summed over tokens, and how many they are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.extra = nn.Parameter(torch.ones(1))

    def initial(self, name: str) -> Init | None:
        return Init("ones") if name == "extra" else None

    def forward(self, x: Tensor) -> Tensor:
        squares = (1 + x.detach().square()).square().sum()
        self.terms.append((2 * float(squares), x.shape[:2].numel()))
        return attach_loss(self.inner(x), self.extra.square().sum() * squares)


class MeanOfOne(Plugin):
    """A model whose attached loss is a known mean over tokens."""

    @hookimpl
    def build_model(self, job: Any) -> nn.Module:
        tower = toys.Tower(2)
        tower.layers["1"] = Apart(tower.layers["1"])
        return tower


LEFT = {"none masked": 1.0, "half masked": 0.5, "all but one masked": 1 / 2**10, "all masked": 0.0}
"""Which share of the global batch's labels is left, rounded up."""


class Mask(Plugin):
    """Leaves the first labels of the first step."""

    @section
    class Config:
        left: float = 1.0

    @hookimpl
    def prepare_batch(self, job: Any) -> Any:
        train, seen = job.config.train, itertools.count()
        keep = math.ceil(self.config.left * train.global_batch * train.sequence)

        def mask(batch: Batch) -> Batch:
            labels = [label if next(seen) < keep else MASKED for label in batch.labels.flatten().tolist()]
            return Batch(batch.inputs, torch.tensor(labels).view_as(batch.labels))

        return PrepareBatch(BatchPhase.MASK, mask)


@pytest.mark.parametrize(
    ("left", "micro"),
    few(
        [*itertools.product(LEFT, [4, 2, 1])],
        [(left, (4, 2, 1)[number % 3]) for number, left in enumerate(LEFT)],
    ),
)
def test_an_attached_loss_weighs_the_same_however_many_labels_are_masked(tmp_path: Path, left: str, micro: int) -> None:
    def run(*plugins: Any, **config: Any) -> Gradients:
        config = {"train.micro_batch": micro, "toy_data.mask": False, **config}
        return gradients(tmp_path, MeanOfOne, *plugins, config=config, without=("toy_model",), steps=1)

    Apart.terms.clear()
    expected = run().gradients[0]["layers.1.extra"]
    sums, tokens = zip(*Apart.terms, strict=True)
    assert float(expected) == pytest.approx(sum(sums) / sum(tokens), rel=1e-5)
    for plugins in ((Mask,), (Mask, Weighted)):
        got = run(*plugins, **{"mask.left": LEFT[left]}).gradients[0]["layers.1.extra"]
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_an_attached_loss_has_the_gradient_of_a_term_of_the_loss() -> None:
    from forge_train.contract.auxiliary import loss_scaling

    x = torch.randn(3, requires_grad=True)
    with loss_scaling(torch.tensor(0.5)):
        y = attach_loss(x, x.square().sum())
    torch.autograd.backward(y.sum() * 0.5)
    torch.testing.assert_close(x.grad, 0.5 * (1 + 2 * x.detach()))


# -- clipping -------------------------------------------------------------------------------------


class Plain(Plugin):
    """SGD with a rate of 1, so that the update is the clipped gradient."""

    api = (1, 0)

    @hookimpl
    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1.0)

    @hookimpl
    def lr_schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "factor"), [(0.0, 1.0), (1e6, 1.0), (0.1, None)])
def test_gradients_are_clipped_by_their_global_norm(tmp_path: Path, limit: float, factor: float | None) -> None:
    run = toys.run(tmp_path, Gradients, Plain, steps=1, config={"train.clip_norm": limit})
    found: Gradients = run.plugin("gradients")
    factor = factor or limit / (found.norms[0] + 1e-6)
    start = weights(tmp_path)
    for name, value in run.model.state_dict().items():
        torch.testing.assert_close(start[name] - value, found.gradients[0][name] * factor, rtol=1e-4, atol=1e-7)


def weights(folder: Path) -> dict[str, Tensor]:
    """The toys' initial weights."""
    from forge_train.compose.compose import compose

    with toys.job(folder=folder) as job:
        return {name: value.clone() for name, value in compose(job).model.state_dict().items()}


# -- looking, scaling, vetoing --------------------------------------------------------------------


def test_an_update_is_scaled_with_its_norm(tmp_path: Path) -> None:
    class Halve(Plugin):
        @hookimpl
        def on_gradients(self, update: Update) -> None:
            before = float(update.grad_norm)
            update.scale(0.5)
            assert float(update.grad_norm) == pytest.approx(before / 2)
            update.scale(torch.tensor(0.5))

    plain = gradients(tmp_path, steps=1)
    scaled = gradients(tmp_path, Halve, steps=1)
    assert float(scaled.steps[0].grad_norm) == pytest.approx(plain.norms[0] / 4)
    halved = toys.run(tmp_path, Halve, Plain, steps=1, config={"train.clip_norm": 0.0}).model.state_dict()
    start = weights(tmp_path)
    for name, value in halved.items():
        torch.testing.assert_close(start[name] - value, plain.gradients[0][name] / 4, rtol=1e-4, atol=1e-7)


class Veto(Plugin):
    """Skips the second step."""

    api = (1, 0)

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        if update.step == 2:
            update.veto("no second step")
            update.veto("the first reason counts")
            assert update.vetoed == "no second step"


def test_a_vetoed_step_counts_and_moves_the_data_but_neither_weights_nor_schedule(tmp_path: Path) -> None:
    class States(Plugin):
        @hookimpl
        def on_start(self, model: Any, optimizer: Any) -> None:
            self.model, self.optimizer, self.seen = model, optimizer, []

        @hookimpl
        def on_step(self, step: StepResult) -> None:
            moments = [value.clone() for state in self.optimizer.state.values() for value in state.values()]
            values = [value.clone() for value in self.model.parameters()]
            self.seen.append((step, values + moments, [group["lr"] for group in self.optimizer.param_groups]))

    run = toys.run(tmp_path, Veto, States, steps=4)
    (one, two, three, _four) = run.plugin("states").seen
    assert [step.skipped for step, _, _ in run.plugin("states").seen] == [False, True, False, False]
    assert [step.step for step, _, _ in run.plugin("states").seen] == [1, 2, 3, 4]
    assert [step.tokens for step, _, _ in run.plugin("states").seen] == [24, 48, 72, 96]
    assert [step.data_range for step, _, _ in run.plugin("states").seen] == [(0, 4), (4, 8), (8, 12), (12, 16)]
    assert all(torch.equal(a, b) for a, b in zip(one[1], two[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(two[1], three[1], strict=True))
    assert one[2] == two[2]
    assert [line["lr"] for line in run.metrics][1] == [line["lr"] for line in run.metrics][2]
    assert len(run.metrics) == 4


def test_a_veto_is_repeated_by_a_run_that_is_resumed(tmp_path: Path) -> None:
    through = toys.run(tmp_path, Veto, toys.Average, steps=5, name="through")
    toys.run(tmp_path, Veto, toys.Average, steps=5, name="stopped", stop_at=2)
    assert toys.run(tmp_path, Veto, toys.Average, steps=5, name="stopped").numbers == through.numbers


def test_a_vetoed_step_may_be_infinite_and_another_may_not(tmp_path: Path) -> None:
    class Poison(Plugin):
        @hookimpl
        def on_gradients(self, update: Update) -> None:
            if update.step == 2:
                update.scale(float("inf"))

    class Zap(Plugin):
        @hookimpl
        def on_gradients(self, update: Update) -> None:
            if update.step == 2:
                update.veto("overflow")

    assert toys.run(tmp_path, Poison, Zap).finished.outcome == "done"
    with pytest.raises(DivergedError, match="grad_norm is (inf|nan) at step 2") as caught:
        toys.run(tmp_path, Poison, name="x")
    assert caught.value.code == 3


# -- loss scale -----------------------------------------------------------------------------------


class Constant:
    """A loss scale that never changes."""

    def __init__(self, factor: float) -> None:
        self.factor, self.updates = factor, []  # type: ignore[var-annotated]

    def scale(self) -> Tensor:
        return torch.tensor(self.factor)

    def update(self, skipped: bool) -> None:
        self.updates.append(skipped)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": len(self.updates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = [False] * state["updates"]


class Scaler(Plugin):
    """Gives it."""

    api = (1, 0)

    @hookimpl
    def loss_scale(self, job: Any) -> Constant:
        self.given = Constant(1024.0)
        return self.given


def test_a_loss_scale_is_divided_out_again(tmp_path: Path) -> None:
    plain, scaled = gradients(tmp_path), gradients(tmp_path, Scaler)
    for one, other in zip(plain.gradients, scaled.gradients, strict=True):
        close(one, other)
    assert plain.norms == pytest.approx(scaled.norms)


def test_a_loss_scale_is_told_of_every_step_and_is_saved(tmp_path: Path) -> None:
    run = toys.run(tmp_path, Scaler, Veto, steps=3, name="x")
    assert run.plugin("scaler").given.updates == [False, True, False]
    run = toys.run(tmp_path, Scaler, Veto, steps=4, name="x")
    assert len(run.plugin("scaler").given.updates) == 4


# -- batches --------------------------------------------------------------------------------------


def test_batches_are_prepared_before_they_are_weighed(tmp_path: Path) -> None:
    class Shorter(Plugin):
        """Masks the second half."""

        @hookimpl
        def prepare_batch(self, job: Any) -> Any:
            self.calls = 0

            def prepare(batch: Batch) -> Batch:
                self.calls += 1
                labels = batch.labels.clone()
                labels[:, 3:] = MASKED
                return Batch(batch.inputs, labels)

            return PrepareBatch(BatchPhase.MASK, prepare)

    run = toys.run(tmp_path, Shorter, Gradients, steps=2, config={"toy_data.mask": False, "train.evaluate_every": 2})
    assert run.plugin("shorter").calls == 2 * 2 + 2 * 2
    (evaluation,) = [event for event in run.events if event["event"] == "evaluation"]
    assert evaluation["tokens"] == 2 * 4 * 3


def test_extras_reach_the_model(tmp_path: Path) -> None:
    class Extra(Plugin):
        @hookimpl
        def prepare_batch(self, job: Any) -> Any:
            def make(batch: Batch) -> Batch:
                return Batch(batch.inputs, batch.labels, extras={"bonus": torch.ones(len(batch.inputs))})

            return PrepareBatch(BatchPhase.MAKE, make)

    class Looks(Plugin):
        @hookimpl
        def build_model(self, job: Any) -> nn.Module:
            seen = self.seen = []  # type: ignore[var-annotated]

            class Tower(toys.Tower):
                def forward(self, x: Tensor, **extras: Tensor) -> Tensor:
                    seen.append(sorted(extras))
                    return super().forward(x)

            return Tower(1)

    run = toys.run(tmp_path, Extra, Looks, steps=1, without=["toy_model"])
    assert run.plugin("looks").seen == [["bonus"], ["bonus"]]


# -- spans ----------------------------------------------------------------------------------------


def test_all_five_spans_are_entered_around_what_they_name(tmp_path: Path) -> None:
    seen: list[str] = []
    asked: list[str] = []

    class Spans(Plugin):
        @hookimpl
        def around(self, span: str, job: Any) -> Any:
            asked.append(span)

            @contextmanager
            def inside() -> Iterator[None]:
                seen.append(f"+{span}")
                yield
                seen.append(f"-{span}")

            return inside

        @hookimpl
        def on_gradients(self, update: Update) -> None:
            seen.append("gradients")

        @hookimpl
        def on_step(self, step: StepResult) -> None:
            seen.append("step")

        @hookimpl
        def on_log(self, record: Any) -> None:
            seen.append("evaluated" if isinstance(record, Evaluation) else "logged")

        @hookimpl
        def on_checkpoint(self, event: Any) -> None:
            seen.append(event.kind)

    toys.run(tmp_path, Spans, steps=1, config={"train.evaluate_every": 1})
    assert seen == [
        *("+step", "+forward_backward", "-forward_backward", "gradients", "+optimizer", "-optimizer", "-step", "step"),
        "logged",
        *("+evaluate", "-evaluate", "evaluated"),
        *("+save", "saving", "saved", "-save"),
    ]
    assert sorted(asked) == sorted(get_args(SpanName)), "a plugin is asked once for each"
    seen.clear()
    toys.run(tmp_path, Spans, type("Never", (Plugin,), {"on_gradients": hookimpl(lambda s, update: update.veto("x"))}))
    assert "+optimizer" not in seen


# -- metrics --------------------------------------------------------------------------------------


def test_metrics_of_plugins_are_written_under_their_names_when_the_step_is_logged(tmp_path: Path) -> None:
    class Metric(Plugin):
        @hookimpl
        def on_step(self, step: StepResult) -> None:
            step.add("tensor", torch.tensor(0.1, dtype=torch.float64) * step.step)
            step.add("clock", 3.5, timing=True)

    run = toys.run(tmp_path, Metric, steps=5, config={"log.every": 2})
    assert [line["step"] for line in run.metrics] == [2, 4, 5]
    assert [line["metric.tensor"] for line in run.metrics] == [0.1 * 2, 0.1 * 4, 0.1 * 5]
    assert all(line["timing"] == ["metric.clock"] for line in run.metrics)
    assert "metric.clock" not in run.numbers[0]


def test_tokens_per_step_and_the_rounding_up_of_tokens(tmp_path: Path) -> None:
    run = toys.run(tmp_path, steps=0, config={"train.tokens": 49})
    assert [line["tokens"] for line in run.metrics] == [24, 48, 72]
    assert run.job.steps == 3


# -- determinism ----------------------------------------------------------------------------------


def test_the_same_run_twice_is_the_same_bits_and_another_seed_is_not(tmp_path: Path) -> None:
    plugins = (toys.Noise, toys.Average)
    first, again = (toys.run(tmp_path, *plugins) for _ in range(2))
    assert first.numbers == again.numbers
    assert toys.run(tmp_path, *plugins, config={"run.seed": 1}).numbers != first.numbers


def test_evaluation_is_the_same_batches_every_time_and_leaves_training_alone(tmp_path: Path) -> None:
    frozen = type("Never", (Plugin,), {"on_gradients": hookimpl(lambda self, update: update.veto("x"))})
    run = toys.run(tmp_path, frozen, steps=5, config={"train.evaluate_every": 2})
    losses = [event["loss"] for event in run.events if event["event"] == "evaluation"]
    assert len(losses) == 3  # after steps 2, 4 and the last
    assert len(set(losses)) == 1
    with_evaluation = toys.run(tmp_path, steps=5, config={"train.evaluate_every": 2})
    assert with_evaluation.losses == toys.run(tmp_path, steps=5).losses
