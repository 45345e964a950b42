"""Metrics: each held to its contract and to a plain computation over all data; refused arguments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forge_train import Bins, Metric, Plugin, PluginError, Update, hookimpl
from forge_train_kit.metrics import (
    AUROC,
    Accuracy,
    ConfusionMatrix,
    Histogram,
    Max,
    Mean,
    Min,
    Perplexity,
    Quantile,
    Ratio,
    Sum,
)
from forge_train_tools.testing import check, check_metric
from forge_train_tools.testing.runs import RunForge

pytestmark = [pytest.mark.unit]

SIZES = (7, 1, 40, 0, 13)
"""Values of each update: ranks hold different numbers, and one nothing."""


def values(dtype: torch.dtype = torch.float32) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [((torch.randn(size, generator=generator) * 3).exp().to(dtype),) for size in SIZES]


def union(observations: list[Any], which: int = 0) -> Any:
    return torch.cat([one[which].reshape(-1) for one in observations]).double().numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_extremes(dtype: torch.dtype) -> None:
    data = values(dtype)
    everything = union(data)
    assert check_metric(Sum, data) == pytest.approx(everything.sum(), rel=1e-12)
    assert check_metric(Mean, data) == pytest.approx(everything.mean(), rel=1e-12)
    assert check_metric(Max, data) == everything.max()
    assert check_metric(Min, data) == everything.min()
    weighted = [(one, torch.arange(len(one))) for (one,) in data]
    weights = union(weighted, 1)
    assert check_metric(Mean, weighted) == pytest.approx(np.average(everything, weights=weights), rel=1e-12)
    assert check_metric(Ratio, weighted) == pytest.approx(everything.sum() / weights.sum(), rel=1e-12)
    losses = [(one.log1p(), len(one)) for (one,) in data]
    assert check_metric(Perplexity, losses) == pytest.approx(math.exp(union(losses).mean()), rel=1e-12)


def test_a_weight_for_each_row_and_numbers() -> None:
    rows = torch.arange(6.0).view(2, 3)
    mean = Mean()
    mean.update(rows, torch.tensor([[1], [3]]))
    assert mean.value(mean.sums, mean.maxima) == pytest.approx((0 + 1 + 2 + 3 * (3 + 4 + 5)) / (3 + 9))
    assert check_metric(Mean, [(1.0,), (2.0, 3.0), (torch.tensor(4.0), 0.0)]) == pytest.approx(7 / 4)


def test_a_mean_of_many_small_values_does_not_lose_them() -> None:
    mean = Mean()
    for _ in range(1000):
        mean.update(torch.full((100,), 1e-4))
    mean.update(torch.tensor([1e4]))
    assert mean.value(mean.sums, mean.maxima) == pytest.approx(
        (1e4 + 1e5 * float(torch.tensor(1e-4))) / 100001, rel=1e-9
    )


@pytest.mark.parametrize("accuracy", [0.05, 0.01, 0.001])
def test_quantiles_are_within_the_stated_error(accuracy: float) -> None:
    signed = [(one * torch.sign(torch.sin(one * 100)),) for (one,) in values()]
    everything = union(signed)
    quantiles = (0.0, 0.01, 0.3, 0.5, 0.9, 0.99, 1.0)
    found = check_metric(lambda: Quantile(quantiles, accuracy), signed)
    assert isinstance(found, dict)
    for q, (name, value) in zip(quantiles, found.items(), strict=True):
        exact = np.quantile(everything, q, method="lower")
        assert name == f"p{100 * q:g}"
        assert abs(value - exact) <= accuracy * abs(exact) * (1 + 1e-9), (q, value, exact)
    assert (found["p0"], found["p100"]) == (everything.min(), everything.max())


def test_quantiles_of_odd_values() -> None:
    def quantiles(*numbers: float) -> dict[str, float]:
        one = Quantile((0.5,))
        one.update(torch.tensor(numbers, dtype=torch.float64))
        return dict(one.value(one.sums, one.maxima))

    assert quantiles(0.0, 0.0, 5.0) == {"p50": 0.0}
    assert quantiles(1e-12, 1e-12) == {"p50": pytest.approx(1e-12)}  # its extremes bound it
    assert quantiles(2e12) == {"p50": pytest.approx(2e12, rel=1)}
    assert quantiles(-3.0) == {"p50": -3.0}
    assert math.isnan(quantiles(1.0, math.nan)["p50"])


def test_a_histogram_is_numpys() -> None:
    data = values()
    found = check_metric(lambda: Histogram(0, 8, bins=16), data)
    counts, edges = np.histogram(union(data).clip(0, 8 - 1e-9), 16, (0, 8))
    assert found == Bins(tuple(edges), tuple(map(float, counts)))


def classes(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    labels = torch.randint(0, 5, (size,), generator=generator)
    labels[torch.rand(size, generator=generator) < 0.3] = -100
    return torch.randn(size, 5, generator=generator), labels


def test_accuracy_and_the_confusion_matrix() -> None:
    data = [classes(size) for size in SIZES]
    scores, labels = torch.cat([one for one, _ in data]), torch.cat([one for _, one in data])
    scores, labels = scores[labels != -100], labels[labels != -100]
    right = scores.argmax(-1) == labels
    assert check_metric(Accuracy, data) == pytest.approx(float(right.double().mean()), rel=1e-12)
    among = (scores.topk(3).indices == labels[:, None]).any(-1)
    assert check_metric(lambda: Accuracy(top=3), data) == pytest.approx(float(among.double().mean()), rel=1e-12)
    found = check_metric(lambda: ConfusionMatrix(5, cells=True), [(one.argmax(-1), two) for one, two in data])
    assert isinstance(found, dict)
    assert found["accuracy"] == pytest.approx(float(right.double().mean()))
    precisions = [float((labels[scores.argmax(-1) == c] == c).double().mean()) for c in range(5)]
    recalls = [float((scores.argmax(-1)[labels == c] == c).double().mean()) for c in range(5)]
    assert found["precision"] == pytest.approx(sum(precisions) / 5)
    assert found["recall"] == pytest.approx(sum(recalls) / 5)
    f1 = [2 * p * r / (p + r) if p + r else 0.0 for p, r in zip(precisions, recalls, strict=True)]
    assert found["f1"] == pytest.approx(sum(f1) / 5)
    assert found["2.3"] == int(((labels == 2) & (scores.argmax(-1) == 3)).sum())


def test_auroc_is_the_share_of_pairs_in_order() -> None:
    data = []
    for size in SIZES:
        generator = torch.Generator().manual_seed(size)
        labels = torch.randint(0, 2, (size,), generator=generator)
        data.append(((torch.rand(size, generator=generator) + 0.3 * labels) / 1.3, labels))
    scores, labels = union(data), union(data, 1)
    positive, negative = scores[labels == 1], scores[labels == 0]
    exact = (positive[:, None] > negative).mean()
    tied = (np.floor(positive[:, None] * 4096) == np.floor(negative * 4096)).mean()
    assert abs(float(check_metric(AUROC, data)) - exact) <= tied / 2 + 1e-12  # type: ignore[arg-type]
    coarse = (np.floor(positive[:, None] * 8) == np.floor(negative * 8)).mean()
    assert abs(float(check_metric(lambda: AUROC(8), data)) - exact) <= coarse / 2  # type: ignore[arg-type]
    one = AUROC()
    one.update(torch.tensor([0.2, 0.3]), torch.tensor([1, 1]))
    assert math.isnan(one.value(one.sums, one.maxima))


def test_what_can_not_be_a_metric_is_refused() -> None:
    for make in (
        lambda: Quantile((50,)),
        lambda: Quantile(accuracy=0),
        lambda: Histogram(1, 1),
        lambda: Histogram(0, 1, 0),
    ):
        with pytest.raises(ValueError, match="quantiles|histogram"):
            make()


class Kept(Sum):
    """Keeps something beside its state."""

    def update(self, numbers: Any) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        super().update(numbers * self.calls)


class Read(Sum):
    """Waits for the device."""

    def update(self, numbers: Any) -> None:
        self.sums[0] += float(numbers.sum())


class Averaged(Mean):
    """A mean of means."""

    def update(self, numbers: Any) -> None:
        if numbers.numel():
            self.sums += torch.tensor([1.0, 0.0]) * numbers.mean()
            self.sums[1] = 1

    def value(self, sums: Tensor, maxima: Tensor) -> float:
        return float(sums[0] / sums[1])


class Nowhere(Metric):
    """Observes nothing."""

    def __init__(self) -> None:
        super().__init__(sums=1)

    def update(self, numbers: Any) -> None: ...


class Graph(Sum):
    """Keeps a graph."""

    def update(self, numbers: Any) -> None:
        self.sums = self.sums + numbers.sum() * torch.ones((), dtype=torch.float64, requires_grad=True)


class Spoils(Sum):
    """Changes what it is to look at."""

    def value(self, sums: Tensor, maxima: Tensor) -> float:
        return float(sums.mul_(2)[0])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Kept, "it keeps something beside|instead of"),
        (Read, "`update` waits for the device"),
        (Averaged, "over ranks with"),
        (Nowhere, "kept elsewhere, or nowhere"),
        (Graph, "keeps a graph"),
        (Spoils, "changes the state"),
        (dict, "expected a forge_train.Metric"),
    ],
)
def test_a_wrong_metric_is_caught(wrong: Any, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_metric(wrong, values())


class Observing(Plugin):
    """The loss, in a metric."""

    api = (1, 0)
    metric: Any = Mean

    @hookimpl
    def metrics(self, job: Any) -> dict[str, Metric]:
        self.loss = self.metric()
        return {"loss": self.loss}

    @hookimpl
    def on_step(self, step: Any) -> None:
        self.loss.update(step.loss)


class Forgets(Observing):
    """Its metric keeps something that no checkpoint holds."""

    metric = Kept


class Early(Observing):
    """Its metric begins with something observed."""

    @hookimpl
    def metrics(self, job: Any) -> dict[str, Metric]:
        self.loss = Mean()
        self.loss.maxima = torch.zeros(1, dtype=torch.float32)
        return {"loss": self.loss}


@pytest.mark.slow
def test_plugins_check_resumes_metrics_between_logged_steps() -> None:
    assert check(Observing).passed
    wrong = {one.name: one.detail for one in check(Forgets).of("fail")}
    assert "observing.loss" in wrong.get("its metrics are resumed between logged steps", "").replace(
        "forgets", "observing"
    )
    assert any("`maxima` must be a float64 tensor" in one.detail for one in check(Early).of("fail"))


class Text(Sum):
    """Gives no number."""

    def value(self, sums: Tensor, maxima: Tensor) -> Any:
        return "text"


class Fails(Sum):
    """Can't be computed."""

    def value(self, sums: Tensor, maxima: Tensor) -> Any:
        return 1 / 0


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"x": Text}, r"The metric 'observes\.x': value \(.*\) must return a number, .* or a Bins, found 'text'"),
        ({"x": Fails}, r"The metric 'observes\.x': value \(.*\) failed: ZeroDivisionError: division by zero"),
        ({"": Sum}, r"The metric 'observes\.': a name is not empty"),
        ({"a b": Sum}, r"The metric 'observes\.a b': a name is not empty, and has no spaces"),
    ],
)
def test_a_plugins_mistake_names_its_metric(run_forge: RunForge, made: dict[str, type[Sum]], says: str) -> None:
    class Observes(Plugin):
        """Observes gradient norms."""

        api = (1, 0)

        @hookimpl
        def metrics(self) -> dict[str, Metric]:
            self.made: dict[str, Metric] = {name: cls() for name, cls in made.items()}
            return self.made

        @hookimpl
        def on_gradients(self, update: Update) -> None:
            for one in self.made.values():
                one.update(update.grad_norm)  # type: ignore[attr-defined]

    with pytest.raises(PluginError, match=says):
        run_forge([Observes], steps=1)


def test_scores_without_classes_are_no_scores() -> None:
    with pytest.raises(ValueError, match=r"scores \[3\] need labels of their shape without classes, found \[3\]"):
        Accuracy().update(torch.zeros(3), torch.zeros(3))
