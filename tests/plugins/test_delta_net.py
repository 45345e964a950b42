"""The gated delta rule against a plain recurrence in fp64, and what the plugin makes of it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fakes
from forge_train import ConfigError
from forge_train.compose.initialise import materialise
from forge_train_kit.layers import Layer
from forge_train_kit.optim import hidden_matrices
from forge_train_plugins.attention._delta_net.module import GatedDeltaNet
from forge_train_plugins.attention._delta_net.rule import in_chunks, in_steps
from forge_train_plugins.attention.delta_net import DeltaNet

pytestmark = [pytest.mark.unit]

LAYER = Layer(index=0, num_layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ffn_dim=48)
SIZES: dict[str, Any] = {"heads": 4, "k_heads": 2, "k_dim": 8, "v_dim": 6, "chunk": 8}


def module(layer: Layer = LAYER, *, seed: int = 0, **values: Any) -> GatedDeltaNet:
    """With random weights everywhere."""
    plugin = fakes.make(DeltaNet, **(SIZES | values))
    return fakes.initialised(plugin.attention(layer, fakes.job()), seed)  # type: ignore[no-any-return]


# -- the rule ---------------------------------------------------------------------------------------------------------


def naive(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ids: Tensor | None = None) -> Tensor:
    """One token and one head at a time, as the paper writes it."""
    batch, length, heads, v_dim = v.shape
    each = heads // q.shape[2]
    out = []
    for row in range(batch):
        for head in range(heads):
            state, own = torch.zeros(q.shape[-1], v_dim, dtype=q.dtype), head // each
            for t in range(length):
                if ids is not None and t and ids[row, t] != ids[row, t - 1]:
                    state = torch.zeros_like(state)
                state = g[row, t, head].exp() * state
                state = state + beta[row, t, head] * torch.outer(
                    k[row, t, own], v[row, t, head] - k[row, t, own] @ state
                )
                out.append(q[row, t, own] @ state)
    return torch.stack(out).view(batch, heads, length, v_dim).transpose(1, 2)


def given(length: int, dtype: torch.dtype, batch: int = 2, decay: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    q, k = (F.normalize(draw(batch, length, 2, 8), dim=-1) for _ in range(2))
    g, beta = -decay * draw(batch, length, 4).exp(), draw(batch, length, 4).sigmoid()
    return [x.to(dtype) for x in (q, k, draw(batch, length, 4, 6), g, beta)]


def documents(length: int) -> Tensor:
    """Of both rows, with documents of one token, and borders within chunks and between them."""
    cuts = ([length // 3, length // 3 + 1, 16], [8, length - 1])
    at = torch.arange(length)
    return torch.stack([torch.stack([at >= cut for cut in row]).sum(0) for row in cuts])


@pytest.mark.parametrize("decay", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 37])
def test_chunks_and_steps_are_the_plain_recurrence(length: int, decay: float) -> None:
    wide, narrow = given(length, torch.float64, decay=decay), given(length, torch.float32, decay=decay)
    wanted = naive(*wide)
    torch.testing.assert_close(in_chunks(*wide, size=8)[0], wanted, rtol=1e-10, atol=1e-10)
    state = torch.zeros(2, 4, 8, 6, dtype=torch.float64)
    torch.testing.assert_close(in_steps(*wide, state)[0], wanted, rtol=1e-10, atol=1e-10)
    stepped, last = in_steps(*narrow, state.float())
    for size in (1, 8, 64):
        chunked, end = in_chunks(*narrow, size=size)
        assert (chunked.double() - wanted).abs().max() <= 1e-5
        assert (chunked - stepped).abs().max() <= 1e-5
        assert (end - last).abs().max() <= 1e-5


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("size", [1, 5, 8, 64])
def test_gradients_of_chunks_are_those_of_the_plain_recurrence(size: int, packed: bool) -> None:
    ids = documents(21) if packed else None
    inputs = [x.requires_grad_() for x in given(21, torch.float64)]
    weights = torch.randn(2, 21, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outs = naive(*inputs, ids), in_chunks(*inputs, size=size, document_ids=ids)[0]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-10, atol=1e-10)
    wanted, found = (torch.autograd.grad((out * weights).sum(), inputs) for out in outs)
    for mine, one in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, one, rtol=1e-9, atol=1e-9)


def test_a_state_is_carried_from_one_call_to_the_next() -> None:
    inputs = given(29, torch.float64)
    whole, last = in_chunks(*inputs, size=8)
    first, state = in_chunks(*(x[:, :11] for x in inputs), size=8)
    second, end = in_chunks(*(x[:, 11:] for x in inputs), size=8, state=state)
    torch.testing.assert_close(torch.cat((first, second), 1), whole)
    torch.testing.assert_close(end, last)


def test_what_follows_a_large_decay_is_as_exact() -> None:
    """Also where it is what a chunk's earlier document forgot."""
    inputs = given(30, torch.float64, decay=0.01)
    inputs[3][:, 3] = -1e5
    for ids in (None, documents(30)):
        wanted = naive(*inputs, ids)
        found, _ = in_chunks(*(x.float() for x in inputs), size=16, document_ids=ids)
        assert (found.double() - wanted).abs().max() <= 1e-5


