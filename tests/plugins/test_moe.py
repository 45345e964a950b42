"""`moe`: routers, experts, losses and statistics, against `transformers` and against what is written out naively."""

from __future__ import annotations

import dataclasses
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fakes
from forge_train import ConfigError, DivergedError, Plugin, hookimpl
from forge_train.contract.auxiliary import loss_scaling
from forge_train_kit.layers import Layer
from forge_train_kit.model.choices import heard_by
from forge_train_plugins.experts._alltoall.transport import Local
from forge_train_plugins.experts._moe import experts
from forge_train_plugins.experts._moe.block import MEASURES, MoEFeedForward, build
from forge_train_plugins.experts._moe.experts import Experts, automatic, grouped, looped
from forge_train_plugins.experts._moe.losses import balance
from forge_train_plugins.experts._moe.router import Choice, Router, kept, loads
from forge_train_plugins.experts._moe.slices import Slices
from forge_train_plugins.experts._moe.watch import Watch
from forge_train_plugins.experts.moe import MoE
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.testing import RunForge
from forge_train_tools.verification.routing import TIE, Counter

pytestmark = pytest.mark.unit
DIM, HIDDEN, EXPERTS = 32, 16, 8


def block(*, transport: Any = None, layout: Any = None, **values: Any) -> MoEFeedForward:
    """A layer with experts and random weights, in one process."""
    layer = Layer(
        index=0, num_layers=1, dim=DIM, heads=4, kv_heads=4, head_dim=8, ffn_dim=2 * HIDDEN, std=0.3, output_std=0.3
    )
    sizes = layout or SimpleNamespace(tp=1, etp=1, cp=1)
    hooks = SimpleNamespace(call=lambda spec, arguments: transport or Local())
    job: Any = SimpleNamespace(hooks=hooks, dist=SimpleNamespace(layout=sizes))
    made = build(MoE.Config(**{"experts": EXPERTS, "hidden": HIDDEN, **values}), layer, job, of=1)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.3)
    return made


def tokens(batch: int = 2, sequence: int = 12, *, seed: int = 1) -> Tensor:
    return torch.randn(batch, sequence, DIM, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def by_hand(made: MoEFeedForward, x: Tensor) -> Tensor:
    """Every token through every expert, weighted by what the router says."""
    routed = made.routed
    flat = x.flatten(0, 1)
    routing = routed.router(flat)
    weights = torch.zeros(len(flat), EXPERTS).scatter(1, routing.experts, routing.weights)
    experts = routed.experts
    inner = torch.einsum("td,ehd->teh", flat, experts.gate), torch.einsum("td,ehd->teh", flat, experts.up)
    out = torch.einsum("teh,edh,te->td", experts.combine(inner[0], inner[1]), experts.down, weights).view_as(x)
    return out if made.shared is None else out + made.shared(x)


def gradients(made: torch.nn.Module, x: Tensor, out: Tensor) -> dict[str, Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    named = dict(made.named_parameters())
    got = torch.autograd.grad((out * weights).sum(), [x, *named.values()])
    return dict(zip(["x", *named], got, strict=True))


def agree(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    for name in one:
        difference = (one[name] - other[name]).norm() / (other[name].norm() + 1e-9)
        assert difference <= tolerance, f"{name}: {difference}"


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"router": "sigmoid", "groups": 4, "top_groups": 2, "scaling": 2.5, "top_k": 3},
        {"normalise": False, "shared": 2},
        {"matmul": "loop", "activation": "geglu"},
        {"top_k": EXPERTS},
        {"top_k": 1, "activation": "reglu", "normalise": False},
    ],
)
def test_every_token_gets_its_experts(values: dict[str, Any]) -> None:
    made = block(balance=0.0, **values)
    x = tokens()
    out, expected = made(x), by_hand(made, x)
    torch.testing.assert_close(out, expected)
    agree(gradients(made, x, out), gradients(made, x, expected))


