"""State in 8 and 4 bits: torchao's codes, unbiased, without updates that explode, and really smaller."""

from __future__ import annotations

import copy
import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from forge_train_kit.optim import stochastic
from forge_train_kit.optim.at_rest import AtRest
from forge_train_kit.optim.narrow_state import NarrowState
from forge_train_kit.optim.quantised import BLOCK, Codes, fits, table
from forge_train_kit.sections import StateDtype
from forge_train_plugins.optimizers._lion import SignMomentum
from forge_train_plugins.optimizers._schedule_free import ScheduleFreeAdamW

pytestmark = [pytest.mark.unit]
KINDS = [(8, True), (8, False), (4, True), (4, False)]


def test_tables_are_torchaos() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.optim import subclass_4bit, subclass_8bit
    for bits, module in ((8, subclass_8bit), (4, subclass_4bit)):
        assert table(bits, signed=True) == module.get_qmap_signed()
        assert table(bits, signed=False) == module.get_qmap_unsigned()


def quantised(values: torch.Tensor, bits: int, signed: bool, *key: object) -> torch.Tensor:
    """There and back."""
    codes = Codes(bits, signed=signed)
    return codes.widened(*codes.quantised(values, *key), values)


@pytest.mark.parametrize(("bits", "signed"), KINDS)
@pytest.mark.parametrize("scale", [1.0, 3e-20, 1e30])
def test_rounding_is_unbiased(bits: int, signed: bool, scale: float) -> None:
    """The mean of 4,000 draws of each of 64 values, in standard deviations of such a mean; 5 fail once in a million
    draws, and the draws are always these."""
    row = torch.linspace(-1 if signed else 0.07, 1, 64) ** 3
    row = row if signed or bits == 8 else row.clamp(min=1 / 16)  # it has no smaller value
    values = (row * scale).repeat(4000, 1)
    found = quantised(values, bits, signed, 0, "weight").double() / scale
    low, high = found.amin(0), found.amax(0)
    assert ((found == low) | (found == high)).all(), "to neighbours only"
    assert (low < high).sum() >= 40
    deviation = ((high - row) * (row - low)).clamp(min=0).sqrt() / math.sqrt(4000)
    assert ((found.mean(0) - row.double()).abs() <= 5 * deviation + 1e-6 * row.abs()).all()


@pytest.mark.parametrize(("bits", "signed"), KINDS)
def test_rows_are_cut_into_blocks_of_their_own(bits: int, signed: bool) -> None:
    """A large value in one block, or in another row, changes no other."""
    values = torch.rand(40, 300) + 0.1
    large = values.clone()
    large[3, BLOCK + 5] = 1e6
    one, other = quantised(values, bits, signed), quantised(large, bits, signed)
    apart = one != other
    assert apart[3, BLOCK : 2 * BLOCK].any()
    apart[3, BLOCK : 2 * BLOCK] = False
    assert not apart.any()
    assert float((one - values).abs().max()) <= (0.02 if bits == 8 else 0.25)


@pytest.mark.parametrize(("bits", "signed"), KINDS)
def test_zeros_and_what_is_not_finite(bits: int, signed: bool) -> None:
    values = torch.zeros(6, 2 * BLOCK)
    values[1, 0], values[2, 0], values[3, 1], values[4, 1] = math.inf, math.nan, 1e-38, 1e-44
    found = quantised(values, bits, signed)
    assert not found[[0, 5]].any()
    assert not found[:, BLOCK:].any()
    assert not found[[1, 2], :BLOCK].isfinite().any()
    assert found[[3, 4]].isfinite().all()
    assert (found[[3, 4], 1] > 0).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_positive_second_moment_stays_positive(bits: int) -> None:
    values = torch.logspace(-37, 30, 128).repeat(50, 1)
    assert (quantised(values, bits, False) > 0).all()


