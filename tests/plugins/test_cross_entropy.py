"""The loss, in one piece and in chunks, against torch's own in fp64, and the memory it needs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakes
from forge_train import MASKED
from forge_train_kit.model import Linear
from forge_train_kit.model.chunks import CHUNKS, LOGITS, chosen
from forge_train_plugins.tasks._cross_entropy import ChunkedCrossEntropy
from forge_train_plugins.tasks.cross_entropy import CrossEntropy
from peak_memory import peak_memory

pytestmark = pytest.mark.unit


def case(vocabulary: int = 19, batch: int = 3, sequence: int = 10, dim: int = 8) -> tuple[Tensor, nn.Module, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(batch, sequence, dim, generator=generator).requires_grad_()
    labels = torch.randint(0, vocabulary, (batch, sequence), generator=generator)
    labels[0, :4] = labels[-1, -1] = MASKED
    return hidden, fakes.initialised(Linear(dim, vocabulary)), labels


def gradients(loss: Tensor, hidden: Tensor, head: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [hidden, *head.parameters()]))


@pytest.mark.parametrize(("z_loss", "smoothing"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.2), (0.1, 0.2)])
@pytest.mark.parametrize("chunk", [0, 1, 4, 7, 1000])
def test_loss_and_gradients_are_those_of_the_definition(chunk: int, z_loss: float, smoothing: float) -> None:
    hidden, head, labels = case()
    logits = head.double()(hidden.double())
    kept = labels != MASKED
    expected = F.cross_entropy(logits[kept], labels[kept], reduction="sum", label_smoothing=smoothing)
    expected = expected + z_loss * logits[kept].exp().sum(-1).log().square().sum()
    wanted = gradients(expected, hidden, head)

    made = fakes.make(CrossEntropy, chunk=chunk, z_loss=z_loss, label_smoothing=smoothing)
    loss = made.loss(None)(hidden, head.float(), labels)
    assert loss.dtype == torch.float32
    assert loss.ndim == 0
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for found, value in zip(gradients(loss, hidden, head), wanted, strict=True):
        torch.testing.assert_close(found, value.to(found.dtype), rtol=1e-4, atol=1e-5)


def test_evaluation_is_the_cross_entropy_alone() -> None:
    """Bits per byte, perplexity and comparisons of runs mean that."""
    hidden, head, labels = case()
    loss = ChunkedCrossEntropy(z_loss=0.1, label_smoothing=0.2)
    assert loss(hidden, head, labels).item() != pytest.approx(ChunkedCrossEntropy()(hidden, head, labels).item())
    assert loss(hidden, head.eval(), labels).item() == ChunkedCrossEntropy()(hidden, head, labels).item()


@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_nothing_to_learn_from_is_no_loss_and_no_gradient(chunk: int, z_loss: float) -> None:
    hidden, head, labels = case()
    loss = ChunkedCrossEntropy(z_loss, chunk, label_smoothing=z_loss)(hidden, head, torch.full_like(labels, MASKED))
    assert loss.item() == 0
    assert all((g == 0).all() for g in gradients(loss, hidden, head))


def test_narrow_logits_are_widened_before_the_softmax() -> None:
    hidden, head, labels = case()
    loss = ChunkedCrossEntropy()(hidden.bfloat16(), head.bfloat16(), labels)
    exact = F.cross_entropy(
        head(hidden.bfloat16()).double().flatten(0, 1), labels.flatten(), ignore_index=MASKED, reduction="sum"
    )
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)


class CountingHead(Linear):
    """Remembers what it was called with."""

    def __init__(self, dim: int, vocabulary: int) -> None:
        super().__init__(dim, vocabulary)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.shapes.append(tuple(x.shape))
        return super().forward(x)


@pytest.mark.parametrize(
    ("chunk", "grad", "calls"),
    [(0, True, [(3, 10, 8)]), (6, True, 5 * [(3, 2, 8)]), (6, False, 5 * [(3, 2, 8)])],
    ids=["small: at once", "chunks: once each", "evaluation: once each"],
)
def test_calls_the_head_as_a_module(chunk: int, grad: bool, calls: list[tuple[int, ...]]) -> None:
    hidden, _, labels = case()
    head = CountingHead(8, 19)
    with torch.set_grad_enabled(grad):
        loss = ChunkedCrossEntropy(chunk=chunk)(hidden, head, labels)
    if grad:
        loss.backward()
    assert head.shapes == calls


def test_chunks_are_as_large_as_memory_allows() -> None:
    head = nn.Linear(1, 2**15, device="meta")
    assert chosen(1024, head) == LOGITS // 2**15
    assert chosen(2**20, head) == 2**20 // CHUNKS


@pytest.mark.slow
def test_memory_is_under_a_third_of_the_plain_form() -> None:
    hidden, head, labels = case(vocabulary=2**15, batch=2, sequence=1024, dim=16)

    def peak(loss: ChunkedCrossEntropy) -> int:
        return peak_memory(lambda: gradients(loss(hidden, head, labels), hidden, head))

    plain = peak(ChunkedCrossEntropy(chunk=2048))
    assert plain >= 2 * 2048 * 2**15 * 4, "logits and their softmax"
    assert peak(ChunkedCrossEntropy()) <= 0.3 * plain