@pytest.mark.parametrize("matmul", ["grouped", "loop"])
@pytest.mark.parametrize("sizes", [(0, 5, 0, 3), (8, 0, 0, 0), (0, 0, 0, 1), (2, 2, 2, 2)])
def test_experts_without_tokens_have_gradients_of_zero(matmul: Any, sizes: tuple[int, ...]) -> None:
    experts = Experts(4, DIM, HIDDEN, matmul=matmul)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_()
    rows = torch.randn(sum(sizes), DIM, requires_grad=True)
    out = experts(rows, torch.tensor(sizes))
    out.backward(torch.ones_like(out))
    for parameter in experts.parameters():
        assert parameter.grad is not None
        for grad, size in zip(parameter.grad, sizes, strict=True):
            assert bool(grad.any()) == (size > 0)
    torch.testing.assert_close(out, torch.cat([
        experts.combine(part @ g.t(), part @ u.t()) @ d.t()
        for part, g, u, d in zip(rows.split(sizes), experts.gate, experts.up, experts.down, strict=True)
    ]))  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 1)])
def test_one_token_is_enough(shape: tuple[int, int]) -> None:
    made = block(shared=1, balance=0.0)
    x = tokens(*shape)
    agree({"out": made(x)}, {"out": by_hand(made, x)})
    agree(gradients(made, x, made(x)), gradients(made, x, by_hand(made, x)), 1e-4)


def test_all_tokens_to_one_expert() -> None:
    made = block(top_k=1, balance=0.0, normalise=False)
    x = tokens().detach().abs().requires_grad_()
    with torch.no_grad():
        made.routed.router.weight.copy_(-torch.ones(EXPERTS, DIM)).add_(2 * torch.eye(EXPERTS)[3].unsqueeze(1))
    assert made.routed.router(x.flatten(0, 1)).experts.unique().tolist() == [3]
    agree({"out": made(x)}, {"out": by_hand(made, x)})
    found = gradients(made, x, made(x))
    assert all(gradient is not None for gradient in found.values())
    assert not found["routed.experts.up"][[0, 1, 2, 4, 5, 6, 7]].any()


class Poisoned(Local):
    """Rows beyond the sizes are NaN, on the way to the experts and from them."""

    def dispatch(self, x: Tensor, experts: Tensor, count: int, *, meanwhile: Any = None) -> Any:
        rows, sizes, handle = super().dispatch(x, experts, count, meanwhile=meanwhile)
        return _Poison.apply(rows, int(sizes.sum())), sizes, handle  # type: ignore[no-untyped-call]

    def combine(self, rows: Tensor, weights: Tensor, handle: Any) -> Tensor:
        poisoned = _Poison.apply(rows, int(handle.sizes.sum()))  # type: ignore[no-untyped-call]
        return super().combine(poisoned, weights, handle)


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, end: int) -> Tensor:
        ctx.end = end
        x = x.clone()
        x[end:] = float("nan")
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gradient = grads[0].clone()
        gradient[ctx.end :] = float("nan")
        return gradient, None


@pytest.mark.parametrize("capacity", [0.25, 0.5, 1.0, 4.0])
def test_padding_rows_never_leak(capacity: float) -> None:
    made, poisoned = (block(capacity=capacity, balance=0.0, transport=one) for one in (Local(), Poisoned()))
    x = tokens(4, 16)
    out = poisoned(x)
    torch.testing.assert_close(out, made(x))
    found = gradients(poisoned, x, out)
    assert all(gradient.isfinite().all() for gradient in found.values())
    agree(found, gradients(made, x, made(x)))


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_capacity_is_the_total_of_an_expert(top_k: int) -> None:
    """Over all slots together: applied to each slot, an expert would keep up to top_k times as many."""
    made = block(capacity=0.5, top_k=top_k)
    routing = made.routed.router(tokens(4, 16).flatten(0, 1))
    limit = math.ceil(0.5 * 64 * top_k / EXPERTS)
    stays = kept(routing.experts, routing.weights, limit, EXPERTS)
    for expert in range(EXPERTS):
        mine = routing.experts == expert
        assert int(stays[mine].sum()) == min(limit, int(mine.sum()))
        if not stays[mine].all():
            assert routing.weights[mine & stays].min() >= routing.weights[mine & ~stays].max()


