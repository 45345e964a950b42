"""Routers and experts by modality: against what is written out, and at the edges."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import scans
import tiny_models
from forge_train import Batch, ConfigError
from forge_train.contract.auxiliary import loss_scaling
from forge_train_kit.modalities import extras_of
from forge_train_plugins.experts._moe.losses import balance, z_loss
from forge_train_plugins.experts._moe.router import Choice, Router, kept, loads
from forge_train_plugins.experts._moe.watch import Watch
from forge_train_plugins.experts.moe import MoE
from forge_train_plugins.fusions._moma import group_of_experts

PLACES = extras_of("scan")[2]
GROUP = (0, 1, 0, 0, 1, 0)
SIZES = ("moe.experts=6", "moma.experts={scan=2}", "moe.hidden=16")


def batch(rows: int = 4) -> Batch:
    """Rows with 3, 0, 2 and 1 scans."""
    ids = torch.randint(20, 60, (rows, 24), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = torch.tensor([43, 40, 42, 41])[:rows]
    return scans.with_scans(Batch(ids, ids.roll(-1, 1)))


def composed(*values: str) -> Any:
    plugins = ("scans:Scans", "moma", "moe")
    return tiny_models.composed(*SIZES, "moe.balance=0.0", *values, plugins=plugins)[1].parts[0]


def written_out(block: Any, x: Tensor, kinds: Tensor) -> Tensor:
    """Each token alone: the softmax of its own group's router, and its two best experts."""
    router, experts, rows = block.routed.router, block.routed.experts, []
    for one, kind in zip(x.flatten(0, 1), kinds.flatten().tolist(), strict=True):
        own = [expert for expert, group in enumerate(GROUP) if group == kind]
        shares = (router.weight[own] @ one).softmax(-1)
        weights, best = shares.topk(2)
        out = torch.zeros_like(one)
        for weight, at in zip(weights / weights.sum(), best.tolist(), strict=True):
            gate, up, down = (getattr(experts, name)[own[at]] for name in ("gate", "up", "down"))
            out = out + weight * (down @ (F.silu(gate @ one) * (up @ one)))
        rows.append(out)
    return torch.stack(rows).view_as(x)