def test_a_head_that_forgets_everything_at_once_has_finite_gradients() -> None:
    inputs = given(20, torch.float32, decay=1e4)
    inputs = [x.requires_grad_() for x in inputs]
    out, _ = in_chunks(*inputs, size=8)
    assert all(bool(grad.isfinite().all()) for grad in torch.autograd.grad(out.square().sum(), inputs))


# -- the module -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [{}, {"k_heads": 4}, {"convolution": 1}, {"convolution": 7}], ids=str)
@pytest.mark.parametrize("cuts", [(0, 9, 10, 17, 18, 19, 30), (0, 1, 2, 30), (0, 30)], ids=str)
def test_pieces_through_the_cache_are_the_whole(values: dict[str, Any], cuts: tuple[int, ...]) -> None:
    attention = module(**values)
    x = torch.randn(2, 30, 32, generator=torch.Generator().manual_seed(1))
    cache = attention.new_cache(2, 30)
    with torch.no_grad():
        pieces = [attention(x[:, a:b], cache=cache) for a, b in itertools.pairwise(cuts)]
        assert (torch.cat(pieces, 1) - attention(x)).abs().max() <= 1e-5
    assert cache.length == 30
    with pytest.raises(ValueError, match="at most 30 positions; this would make it 2 of 31"):
        attention(x[:, :1], cache=cache)


def test_a_cache_is_as_large_for_any_number_of_tokens() -> None:
    attention = module()
    held = []
    for length in (5, 500):
        cache = attention.new_cache(1, 500)
        attention(torch.randn(1, length, 32), cache=cache)
        held.append(sum(x.numel() for x in cache.held))
    assert held[0] == held[1] == 4 * 8 * 6 + 3 * (16 + 16 + 24)


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_packed_documents_are_as_if_alone(chunk: int) -> None:
    attention = module(chunk=chunk).double()
    x = torch.randn(2, 29, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    lengths = ([8, 1, 2, 18], [12, 16, 1])
    ids = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    packed = attention(x, document_ids=ids)
    for row, sizes in enumerate(lengths):
        alone = torch.cat([attention(piece[None])[0] for piece in x[row].split(sizes)])
        torch.testing.assert_close(packed[row], alone, rtol=1e-10, atol=1e-10)


def test_generation_goes_on_with_the_last_of_packed_documents() -> None:
    attention = module().double()
    x = torch.randn(1, 14, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[0] * 10 + [1] * 2])
    cache = attention.new_cache(1, 14)
    with torch.no_grad():
        attention(x[:, :12], document_ids=ids, cache=cache)
        after = attention(x[:, 12:], cache=cache)
        torch.testing.assert_close(after, attention(x[:, 10:])[:, 2:])
    with pytest.raises(ValueError, match="does not store document ids"):
        attention(x[:, :0], document_ids=ids[:, :0], cache=cache)


def test_nothing_of_a_document_or_of_new_memory_reaches_another() -> None:
    attention = module()
    x = torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[0] * 5 + [1] * 8 + [2] * 7])
    clean = attention(x, document_ids=ids)
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        x[:, :5], x[:, 13:] = 1e4, -1e4
        assert torch.equal(attention(x, document_ids=ids)[:, 5:13], clean[:, 5:13])
    finally:
        torch.use_deterministic_algorithms(False)


def test_bf16_trains_and_is_near_fp32() -> None:
    attention = module()
    x = torch.randn(2, 30, 32, generator=torch.Generator().manual_seed(1))
    exact = attention(x)
    found = attention.bfloat16()(x.bfloat16())
    assert found.dtype == torch.bfloat16
    assert (found - exact).norm() <= 0.05 * exact.norm()
    found.float().square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in attention.parameters())


