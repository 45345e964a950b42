"""Weights by modality: against `prefix`, and against layers that are written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import scans
import tiny_models
from forge_train import Batch, ConfigError
from forge_train_kit.modalities import extras_of
from forge_train_tools.testing import run_forge

PLACES = extras_of("scan")[2]


def batch(rows: int = 4) -> Batch:
    """Rows with 3, 0, 2 and 1 scans."""
    ids = torch.randint(20, 60, (rows, 24), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = torch.tensor([43, 40, 42, 41])[:rows]
    return scans.with_scans(Batch(ids, ids.roll(-1, 1)))


def composed(fusion: str, *values: str) -> tuple[Any, Any]:
    job, model = tiny_models.composed("decoder.qk_norm=true", *values, plugins=("scans:Scans", fusion))
    return job, model.parts[0].double()


def gradients(model: Any, given: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    hidden = model(given.inputs, **given.model_inputs())
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    named = {name: one for name, one in model.named_parameters() if not name.startswith("head.")}
    return hidden, dict(zip(named, torch.autograd.grad((hidden * weights).sum(), [*named.values()]), strict=True))


def plain(name: str) -> str:
    return name.replace(".others.scan", "")


def equalise(model: Any, other: Any) -> None:
    """Give the weights of every modality the values that another model has for all positions."""
    values = other.state_dict()
    model.load_state_dict({name: values[plain(name)] for name in model.state_dict()})


def test_with_equal_weights_it_is_prefix() -> None:
    model, other = composed("mot")[1], composed("prefix")[1]
    assert other.state_dict().keys() < model.state_dict().keys(), "the weights of text have their names"
    equalise(model, other)
    given = batch()
    (hidden, own), (expected, wanted) = gradients(model, given), gradients(other, given)
    torch.testing.assert_close(hidden, expected, rtol=1e-12, atol=1e-12)
    summed: dict[str, Tensor] = {}
    for name, gradient in own.items():
        summed[plain(name)] = summed.get(plain(name), torch.zeros(())) + gradient
    for name, gradient in wanted.items():
        torch.testing.assert_close(summed[name], gradient, rtol=1e-10, atol=1e-10)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    normed: Tensor = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    return normed


def written_out(model: Any, given: Batch) -> Tensor:
    """Each position alone, with the weights of its kind; then causal attention over all."""
    weights = dict(model.named_parameters())
    x = model.fusion.enter(model.embedding(given.inputs), **given.extras)
    scans_here = given.extras[PLACES] >= 0
    rope = model.layers["0"].attention.rope

    def each(x: Tensor, compute: Any, module: str) -> Tensor:
        rows = []
        for row, kinds in zip(x, scans_here.tolist(), strict=True):
            own = any(name.startswith(f"{module}.others.") for name in weights)
            paths = [module + ".others.scan" * (kind and own) for kind in kinds]
            rows.append(torch.stack([compute(one, path) for one, path in zip(row, paths, strict=True)]))
        return torch.stack(rows)

    def normed(one: Tensor, path: str) -> Tensor:
        return norm(one, weights[f"{path}.weight"])

    def projected(name: str) -> Any:
        def compute(one: Tensor, path: str) -> Tensor:
            heads = (weights[f"{path}.{name}.weight"] @ one).view(-1, 8)
            return heads if name == "v" else norm(heads, weights[f"{path}.{name}_norm.weight"])

        return compute

    def fed(one: Tensor, path: str) -> Tensor:
        gate, up, down = (weights[f"{path}.{name}.weight"] for name in ("gate", "up", "down"))
        return down @ (F.silu(gate @ one) * (up @ one))

    for index in model.layers:
        layer = f"layers.{index}"
        h = each(x, normed, f"{layer}.attention_norm")
        q, k, v = (each(h, projected(name), f"{layer}.attention") for name in ("q", "k", "v"))
        q, k, v = (one.transpose(1, 2) for one in (rope(q), rope(k), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        x = x + each(mixed, lambda one, path: weights[f"{path}.o.weight"] @ one, f"{layer}.attention")
        x = x + each(each(x, normed, f"{layer}.feed_forward_norm"), fed, f"{layer}.feed_forward")
    normed_x: Tensor = model.norm(x)
    return normed_x


@pytest.mark.parametrize("shared", [[], ["norms"], ["norms", "attention"], ["feed_forward"]], ids=str)
def test_a_position_meets_the_weights_of_its_kind(shared: list[str]) -> None:
    model, given = composed("mot", f"mot.shared={json.dumps(shared)}")[1], batch()
    parts = {"norms": ("attention_norm", "feed_forward_norm")}
    kept = {name for part in shared for name in parts.get(part, (part,))}
    whole = {"attention_norm", "attention", "feed_forward_norm", "feed_forward"}
    assert {name for name, child in model.layers["0"].named_children() if hasattr(child, "others")} == whole - kept
    torch.testing.assert_close(gradients(model, given)[0], written_out(model, given), rtol=1e-9, atol=1e-9)
    own = gradients(model, given)[1]
    model.forward = lambda *_, **__: written_out(model, given)
    wanted = gradients(model, given)[1]
    assert any("others" in name for name in own)
    for name, gradient in own.items():
        assert gradient.any(), name
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("extras", [True, False])
def test_a_modality_without_positions_has_gradients_of_zero(extras: bool) -> None:
    model, text = composed("mot")[1], batch().slice("batch", (1, 2))
    model(text.inputs, **(text.model_inputs() if extras else {})).square().sum().backward()
    for name, parameter in model.layers.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any() == ("others" not in name), name


def test_a_row_of_scans_alone_leaves_text_gradients_of_zero() -> None:
    model, given = composed("mot")[1], batch(1)
    places = given.extras[PLACES][0]
    start = int((places >= 0).nonzero()[0])
    stop = start + int((places[start:] >= 0).int().cumprod(0).sum())
    one = given.slice("sequence", (start, stop))
    model(one.inputs, **one.model_inputs()).square().sum().backward()
    for name, parameter in model.layers.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any() == ("others" in name), name


def test_a_step_says_where_items_are_while_a_layer_is_recomputed() -> None:
    job, model = composed("mot")
    given, text = batch(), batch().slice("batch", (1, 2))
    hidden, wanted = gradients(model, given)
    job.step.batch = given
    layer, kept = model.layers["0"], []
    with layer.register_forward_hook(lambda module, args, out: kept.append((args, out))), torch.no_grad():
        model(given.inputs, **given.model_inputs())
    model.fusion.layers["0"](hidden)  # another forward, of text
    with torch.no_grad():
        ((args, out),) = kept
        torch.testing.assert_close(layer(*args), out)
    job.step.batch = None
    model(text.inputs)
    torch.testing.assert_close(gradients(model, given)[1], wanted)


def test_text_is_generated_as_by_a_model_of_text() -> None:
    model, other = composed("mot")[1], tiny_models.composed("decoder.qk_norm=true")[1].parts[0].double()
    values = model.state_dict()
    other.load_state_dict({name: values[name] for name in other.state_dict()})
    ids = batch().inputs
    with torch.no_grad():
        torch.testing.assert_close(model(ids), other(ids))
        cache = model.new_cache(len(ids), 24)
        pieces = [model(ids[:, :20], cache=cache), *(model(ids[:, at : at + 1], cache=cache) for at in range(20, 24))]
        torch.testing.assert_close(torch.cat(pieces, 1), other(ids))


def test_items_in_a_prompt_are_read_with_a_cache() -> None:
    model, given = composed("mot")[1], batch()
    with torch.no_grad():
        hidden = model(given.inputs, **given.model_inputs())
        cut = next(at for at in range(23, 0, -1) if (given.extras[PLACES][:, at - 1] >= 0).any())
        prompt, cache = given.slice("sequence", (0, cut)), model.new_cache(4, 24)
        pieces = [model(prompt.inputs, cache=cache, **prompt.model_inputs())]
        pieces += [model(given.inputs[:, at : at + 1], cache=cache) for at in range(cut, 24)]
    torch.testing.assert_close(torch.cat(pieces, 1), hidden)


def test_a_checkpoint_of_a_model_of_text_fills_the_weights_of_text(tmp_path: Path) -> None:
    still = {"adamw.lr": 1e-30, "adamw.weight_decay": 0.0}
    text = run_forge((), steps=1, folder=tmp_path)
    start = {"train.init_from": str(text.run), "train.init_missing": ["*.others.*", "fusion.*"]}
    found = run_forge(("scans:Scans", "mot"), {**start, **still}, steps=1).model.state_dict()
    assert any("others" in name for name in found)
    for name, value in text.model.state_dict().items():
        assert torch.equal(found[name], value), name


def test_a_token_costs_what_it_costs_without_modalities() -> None:
    model, other = composed("mot")[1], composed("prefix")[1]
    assert model.flops_per_token(24) == other.flops_per_token(24)
    more = sum(one.numel() for one in model.parameters()) - sum(one.numel() for one in other.parameters())
    assert more == sum(one.numel() for one in other.layers.parameters())


@pytest.mark.parametrize(
    ("plugin", "values", "why"),
    [
        ("moe", (), "the feed_forward of layer 0 (MoEFeedForward) has experts"),
        ("mla", ("decoder.kv_heads=4",), "the attention of layer 0 .* has no separate projections"),
    ],
)
def test_a_layer_that_can_not_have_several_sets_of_weights_is_refused(
    plugin: str, values: tuple[str, ...], why: str
) -> None:
    with pytest.raises(ConfigError, match=why.replace("(", r"\(").replace(")", r"\)")):
        tiny_models.composed(*values, plugins=("scans:Scans", "mot", plugin))