def test_a_token_chooses_among_the_experts_of_its_modality() -> None:
    model, given = composed(), batch()
    block, seen = model.layers["0"].feed_forward, []
    with block.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach())):
        model(given.inputs, **given.model_inputs())
    x, kinds = seen[0].requires_grad_(), (given.extras[PLACES] >= 0).long()
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    named = {"x": x, **dict(block.named_parameters())}
    results = []
    for out in (block(x), written_out(block, x, kinds)):
        results.append((out, torch.autograd.grad((out * weights).sum(), [*named.values()])))
    (out, own), (expected, wanted) = results
    torch.testing.assert_close(out, expected)
    for name, one, other in zip(named, own, wanted, strict=True):
        assert one.any(), name
        torch.testing.assert_close(one, other, msg=name, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_a_modality_without_positions_leaves_its_experts_gradients_of_zero(router: str) -> None:
    model, text = composed("moe.balance=0.1", "moe.z_loss=0.1", f"moe.router={router}"), batch().slice("batch", (1, 2))
    with loss_scaling(torch.tensor(1.0)):
        model(text.inputs, **text.model_inputs()).square().sum().backward()
    for name, parameter in model.layers.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        if "routed" in name:
            used = parameter.grad.flatten(1).any(1)
            assert not used[[1, 4]].any(), name
            assert used.sum() > 1, name


def test_text_is_generated_by_the_experts_of_text() -> None:
    model, ids = composed().eval(), batch().inputs
    with torch.no_grad():
        hidden, cache = model(ids), model.new_cache(len(ids), 24)
        pieces = [model(ids[:, :20], cache=cache), *(model(ids[:, at : at + 1], cache=cache) for at in range(20, 24))]
        torch.testing.assert_close(torch.cat(pieces, 1), hidden)
        for one in (1, 4):
            for layer in model.layers.values():
                layer.feed_forward.routed.experts.down[one].fill_(torch.nan)
        torch.testing.assert_close(model(ids), hidden)


def routed(scores: str = "softmax") -> tuple[Router, Tensor]:
    """A router over two rows of 12 tokens, of which some are of the other kind; none of the first row."""
    router = Router(8, 6, Choice(2, scores=scores), group=GROUP)  # type: ignore[arg-type]
    torch.manual_seed(0)
    torch.nn.init.normal_(router.weight)
    kinds = torch.zeros(2, 12, dtype=torch.int64)
    kinds[1, 3:8] = 1
    return router, kinds


def test_each_group_is_balanced_on_its_own() -> None:
    router, kinds = routed()
    x = torch.randn(24, 8)
    routing = router(x, kinds.flatten())
    expected = torch.zeros(())
    for row in range(2):
        for kind, own in ((0, [0, 2, 3, 5]), (1, [1, 4])):
            at = [12 * row + place for place in range(12) if kinds[row, place] == kind]
            if at:
                shares = (x[at] @ router.weight[own].t()).softmax(-1)
                load = F.one_hot(shares.topk(2).indices, len(own)).sum((0, 1))
                expected = expected + len(own) / (2 * len(at)) * (load * shares.sum(0)).sum()
    counted = loads(routing.experts.view(2, -1), 6)
    torch.testing.assert_close(balance(counted, routing, 1, router), expected)
    logits = [
        (x[at] @ router.weight[[one for one in range(6) if GROUP[one] == kind]].t())
        for at, kind in enumerate(kinds.flatten().tolist())
    ]
    torch.testing.assert_close(z_loss(routing), sum(one.logsumexp(-1).square() for one in logits))


def test_biases_and_loads_are_judged_within_a_group() -> None:
    router, _ = routed()
    router.register_buffer("bias", torch.zeros(6))
    watch = Watch.__new__(Watch)
    watch.config = MoE.Config(experts=6, bias_speed=0.5)
    watch.layers = {0: SimpleNamespace(router=router)}  # type: ignore[dict-item]
    seen = torch.tensor([[30.0, 2, 20, 10, 4, 20, *[0] * 5]])
    watch._move_biases(seen)
    assert router.bias is not None
    assert router.bias.tolist() == [-0.5, 0.5, 0, 0.5, -0.5, 0]
    seen[0, -5] = 1
    assert watch._of_layers(seen)["load"].item() == pytest.approx(1.5)


def test_a_capacity_is_a_multiple_of_the_groups_mean() -> None:
    experts, weights = torch.tensor([[0], [0], [0], [1], [1], [2]]), torch.tensor([[3.0], [1], [2], [1], [2], [1]])
    found = kept(experts, weights, torch.tensor([2, 1, 1]), 3)
    assert found[:, 0].tolist() == [True, False, True, False, True, True]
    model, given = composed("moe.capacity=1.0"), batch()
    layer = model.layers["0"].feed_forward.routed
    model(given.inputs, **given.model_inputs())
    scanned, counted = int((given.extras[PLACES] >= 0).sum()), layer.statistics
    dropped = counted[6 + 3]
    assert counted[[1, 4]].sum() == 2 * scanned, "the load counts what the router chose"
    most = [-(-2 * (96 - scanned) // 4), 0, 0, 0, -(-2 * scanned // 2)]
    left = sum(min(int(counted[one]), most[0] if GROUP[one] == 0 else most[-1]) for one in range(6))
    assert dropped == 2 * 96 - left > 0


def test_every_share_of_the_experts_has_some_of_each_kind() -> None:
    assert group_of_experts(6, ["scan"], {"scan": 2}) == GROUP
    for ranks in (2, 4):
        kinds = group_of_experts(16, ["image", "video"], {"image": 4, "video": 4})
        shares = [kinds[at : at + 16 // ranks] for at in range(0, 16, 16 // ranks)]
        assert {tuple(map(share.count, range(3))) for share in shares} == {(8 // ranks, 4 // ranks, 4 // ranks)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["moe.experts=7"], "7 experts .* can't be divided evenly among text and scan"),
        (["moma.experts={scam=2}"], r"there is no modality 'scam'\. Did you mean 'scan'\?"),
        (["moma.experts={scan=8}"], "text would have 0"),
        (["moma.experts={scan=1}"], "moe.top_k: .* groups of 7, 1 experts, and a token can't choose 2 of 1"),
        (["moe.router=expert_choice", "moe.balance=0.0"], "moe.router: under expert_choice experts choose among all"),
        (["moe.groups=2", "moe.top_groups=1"], "moe.groups: plugin 'moma' divides the experts"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(values: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_models.composed("moe.hidden=16", *values, plugins=("scans:Scans", "moma", "moe"))