def test_recomputation_changes_no_gradient_and_keeps_less() -> None:
    found, kept = [], []
    for recompute in (True, False):
        attention, sizes = module(recompute=recompute), list[int]()
        x = torch.randn(2, 30, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, held=sizes: held.append(t.numel()) or t, lambda t: t):
            out = attention(x)
        found.append(torch.autograd.grad(out.square().sum(), [x, *attention.parameters()]))
        kept.append(sum(sizes))
    assert all(map(torch.equal, *found))
    assert kept[0] < kept[1] / 2


@pytest.mark.slow
@pytest.mark.extended
def test_compiled_for_any_size_it_has_the_same_gradients() -> None:
    attention = module(recompute=False, convolution=2)
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    found = []
    for one in (attention, torch.compile(attention, backend="aot_eager", dynamic=True)):
        out = one(x)
        found.append((out, *torch.autograd.grad(out.square().sum(), [x, *attention.parameters()])))
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)


def test_optimizers_of_matrices_leave_convolutions_and_decays_alone() -> None:
    attention = module()
    names = hidden_matrices(fakes.part_model(attention))
    assert names == {f"{one}.weight" for one in ("q", "k", "v", "gate", "alpha", "beta", "o")}


def test_it_starts_as_published_and_each_layer_differently() -> None:
    def built(index: int) -> Any:
        with torch.device("meta"):
            made = fakes.make(DeltaNet, **(SIZES | {"heads": 512, "k_heads": 512})).attention(
                replace(LAYER, index=index), fakes.job()
            )
        materialise(made, torch.device("cpu"), seed=3)
        return made

    one, other = built(0), built(1)
    rates, steps = one.decay.A_log.detach().exp(), F.softplus(one.decay.dt_bias.detach())
    assert 0 < float(rates.min()) < 1
    assert 15 < float(rates.max()) <= 16
    assert abs(float(rates.mean()) - 8) < 1
    assert 0.000999 <= float(steps.min()) < 0.0011
    assert 0.09 < float(steps.max()) <= 0.1001
    assert abs(float(steps.log().mean()) - float(torch.tensor(0.01).log())) < 0.2
    assert float(one.q_conv.weight.detach().abs().max()) <= 0.5
    assert abs(float(one.q_conv.weight.detach().std()) - 0.5 / 3**0.5) < 0.01
    for name in ("decay.A_log", "decay.dt_bias", "q_conv.weight", "v_conv.weight"):
        assert not torch.equal(one.get_parameter(name), other.get_parameter(name)), name
    assert not torch.equal(one.q_conv.weight, one.k_conv.weight)


def test_operations_do_not_grow_with_the_sequence() -> None:
    weights = 32 * (2 * 16 + 3 * 24 + 2 * 4) + 4 * (2 * 16 + 24)
    assert module().flops_per_token(100) == module().flops_per_token(10_000) == 6 * (weights + 3 * 4 * 8 * 6)


# -- the plugin -------------------------------------------------------------------------------------------------------


def chosen(count: int, **values: Any) -> list[bool]:
    plugin = fakes.make(DeltaNet, **values)
    layers = (replace(LAYER, index=index, num_layers=count) for index in range(count))
    return [plugin.attention(layer, fakes.job()) is not None for layer in layers]


def test_three_layers_of_four_are_linear_unless_asked_otherwise() -> None:
    assert chosen(6) == [True, True, True, False, True, True]
    assert chosen(3, layers=()) == [True, True, True]
    assert chosen(3, layers=(False, True)) == [False, True, False]


def test_heads_and_features_are_the_decoders_unless_asked_otherwise() -> None:
    made = fakes.make(DeltaNet).attention(LAYER, fakes.job())
    assert (made.sizes.heads, made.sizes.k_heads, made.sizes.k_dim, made.sizes.v_dim) == (4, 4, 8, 8)


@pytest.mark.parametrize(
    ("change", "values", "message"),
    [
        ({"num_layers": 1}, {"layers": (False, True)}, "delta_net.layers selects none of the 1 layers"),
        ({"o_bias": True}, {"layers": ()}, "decoder.o_bias has no effect"),
        ({}, {"k_heads": 3}, "delta_net.k_heads: 3 does not divide the 4 heads"),
    ],
    ids=str,
)
def test_what_has_no_effect_or_does_not_fit_is_refused(
    change: dict[str, Any], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        module(replace(LAYER, **change), **({"heads": 0, "k_heads": 0} | values))


@pytest.mark.parametrize(
    ("values", "key"),
    [({"layers": (False, False)}, "delta_net.layers"), ({"heads": 4, "k_heads": 3}, "delta_net.k_heads")],
    ids=str,
)
def test_mistakes_are_problems_of_their_option(values: dict[str, Any], key: str) -> None:
    (problem,) = fakes.make(DeltaNet, **values).check_config()
    assert problem.key == key
