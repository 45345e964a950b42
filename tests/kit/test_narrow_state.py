"""Stochastic rounding is unbiased and repeats itself; narrow state takes the steps that wide state takes."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from forge_train import PluginError
from forge_train_kit.optim import NarrowState, stochastic
from forge_train_kit.optim.at_rest import AtRest
from forge_train_kit.optim.stochastic import bits, numbers, rounded
from forge_train_kit.sections import StateDtype

pytestmark = [pytest.mark.unit]


@pytest.mark.parametrize("share", [0.02, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("scale", [1.0, -3e-12, 1e30])
def test_rounding_is_unbiased(share: float, scale: float) -> None:
    """The share that goes up is binomial; five standard deviations fail once in a million draws, and the draws are
    always these."""
    low = torch.tensor(scale).to(torch.bfloat16).float()
    high = (low.view(torch.int32) + 0x10000).view(torch.float32)
    values = torch.full((1000, 500), float(low)) + share * (high - low)
    exact = float((values[0, 0] - low) / (high - low))
    found = rounded(values, 0, "weight", 1).float()
    assert set(found.unique().tolist()) == {float(low), float(high)}
    up = float((found == high).float().mean())
    assert abs(up - exact) <= 5 * math.sqrt(exact * (1 - exact) / values.numel())


def test_rows_columns_steps_and_names_are_drawn_apart() -> None:
    values = torch.full((512, 512), 1 + 2.0**-8)  # halfway
    draws = [rounded(values, *key).float() > 1 for key in ((0, "a", 0), (0, "a", 1), (0, "b", 0), (1, "a", 0))]
    for number, one in enumerate(draws):
        for dim in (0, 1):
            means = one.float().mean(dim)
            assert means.std() == pytest.approx(0.5 / math.sqrt(512), rel=0.2), "as of independent draws"
        for other in draws[number + 1 :]:
            assert (one == other).float().mean() == pytest.approx(0.5, abs=5 * 0.5 / 512)
        assert (one[:, 1:] == one[:, :-1]).float().mean() == pytest.approx(0.5, abs=5 * 0.5 / 512)


def test_what_fits_and_what_is_not_finite_stays() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, math.nan, 3.4e38, 1e-40])
    found = rounded(values, "key")
    torch.testing.assert_close(found[:6].float(), values[:6], rtol=0, atol=0)
    assert found[6].isnan()
    assert abs(float(found[8]) - 1e-40) <= 1e-40


def test_the_bits_are_those_of_the_formula() -> None:
    """In integers of any size; a checkpoint's run continues with the same bits on every device."""
    import hashlib

    places = torch.tensor([0, 1, 2, 12345, 2**31 - 1, 2**31, 2**31 + 5, 2**33 + 7, 5 * 2**40])
    for key in ((0, "weight", 1), ("b", 7), (-3, "moment", 10**9)):
        digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
        factor = int.from_bytes(digest[:4], "little") >> 1 | 1
        wanted = []
        for place in places.tolist():
            x = ((place & 0x7FFFFFFF) * factor + int.from_bytes(digest[4:], "little")) & 0xFFFFFFFF
            for shift, prime in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
                x = ((x ^ (x >> shift)) * prime) & 0xFFFFFFFF
            wanted.append(x ^ (x >> 15))
        assert [one & 0xFFFFFFFF for one in bits(places, *numbers(key)).tolist()] == wanted