@pytest.mark.slow
def test_one_kernel_draws_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a device has a compiler: the same codes, and no step, name, shape or table is compiled anew."""
    graphs = []

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    tables = [Codes(bits, signed=signed) for bits in (8, 4) for signed in (True, False)]
    shapes = ((64, 200), (40, 300), (3, 50, 40), (5, 4, 300))
    drawn = [(torch.randn(shape).abs(), ("w", step)) for step in range(3) for shape in shapes]
    wanted = [one.quantised(values, *key) for values, key in drawn for one in tables]
    monkeypatch.setattr(stochastic, "_can_fuse", lambda device: True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counted))
    stochastic._compiled.cache_clear()
    found = [one.quantised(values, *key) for values, key in drawn for one in tables]
    assert all(
        torch.equal(*pair) for one, other in zip(found, wanted, strict=True) for pair in zip(one, other, strict=True)
    )
    assert 0 < len(graphs) <= 4, "one for each number of dimensions, and one for shapes that fit into 32 bits"


def weights_of(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def kept(inner: torch.optim.Optimizer, first: StateDtype, second: StateDtype) -> NarrowState:
    names: dict[torch.Tensor, str] = {p: str(n) for n, p in enumerate(inner.param_groups[0]["params"])}
    formats = dict.fromkeys(("exp_avg", "momentum"), (first, True)) | {"exp_avg_sq": (second, False)}
    return NarrowState(inner, AtRest(names, formats, masters=True, seed=0))


def largest_steps(first: StateDtype, second: StateDtype, betas: tuple[float, float]) -> tuple[float, float]:
    """Of this state and of fp32, with tiny gradients of all sizes beside one that comes always, or now and then."""
    weight, exact = weights_of((64, BLOCK)) + weights_of((64, BLOCK))
    settings = {"lr": 1.0, "betas": betas, "eps": 1e-30, "weight_decay": 0.0}
    one, other = kept(torch.optim.AdamW([weight], **settings), first, second), torch.optim.AdamW([exact], **settings)
    generator = torch.Generator().manual_seed(1)
    tiny, largest = torch.logspace(-12, -1, BLOCK), [0.0, 0.0]
    for step in range(60):
        gradient = torch.randn(weight.shape, generator=generator) * tiny
        gradient[:32, 7] = 1.0
        gradient[32:, 7] = 1.0 if step % 20 == 10 else 1e-6
        for number, (parameter, optimizer) in enumerate(((weight, one), (exact, other))):
            before = parameter.detach().clone()
            parameter.grad = gradient.clone()
            optimizer.step()
            assert parameter.isfinite().all()
            largest[number] = max(largest[number], float((parameter.detach() - before).abs().max()))
    return largest[0], largest[1]


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
@pytest.mark.parametrize(
    ("first", "second", "bounded"),
    [
        *(("8bit", "8bit", True), ("4bit", "4bit", True), ("8bit", "4bit", True), ("bf16", "8bit", True)),
        *(("8bit", "bf16", False), ("4bit", "8bit", False)),  # which is why they are refused
    ],
)
def test_one_large_gradient_among_tiny_ones_makes_no_large_step(
    first: StateDtype, second: StateDtype, bounded: bool, betas: tuple[float, float]
) -> None:
    found, right = largest_steps(first, second, betas)
    assert (found <= 2 * right) == bounded, (found, right)


def give(weights: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)


@pytest.mark.parametrize(
    ("make", "dtype", "least", "most"),
    [
        ("adamw", "8bit", 2, 2.1),
        ("adamw", "4bit", 1, 1.1),
        ("lion", "8bit", 1, 1.05),
        ("lion", "4bit", 0.5, 0.55),
        ("schedule_free", "8bit", 5, 5.05),
        ("schedule_free", "4bit", 4.5, 4.55),
    ],
)
def test_bytes_between_steps(make: str, dtype: StateDtype, least: float, most: float) -> None:
    """Of every element, all that the state holds; schedule-free's z is a weight, and stays fp32."""
    weights = weights_of((256, 384), (300, 4, 130))
    if make == "adamw":
        inner: torch.optim.Optimizer = torch.optim.AdamW(weights, lr=0.01)
    elif make == "lion":
        inner = SignMomentum(weights, lr=0.01, betas=(0.9, 0.99))
    else:
        inner = ScheduleFreeAdamW(weights, lr=0.01, betas=(0.9, 0.99))
    one = kept(inner, dtype, dtype)
    for seed in range(2):
        give(weights, seed)
        one.step()
    held = [value for state in one.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    assert inner.state is one.state, "nor does it keep what it was given"
    size = sum(tensor.untyped_storage().nbytes() for tensor in held) / sum(weight.numel() for weight in weights)
    assert least <= size <= most


def test_vectors_and_small_tensors_stay_as_they_are() -> None:
    assert [fits(shape) for shape in ((64, 64), (64, 63), (9000,), (9000, 16), (4, 32, 32), ())] == [
        *(True, False, False, False, True, False)
    ]


@pytest.mark.parametrize("dtype", ["8bit", "4bit"])
def test_what_was_saved_goes_on_to_the_bit(dtype: StateDtype) -> None:
    """Through `state_dict`, where codes have the shape of their parameter."""
    first, second = (weights_of((70, 131), (7,)) for _ in range(2))
    one, other = (kept(torch.optim.AdamW(weights, lr=0.01), dtype, dtype) for weights in (first, second))
    for seed in range(3):
        give(first, seed)
        one.step()
    saved = copy.deepcopy(one.state_dict())
    assert saved["state"][0]["exp_avg"].shape == (70, 131)
    assert saved["state"][0][f"exp_avg_{dtype}"].shape == (70, 2)
    assert saved["state"][1]["exp_avg"].dtype == torch.float32
    other.load_state_dict(saved)
    for number, weight in enumerate(second):  # as the kernel does: torch casts to the parameter's dtype
        weight.data.copy_(first[number].data)
        other.state[weight] = dict(saved["state"][number])
    for seed in (3, 4):
        for weights, optimizer in ((first, one), (second, other)):
            give(weights, seed)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    here, there = (optimizer.state_dict()["state"][0] for optimizer in (one, other))
    assert here.keys() == there.keys()
    assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(there[key])) for key, value in here.items())


@pytest.mark.parametrize("then", ["bf16", "4bit", "fp32"])
def test_state_of_other_bits_is_taken_over(then: StateDtype) -> None:
    """A run may continue with another `state`: what was saved says how it is read."""
    weights = weights_of((64, 128))
    one = kept(torch.optim.AdamW(weights, lr=0.01), "8bit", "8bit")
    give(weights, 0)
    one.step()
    other = kept(torch.optim.AdamW(weights, lr=0.01), then, then)
    other.state[weights[0]] = dict(one.state[weights[0]])
    give(weights, 1)
    other.step()
    assert not any(key.endswith("8bit") for key in other.state[weights[0]])
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, "4bit": torch.uint8}
    assert other.state[weights[0]]["exp_avg"].dtype == dtypes[then]
