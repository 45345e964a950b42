"""A loss in chunks: each chunk's gradients are computed with it where that is right, and later where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from forge_train_kit.model import Linear, sum_in_chunks
from forge_train_plugins.precision._precision import narrow

pytestmark = pytest.mark.unit
BATCH, SEQUENCE, DIM, WORDS, CHUNK = 2, 12, 8, 40, 8


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(words: int = WORDS, dim: int = DIM) -> tuple[Tensor, Any, Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = Linear(dim, words)
    with torch.no_grad():
        head.weight.normal_(generator=generator)
    hidden = torch.randn(BATCH, SEQUENCE, dim, generator=generator).requires_grad_()
    return hidden, head, torch.randint(0, words, (BATCH, SEQUENCE), generator=generator)


def entropy(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).float().flatten(0, 1), labels.flatten(), reduction="sum")


class Seen(TorchDispatchMode):
    """Counts casts of tensors of a shape, by dtype."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.casts = shape, list[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and tuple(out.shape) == self.shape:
            self.casts.append(out.dtype)
        return out


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_gradients_are_those_of_the_whole(scale: float) -> None:
    hidden, head, labels = made()
    whole = entropy(head, hidden, labels)
    wanted = torch.autograd.grad(whole * scale, (hidden, head.weight))
    cut = sum_in_chunks(partial(entropy, head), head, CHUNK, hidden, labels)
    torch.testing.assert_close(cut, whole)
    for found, right in zip(torch.autograd.grad(cut * scale, (hidden, head.weight)), wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


def test_three_products_and_one_cast_of_the_weights() -> None:
    """Recomputing costs a fourth product, and a cast in each of the chunks twice."""
    hidden, head, labels = made()
    part = nn.Module()
    part.head = head
    narrow(part, torch.bfloat16, torch.float32)
    hidden = hidden.detach().bfloat16().requires_grad_()
    with Seen((WORDS, DIM)) as seen, FlopCounterMode(display=False) as flops:
        sum_in_chunks(partial(entropy, head), head, CHUNK, hidden, labels).backward()
    assert seen.casts.count(torch.bfloat16) == 1
    assert flops.get_total_flops() == 3 * 2 * BATCH * SEQUENCE * DIM * WORDS
    weight = head._parameters["weight"]
    assert weight.grad.dtype == torch.float32

    exact = made()
    rounded = exact[1].weight.detach().bfloat16().double().requires_grad_()
    right = F.cross_entropy(
        F.linear(hidden.detach().double(), rounded).flatten(0, 1), labels.flatten(), reduction="sum"
    )
    (of_weight,) = torch.autograd.grad(right, rounded)
    assert float((weight.grad - of_weight).norm() / of_weight.norm()) < 1e-2


def test_a_frozen_head_and_frozen_inputs() -> None:
    hidden, head, labels = made()
    head.requires_grad_(False)
    sum_in_chunks(partial(entropy, head), head, CHUNK, hidden, labels).backward()
    assert hidden.grad is not None
    assert head.weight.grad is None
    hidden, head, labels = made()
    sum_in_chunks(partial(entropy, head), head, CHUNK, hidden.detach(), labels).backward()
    assert head.weight.grad is not None
    head.requires_grad_(False)
    assert not sum_in_chunks(partial(entropy, head), head, CHUNK, hidden.detach(), labels).requires_grad


def test_values_beside_the_loss_are_summed() -> None:
    hidden, head, labels = made()

    def both(hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss = entropy(head, hidden, labels)
        return loss, torch.stack([loss.detach(), loss.detach() * 2])

    total, seen = sum_in_chunks(both, head, CHUNK, hidden, labels)
    assert not seen.requires_grad
    (found,) = torch.autograd.grad(total * 3, hidden)
    (right,) = torch.autograd.grad(entropy(head, hidden, labels) * 3, hidden)
    assert seen.tolist() == pytest.approx([total.item(), 2 * total.item()])
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


def test_a_loss_of_several_numbers_has_the_gradients_of_all() -> None:
    hidden, head, labels = made()

    def two(hidden: Tensor, labels: Tensor) -> Tensor:
        return torch.stack([entropy(head, hidden, labels), hidden.square().sum()])

    weights = torch.tensor([2.0, 3.0])
    inputs = (hidden, head.weight)
    found = torch.autograd.grad(sum_in_chunks(two, head, CHUNK, hidden, labels) @ weights, inputs)
    right = torch.autograd.grad(two(hidden, labels) @ weights, inputs)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("leaf", [True, False])
def test_gradients_for_other_tensors_are_not_lost(leaf: bool) -> None:
    """A temperature that a loss closes over, or what a layer made of it: such a loss is recomputed as before."""
    hidden, head, labels = made()
    temperature = torch.tensor(1.5, requires_grad=True)

    def loss(hidden: Tensor, labels: Tensor) -> Tensor:
        return entropy(head, hidden, labels) / used

    used = temperature if leaf else temperature.exp()
    inputs = (hidden, head.weight, temperature)
    cut = sum_in_chunks(loss, head, CHUNK, hidden, labels)
    found = torch.autograd.grad(cut, inputs, retain_graph=True)
    right = torch.autograd.grad(entropy(head, hidden, labels) / used, inputs)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_narrow_copy_of_another_head_keeps_its_gradient() -> None:
    hidden, head, labels = made()
    part, other = nn.Module(), made()[1]
    part.head = other
    narrow(part, torch.bfloat16, torch.float32)

    def loss(hidden: Tensor, labels: Tensor) -> Tensor:
        return entropy(head, hidden, labels) + entropy(other, hidden.bfloat16(), labels)

    sum_in_chunks(loss, head, CHUNK, hidden, labels).backward()
    assert other._parameters["weight"].grad.abs().sum() > 0
    assert head.weight.grad is not None


def test_a_weight_that_is_more_than_a_cast_is_computed_in_each_chunk() -> None:
    """As with adapters: what is added to the narrow copy has a gradient of its own."""
    hidden, head, labels = made()
    narrow_hidden, added = hidden.detach().bfloat16(), torch.zeros(WORDS, DIM, requires_grad=True)

    class Adapted(Linear):
        weight = property(lambda self: self._parameters["weight"].bfloat16() + added.bfloat16())  # type: ignore[assignment]

    head.__class__ = Adapted
    sum_in_chunks(partial(entropy, head), head, CHUNK, narrow_hidden, labels).backward()
    own = head._parameters["weight"]
    assert own.dtype is torch.float32
    torch.testing.assert_close(added.grad, own.grad)


def test_a_head_has_its_parameters_back() -> None:
    hidden, head, labels = made()
    part = nn.Module()
    part.head = head
    before = dict(head._parameters)
    narrow(part, torch.bfloat16, torch.float32)

    def fails(hidden: Tensor, labels: Tensor) -> Tensor:
        assert head.weight is head._parameters["weight"]  # the copy
        raise ValueError("of the loss")

    with pytest.raises(ValueError, match="of the loss"):
        sum_in_chunks(fails, head, CHUNK, hidden, labels)
    assert dict(head._parameters) == before


def calls(head: nn.Module, hidden: Tensor, labels: Tensor) -> int:
    """How often a head is called, forward and backward."""
    counted: list[int] = []
    head.register_forward_hook(lambda *_: counted.append(1))
    sum_in_chunks(partial(entropy, head), head, CHUNK, hidden, labels).backward()
    return len(counted)


def test_where_chunks_are_recomputed(group: None) -> None:
    """Collectives around the head's backward pass stay where they are."""
    hidden, head, labels = made()
    assert calls(head, hidden, labels) == 2 * 3


def test_a_loss_in_fp16_waits_for_its_scale() -> None:
    hidden, head, labels = made()
    assert calls(head.half(), hidden.detach().half().requires_grad_(), labels) == 2 * 3
    hidden, head, labels = made()
    assert calls(head, hidden, labels) == 3


def test_backward_may_run_in_halves() -> None:
    """As pipelines do: first for the inputs, later for the weights."""
    hidden, head, labels = made()
    cut = sum_in_chunks(partial(entropy, head), head, CHUNK, hidden, labels)
    (of_hidden,) = torch.autograd.grad(cut, hidden, retain_graph=True)
    (of_weight,) = torch.autograd.grad(cut, head.weight)
    right = torch.autograd.grad(entropy(head, hidden, labels), (hidden, head.weight))
    torch.testing.assert_close(of_hidden, right[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(of_weight, right[1], rtol=1e-5, atol=1e-6)