def test_a_dropped_token_gets_nothing_from_that_expert() -> None:
    made = block(capacity=0.25, balance=0.0)
    x = tokens(4, 16)
    routing = made.routed.router(x.flatten(0, 1))
    stays = kept(routing.experts, routing.weights, math.ceil(0.25 * 64 * 2 / EXPERTS), EXPERTS)
    assert not stays.any(1).all(), "no token lost both of its experts: the case is not covered"
    original = made.routed.router.forward

    def without(flat: Tensor, groups: None) -> Any:
        found = original(flat)
        found.weights = found.weights * stays
        return found

    kept_out = made(x)
    made.routed.capacity = 0.0
    made.routed.router.forward = without  # type: ignore[method-assign]
    torch.testing.assert_close(kept_out, made(x))


def test_expert_choice_takes_each_experts_best_tokens() -> None:
    made = block(router="expert_choice", balance=0.0, normalise=False, capacity=1.5)
    x = tokens(2, 16)
    flat, experts = x.flatten(0, 1), made.routed.experts
    scores = made.routed.router.score(flat)[0]
    each = math.ceil(1.5 * 32 * 2 / EXPERTS)
    expected = torch.zeros_like(flat)
    for expert in range(EXPERTS):
        best = scores[:, expert].argsort(descending=True)[:each]
        hidden = experts.combine(flat[best] @ experts.gate[expert].t(), flat[best] @ experts.up[expert].t())
        expected = expected.index_add(0, best, scores[best, expert, None] * (hidden @ experts.down[expert].t()))
    out = made(x)
    torch.testing.assert_close(out, expected.view_as(x))
    agree(gradients(made, x, out), gradients(made, x, expected.view_as(x)))


# -- losses ----------------------------------------------------------------------------------------


def attached(made: MoEFeedForward, x: Tensor) -> dict[str, Tensor]:
    """Gradients of the auxiliary losses alone, under the scale of a step."""
    out = made(x)
    return dict(zip(("x", "weight"), torch.autograd.grad((out * 0).sum(), (x, made.routed.router.weight)), strict=True))


def test_balance_is_switchs_loss_over_top_k() -> None:
    x = tokens(4, 16)
    with loss_scaling(1.0):
        got = attached(block(balance=0.1, balance_over="batch"), x)
    made = block()
    routing = made.routed.router(x.flatten(0, 1))
    share = torch.stack([(routing.experts == e).float().sum() for e in range(EXPERTS)]) / (64 * 2)
    loss = EXPERTS * (share * routing.shares.mean(0)).sum()
    expected = torch.autograd.grad(0.1 * loss * 64, (x, made.routed.router.weight))
    agree(got, dict(zip(("x", "weight"), expected, strict=True)))


def test_balance_over_sequences_does_not_depend_on_the_batch() -> None:
    x = tokens(4, 16)
    values = {"balance": 0.1, "balance_over": "sequence", "z_loss": 0.01}
    together = attached(block(**values), x)
    alone = [attached(block(**values), one.clone().requires_grad_()) for one in x.detach().split(1)]
    agree(together, {"x": torch.cat([one["x"] for one in alone]), "weight": sum(one["weight"] for one in alone)})


def test_balance_is_one_where_the_load_is_even() -> None:
    routing = SimpleNamespace(shares=torch.full((EXPERTS, EXPERTS), 1 / EXPERTS))
    even = torch.full((1, EXPERTS), 2)
    assert float(balance(even, routing, 1)) == pytest.approx(EXPERTS)  # type: ignore[arg-type]  # 1 per token


def test_layers_share_the_weight_of_the_losses() -> None:
    layer = Layer(index=0, num_layers=4, dim=DIM, heads=4, kv_heads=4, head_dim=8, ffn_dim=64)
    plugin = fakes.make(MoE, balance=0.4, z_loss=0.2, dense_first=1, every=3)
    hooks = SimpleNamespace(call=lambda spec, arguments: Local() if spec.name == "token_dispatch" else [])
    job = SimpleNamespace(hooks=hooks, dist=SimpleNamespace(layout=SimpleNamespace(tp=1, etp=1, cp=1)))
    built = [plugin.feed_forward(_at(layer, index), job) for index in range(4)]
    assert [one is not None for one in built] == [False, False, False, True]
    assert built[3].routed.losses.balance == pytest.approx(0.4)
    two = fakes.make(MoE, balance=0.4, dense_first=2).feed_forward(_at(layer, 2), job)
    assert two.routed.losses.balance == pytest.approx(0.2)