def test_a_device_computes_them_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step, name or shape is compiled anew, and nothing breaks the graph."""
    graphs: list[Any] = []

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    draws = [(torch.randn(shape), ("w", step)) for step in range(4) for shape in ((300,), (64, 5), (7, 40), (3, 4, 50))]
    wanted = [rounded(values, *key) for values, key in draws]
    monkeypatch.setattr(stochastic, "_can_fuse", lambda device: True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counted))
    stochastic._compiled.cache_clear()
    for (values, key), right in zip(draws, wanted, strict=True):
        assert torch.equal(rounded(values, *key), right)
    assert len(graphs) <= 4, "one for each number of dimensions, and one for shapes that fit into 32 bits"


def made(weights: list[nn.Parameter], first: StateDtype = "fp32", second: StateDtype = "fp32") -> NarrowState:
    inner = torch.optim.AdamW(weights, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    return narrow(inner, weights, {"exp_avg": (first, True), "exp_avg_sq": (second, False)})


def narrow(
    inner: torch.optim.Optimizer,
    weights: list[nn.Parameter],
    formats: Mapping[str, tuple[StateDtype, bool]],
    masters: bool = True,
) -> NarrowState:
    names: dict[torch.Tensor, str] = {weight: f"weight{number}" for number, weight in enumerate(weights)}
    return NarrowState(inner, AtRest(names, formats, masters=masters, seed=0))


def weights_of(dtype: torch.dtype, start: float = 0.5) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter((torch.randn(shape, generator=generator) + start).to(dtype)) for shape in ((40, 30), (7,))]


def give(weights: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator).to(torch.bfloat16).to(weight.dtype)


def test_masters_take_the_steps_of_fp32_parameters() -> None:
    narrow, wide = weights_of(torch.bfloat16), weights_of(torch.bfloat16)
    exact = [nn.Parameter(weight.detach().float()) for weight in wide]
    one, other = made(narrow), torch.optim.AdamW(exact, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for seed in range(20):
        give(narrow, seed)
        give(exact, seed)
        one.step()
        other.step()
    for weight, reference in zip(narrow, exact, strict=True):
        assert torch.equal(one.state[weight]["master"], reference.detach())
        assert torch.equal(weight.detach(), reference.detach().to(torch.bfloat16))
        assert one.state[weight]["master"].grad is None


def test_without_masters_small_steps_are_not_lost() -> None:
    """A step of 0.01 % of a weight is a fortieth of what bf16 can tell; rounded to nearest, nothing would move."""
    weight = nn.Parameter(torch.full((100, 100), 1.0, dtype=torch.bfloat16))
    one = narrow(torch.optim.SGD([weight], lr=1e-4), [weight], {}, masters=False)
    for _ in range(400):
        weight.grad = torch.full_like(weight, -1.0)
        one.step()
    assert float(weight.detach().float().mean()) == pytest.approx(1.04, abs=5e-4)
    assert not one.state[weight].keys() - {"roundings"}


def test_a_second_moment_in_bf16_follows_small_changes() -> None:
    """1 − β₂ is less than bf16's epsilon: rounded to nearest, the mean of squares would stand still."""
    weight = nn.Parameter(torch.zeros(200, 200))
    inner = torch.optim.AdamW([weight], lr=1e-3, betas=(0.9, 0.999))
    one = narrow(inner, [weight], {"exp_avg_sq": ("bf16", False)})
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        one.step()
    state = one.state[weight]
    assert state["exp_avg_sq"].dtype is torch.bfloat16
    assert state["exp_avg"].dtype is torch.float32
    assert float(state["exp_avg_sq"].float().mean()) == pytest.approx(1 - 0.999**200, rel=2e-3)


def test_a_few_parameters_at_a_time_or_all_at_once_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for room in (1 << 24, 10):
        monkeypatch.setattr("forge_train_kit.optim.narrow_state.ROOM", room)
        weights = weights_of(torch.float32)
        one = made(weights, "bf16", "bf16")
        for seed in range(3):
            give(weights, seed)
            one.step()
        ends.append([weight.detach().clone() for weight in weights])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_its_state_goes_round() -> None:
    first, second = (weights_of(torch.float32) for _ in range(2))
    one, other = (made(weights, second="bf16") for weights in (first, second))
    give(first, 0)
    one.step()
    for weight, saved in zip(second, first, strict=True):
        weight.data.copy_(saved.data)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for weight, saved in zip(second, first, strict=True):  # as the kernel does: torch casts to the parameter's dtype
        other.state[weight]["exp_avg_sq"] = one.state[saved]["exp_avg_sq"].clone()
    for weights, optimizer in ((first, one), (second, other)):
        give(weights, 1)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Counting(torch.optim.SGD):
    """Counts its steps in its groups."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


def test_state_of_a_group_is_refused() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    one = narrow(Counting([weight], lr=0.1), [weight], {"momentum": ("bf16", True)})
    with pytest.raises(PluginError, match="Counting keeps 'count' in its groups"):
        one.step()