@pytest.mark.parametrize("values", [{"dense_first": 2}, {"every": 3}])
def test_no_layer_with_experts_is_a_mistake(values: dict[str, Any]) -> None:
    layer = Layer(index=0, num_layers=2, dim=DIM, heads=4, kv_heads=4, head_dim=8, ffn_dim=64)
    with pytest.raises(ConfigError, match="none of the 2 layers has experts"):
        fakes.make(MoE, **values).feed_forward(layer, SimpleNamespace())


def _at(layer: Layer, index: int) -> Layer:
    return dataclasses.replace(layer, index=index)


# -- what is counted ---------------------------------------------------------------------------------


def test_recompute_counts_once() -> None:
    plain, again = block(bias_speed=0.1), block(bias_speed=0.1)
    x = tokens()
    plain(x).sum().backward()
    checkpoint(again, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(again.routed.statistics, plain.routed.statistics)
    assert float(plain.routed.statistics[:EXPERTS].sum()) == 2 * 24


def told(made: MoEFeedForward, x: Tensor) -> dict[str, Any]:
    """What `forge verify` hears of one micro-batch of two sequences."""
    counter = Counter(made.named_modules(), ["a", "b"], micro_batch=2)
    with heard_by(counter):
        made(x)
    return counter.end()


@pytest.mark.parametrize(
    ("values", "decisions"),
    [
        ({}, ["experts of routed.router"]),
        ({"groups": 4, "top_groups": 2}, ["groups of routed.router", "experts of routed.router"]),
        ({"capacity": 0.5}, ["experts of routed.router", "tokens within the capacity of routed"]),
        ({"router": "expert_choice", "balance": 0.0}, ["tokens of routed"]),
    ],
)
def test_every_choice_is_told_with_its_ties(values: dict[str, Any], decisions: list[str]) -> None:
    made, x = block(**values), tokens()
    found = told(made, x)
    assert list(found) == decisions
    for tally in found.values():
        assert [tally.rows[name][-1] for name in ("a", "b")] == [12, 12]
        assert tally.near[TIE] == 0
    with torch.no_grad():
        made.routed.router.weight.zero_()
    assert all(tally.near[TIE] > 0 for tally in told(made, x).values()), "all scores are equal"


def test_what_is_told_is_what_was_taken() -> None:
    made, x = block(capacity=0.5), tokens()
    routing = made.routed.router(x.flatten(0, 1))
    stays = kept(routing.experts, routing.weights, math.ceil(0.5 * 24 * 2 / EXPERTS), EXPERTS)
    found = told(made, x)
    for row, name in enumerate("ab"):
        chosen, mine = routing.experts.view(2, -1)[row], stays.view(2, -1)[row]
        assert found["experts of routed.router"].rows[name][:-1] == chosen.bincount(minlength=EXPERTS).tolist()
        within = found["tokens within the capacity of routed"].rows[name][:-1]
        assert within == chosen[mine].bincount(minlength=EXPERTS).tolist()
    choosing = block(router="expert_choice", balance=0.0)
    each = math.ceil(24 * 2 / EXPERTS)
    (tally,) = told(choosing, x).values()
    best = choosing.routed.router.score(x.flatten(0, 1))[0].topk(each, dim=0).indices
    assert tally.rows["a"][:-1] == (best < 12).sum(0).tolist()


def test_slices_are_put_in_order() -> None:
    whole = torch.arange(2 * 6 * 3).view(2, 6, 3)
    gathered = torch.cat([part.flatten(0, 1) for part in whole.chunk(2, dim=1)])
    assert torch.equal(Slices(list, lambda: (2,), 1).in_order(gathered, 2), whole.flatten(0, 1))


def test_statistics_are_of_training_only() -> None:
    made = block().eval()
    made(tokens())
    assert not made.routed.statistics.any()


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    router = Router(DIM, EXPERTS, Choice(2, scores="sigmoid", normalise=False), biased=True)
    torch.nn.init.normal_(router.weight)
    x = tokens().flatten(0, 1)
    assert router.bias is not None
    router.bias[5] = 10.0
    after = router(x)
    assert (after.experts == 5).any(1).all()
    torch.testing.assert_close(after.weights, router.score(x)[0].gather(1, after.experts))
    assert not router.bias.requires_grad


def test_shared_experts_are_as_many_as_asked() -> None:
    """N shared experts are N: their parameters grow with it, as do the declared FLOPs."""
    sizes = [sum(p.numel() for p in block(shared=n).parameters()) for n in (0, 1, 2, 3)]
    assert {later - former for former, later in itertools.pairwise(sizes)} == {3 * DIM * HIDDEN}
    flops = [block(shared=n).flops_per_token(1) for n in (0, 1, 3)]
    assert flops[1] - flops[0] == 6 * 3 * DIM * HIDDEN
    assert flops[2] - flops[0] == 3 * (flops[1] - flops[0])


def test_a_run_logs_its_experts_and_moves_its_biases(run_forge: RunForge) -> None:
    run = run_forge(
        ["moe"], {"moe.experts": 4, "moe.bias_speed": 0.01, "moe.metrics": "layers", "log.every": 1}, steps=3
    )
    line = run.metrics[-1]
    layers = len(run.model.parts[0].layers)
    for name in ("load", "entropy", "dropped", "balance", "bias_range"):
        each = [line[f"moe.{name}.{index}"] for index in range(layers)]
        assert line[f"moe.{name}"] == pytest.approx(sum(each) / layers)
    assert line["moe.load"] >= 1
    assert 0 < line["moe.entropy"] <= math.log(4) + 1e-6
    assert line["moe.dropped"] == 0
    biases = [buffer for name, buffer in run.model.state_dict().items() if name.endswith("router.bias")]
    steps = torch.stack(biases) / 0.01
    assert len(biases) == layers
    ranges = [line[f"moe.bias_range.{index}"] for index in range(layers)]
    assert ranges == pytest.approx([float(bias.max() - bias.min()) for bias in biases])
    torch.testing.assert_close(steps, steps.round(), atol=1e-4, rtol=0)
    assert steps.any()


def test_a_skipped_step_moves_no_bias(run_forge: RunForge) -> None:
    class SkipSecond(Plugin):
        """Vetoes the second step, and records the biases before every update."""

        api = (1, 0)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.biases: list[Tensor] = []

        @hookimpl
        def on_start(self, job: Any, model: Any, optimizer: Any) -> None:
            self.model = model

        @hookimpl
        def on_gradients(self, update: Any) -> None:
            state = self.model.state_dict()
            self.biases.append(torch.stack([state[name] for name in state if name.endswith("router.bias")]))
            if update.step == 2:
                update.veto("on purpose")

    run = run_forge(["moe", SkipSecond], {"moe.bias_speed": 0.01}, steps=4)
    first, second, third, fourth = run.plugin("skip_second").biases
    assert not torch.equal(first, second)
    assert torch.equal(second, third), "step 2 was skipped"
    assert not torch.equal(third, fourth)


def test_jitter_is_of_training_only() -> None:
    made, exact, x = block(jitter=0.1), block(), tokens()
    assert not torch.equal(made(x), made(x))
    assert torch.equal(made.eval()(x), exact.eval()(x))
    router = Router(1, EXPERTS, Choice(1, jitter=0.1))
    torch.nn.init.ones_(router.weight)
    noisy = router.score(torch.ones(1000, 1))[2]
    assert 0.9 <= noisy.min() < 0.91
    assert 1.09 < noisy.max() <= 1.1


def test_what_is_not_finite_is_named_by_layer(run_forge: RunForge) -> None:
    class Broken(Plugin):
        """Spoils the router of the second layer."""

        api = (1, 0)

        @hookimpl
        def on_start(self, job: Any, model: Any, optimizer: Any) -> None:
            model.parts[0].layers["1"].feed_forward.routed.router.weight.data.fill_(float("nan"))

    with pytest.raises(DivergedError, match=r"moe: at step 1 the router of layer 1 was the first"):
        run_forge(["moe", Broken], {"decoder.layers": 3, "log.every": 1}, steps=1)


def test_every_parameter_gets_a_gradient(run_forge: RunForge) -> None:
    run = run_forge(["moe"], {"moe.shared": 1, "moe.experts": 16, "moe.top_k": 1, "moe.normalise": False}, steps=1)
    missing = [name for name, state in _states(run).items() if not state]
    assert not missing


def _states(run: Any) -> dict[str, Any]:
    return {name: run.optimizer.state.get(parameter) for name, parameter in run.model.named_parameters()}


# -- against transformers ----------------------------------------------------------------------------


def _mixtral() -> tuple[Any, MoEFeedForward]:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    theirs = MixtralSparseMoeBlock(
        MixtralConfig(hidden_size=DIM, intermediate_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=2)
    )
    return theirs, block(balance=0.0)


def _qwen(normalise: bool) -> tuple[Any, MoEFeedForward]:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    theirs = Qwen3MoeSparseMoeBlock(
        Qwen3MoeConfig(
            hidden_size=DIM,
            moe_intermediate_size=HIDDEN,
            num_experts=EXPERTS,
            num_experts_per_tok=3,
            norm_topk_prob=normalise,
        )
    )
    return theirs, block(balance=0.0, top_k=3, normalise=normalise)


def _deepseek() -> tuple[Any, MoEFeedForward]:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    theirs = DeepseekV3MoE(
        DeepseekV3Config(
            hidden_size=DIM,
            moe_intermediate_size=HIDDEN,
            n_routed_experts=EXPERTS,
            n_shared_experts=2,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
        )
    )
    ours = block(
        balance=0.0, router="sigmoid", top_k=3, groups=4, top_groups=2, scaling=2.5, shared=2, bias_speed=0.001
    )
    bias = ours.routed.router.bias
    assert bias is not None
    bias.normal_(0, 0.1)
    theirs.gate.e_score_correction_bias.data.copy_(bias)
    return theirs, ours


def _pooled(logits: list[Tensor], top_k: int) -> Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    found: Any = load_balancing_loss_func(tuple(logits), EXPERTS, top_k)
    return found  # type: ignore[no-any-return]


def _balanced(x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """Our loss per token, and the logits."""
    routing = router(x)
    return balance(loads(routing.experts.view(1, -1), EXPERTS), routing, 1) / len(x), routing.logits


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_a_layers_balance_times_top_k_is_transformers(top_k: int) -> None:
    x, router = tokens(4, 16).flatten(0, 1), block(top_k=top_k, normalise=False).routed.router
    ours, logits = _balanced(x, router)
    theirs = _pooled([logits], top_k)
    torch.testing.assert_close(theirs, top_k * ours)
    of_ours, of_theirs = (torch.autograd.grad(one, router.weight, retain_graph=True)[0] for one in (ours, theirs))
    torch.testing.assert_close(of_theirs, top_k * of_ours)


def test_transformers_pools_layers_that_are_balanced_one_by_one_here() -> None:
    """Equal where all layers are alike; two layers that are lopsided in opposite ways look even to transformers."""
    x, router = tokens(4, 16).flatten(0, 1), block().routed.router
    ours, logits = _balanced(x, router)
    torch.testing.assert_close(_pooled([logits, logits], 2), 2 * ours)
    busy = torch.zeros(64, EXPERTS).index_fill(1, torch.arange(EXPERTS // 2), 4.0)
    each = [float(_pooled([one], 2)) for one in (busy, busy.flip(1))]
    assert min(each) > 1.5 * float(_pooled([busy, busy.flip(1)], 2)) == pytest.approx(3.0)


@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe", "qwen3_moe, not normalised", "deepseek_v3"])
def test_equals_transformers(model: str) -> None:
    made = {
        "mixtral": _mixtral,
        "qwen3_moe": lambda: _qwen(True),
        "qwen3_moe, not normalised": lambda: _qwen(False),
        "deepseek_v3": _deepseek,
    }
    theirs, ours = made[model]()
    routed = ours.routed
    pairs = {
        "gate.weight": lambda: routed.router.weight,
        "experts.gate_up_proj": lambda: torch.cat([routed.experts.gate, routed.experts.up], dim=1),
        "experts.down_proj": lambda: routed.experts.down,
    }
    if ours.shared is not None:
        shared = ours.shared
        pairs |= {
            "shared_experts.gate_proj.weight": lambda: shared.gate.weight,
            "shared_experts.up_proj.weight": lambda: shared.up.weight,
            "shared_experts.down_proj.weight": lambda: shared.down.weight,
        }
    parameters = dict(theirs.named_parameters())
    assert parameters.keys() == pairs.keys()
    with torch.no_grad():
        for name, value in pairs.items():
            parameters[name].copy_(value())
    x = tokens(3, 20)
    out, expected = ours(x), theirs(x)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    mine, found = gradients(ours, x, out), gradients(theirs, x, expected)
    translated = {
        "x": mine["x"],
        "gate.weight": mine["routed.router.weight"],
        "experts.gate_up_proj": torch.cat([mine["routed.experts.gate"], mine["routed.experts.up"]], dim=1),
        "experts.down_proj": mine["routed.experts.down"],
        **{
            f"shared_experts.{n}_proj.weight": mine[f"shared.{n}.weight"] for n in ("gate", "up", "down") if ours.shared
        },
    }
    agree(translated, found)


# -- mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "run", "key", "message"),
    [
        ({"top_k": 9}, {}, "moe.top_k", "can't choose 9 of 8"),
        ({"top_k": 1}, {}, "moe.normalise", "would always be 1"),
        ({"groups": 3}, {}, "moe.groups", "3 groups do not divide 8"),
        ({"groups": 4, "top_groups": 5}, {}, "moe.top_groups", "5 of 4 groups"),
        ({"groups": 8, "top_groups": 1}, {}, "moe.top_groups", "hold fewer than top_k = 2"),
        ({}, {"ep": 3}, "parallel.ep", "3 ranks do not divide 8 experts"),
        ({}, {"tp": 7}, "train.sequence", "7 does not divide"),
        ({}, {"tp": 4, "cp": 32}, "train.sequence", "each of 128 ranks (cp × tp) routes its share of a sequence"),
        ({"router": "expert_choice", "balance": 0.0}, {"cp": 2}, "moe.router", "a rank has only a slice of them"),
        ({"capacity": 0.001}, {}, "moe.capacity", "nearly all would be dropped"),
        ({"router": "expert_choice"}, {}, "moe.balance", "has no effect under expert_choice"),
        ({"router": "expert_choice", "balance": 0.0, "bias_speed": 0.1}, {}, "moe.bias_speed", "has no effect"),
        ({"router": "expert_choice", "balance": 0.0}, {"tp": 2}, "moe.router", "set parallel.etp = 2"),
        ({"router": "expert_choice", "balance": 0.0, "groups": 2}, {}, "moe.groups", "tokens don't choose experts"),
        ({"alpha": 1.5}, {}, "moe.alpha", "has no effect with moe.activation = 'swiglu'"),
        ({"limit": 6.0}, {}, "moe.limit", "has no effect"),
        ({"bias": True}, {"tp": 2, "etp": 2}, "parallel.etp", "experts with biases"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], run: dict[str, int], key: str, message: str) -> None:
    assert message in mistakes(values, run)[key]


def mistakes(values: dict[str, Any], run: dict[str, int], sequence: int = 64) -> dict[str, str]:
    """Key → what is wrong with it."""
    parallel = SimpleNamespace(**{"ep": 1, "etp": 1, "tp": 1, "cp": 1, **run})
    config = SimpleNamespace(parallel=parallel, train=SimpleNamespace(micro_batch=1, sequence=sequence, init_from=""))
    return {problem.key: problem.message for problem in fakes.make(MoE, **values).check_config(config)}


@pytest.mark.parametrize(
    ("values", "run", "sequence"),
    [
        ({}, {}, 64),
        ({"top_k": 8}, {}, 64),
        ({"top_k": 1, "normalise": False}, {}, 64),
        ({"top_k": 1, "router": "expert_choice", "balance": 0.0}, {}, 64),
        ({"groups": 4, "top_groups": 4}, {}, 64),
        ({"groups": 8, "top_groups": 2}, {}, 64),
        ({}, {"ep": 8}, 64),
        ({}, {"tp": 64}, 64),
        ({}, {"tp": 3, "etp": 3}, 65),
        ({"capacity": 1 / 16}, {}, 64),  # a mean of 64 × 2 / 8 tokens
        ({"router": "expert_choice", "balance": 0.0}, {"tp": 2, "etp": 2}, 64),
        ({"activation": "clamped_swiglu", "alpha": 1.5, "limit": 6.0}, {}, 64),
        ({"bias": True}, {"tp": 2, "ep": 2}, 64),
    ],
)
def test_what_just_fits_is_no_mistake(values: dict[str, Any], run: dict[str, int], sequence: int) -> None:
    assert not mistakes(values, run, sequence)


def test_a_stage_without_experts_has_nothing_to_watch() -> None:
    step: Any = SimpleNamespace(step=1, skipped=False)
    job: Any = SimpleNamespace(config=SimpleNamespace(log=SimpleNamespace(every=1)), steps=2)
    job.dist = SimpleNamespace(gather_stages=lambda value: [value])
    Watch(MoE.Config(), job, fakes.part_model(torch.nn.Linear(2, 2))).step(step)


@pytest.mark.parametrize(("rows", "dim", "hidden"), [(5, 8, 6), (5, 6, 8), (5, 8, 8), (0, 8, 8)])
def test_what_the_grouped_product_does_not_take_is_looped(
    monkeypatch: pytest.MonkeyPatch, rows: int, dim: int, hidden: int
) -> None:
    """6 floats are no 16 bytes: on CUDA torch refuses these strides, of what comes in and of what goes out."""
    for product in (grouped, looped):
        monkeypatch.setattr(experts, product.__name__, lambda *_, name=product.__name__: name)
    x, weight = torch.randn(rows, dim), torch.randn(2, hidden, dim)
    assert automatic(x, weight, torch.tensor([rows, 0])) == ("grouped" if rows and dim == hidden == 8 else "looped")


def test_the_grouped_product_is_the_loop() -> None:
    rows, weight, sizes = torch.randn(20, 16), torch.randn(5, 12, 16), torch.tensor([3, 0, 9, 1, 5])
    one, other = grouped(rows, weight, sizes)[:18], looped(rows, weight, sizes)[:18]
    torch.testing.assert_close(one, other)


def test_there_is_a_number_for_every_measure() -> None:
    assert block().routed.statistics.shape == (EXPERTS + len(MEASURES),)


class Courier(Plugin):
    """A transport of somebody else's: one product with a matrix of ones and zeros there, and one back."""

    api = (1, 0)

    @hookimpl
    def token_dispatch(self, job: Any) -> Any:
        return self

    def dispatch(self, x: Tensor, experts: Tensor, count: int, *, meanwhile: Any = None) -> tuple[Tensor, Tensor, Any]:
        order = experts.flatten().argsort(stable=True)
        carry = torch.zeros(len(order), len(x)).scatter(1, (order // experts.shape[1]).unsqueeze(1), 1.0)
        if meanwhile is not None:
            meanwhile()
        return carry @ x, experts.flatten().bincount(minlength=count), (carry, order)

    def combine(self, rows: Tensor, weights: Tensor, handle: Any) -> Tensor:
        carry, order = handle
        return carry.t() @ (rows * weights.flatten()[order].unsqueeze(1))


def test_another_transport_takes_the_place_of_the_default(run_forge: RunForge) -> None:
    config = {"moe.shared": 1}
    plain, other = run_forge(["moe"], config), run_forge(["moe", Courier], config)
    assert other.losses == pytest.approx(plain.losses, rel=1e-5)
    assert "alltoall" in plain.job.hooks.enabled
    assert "alltoall" not in other.job.hooks.enabled


def test_a_capacity_is_judged_by_the_micro_batch_that_there_will_be() -> None:
    values = ("train.steps=1", "train.global_batch=8", "train.sequence=64", "moe.experts=64", "moe.capacity=0.1")
    assert resolve(Request(plugins=("moe",), set=values))
    with pytest.raises(ConfigError, match=r"0.01 × the mean of 16 tokens of a micro-batch leaves"):
        resolve(Request(plugins=("moe",), set=(*values, "moe.capacity=0.01")))
