"""Layers that attend to items: against a model that is written out, and at the edges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import scans
import tiny_models
from forge_train import Batch, ConfigError
from forge_train_kit.modalities import extras_of
from forge_train_plugins.fusions._cross_attention.ranges import item_ranges, with_ranges

VALUES, GRIDS, PLACES = extras_of("scan")
OPEN = "cross_attention.gate=0.7"


def batch(*, documents: bool = False) -> Batch:
    """Rows with 3, 0, 2 and 1 scans."""
    ids = torch.randint(20, 60, (4, 24), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = torch.tensor([43, 40, 42, 41])
    made = scans.with_scans(Batch(ids, ids.roll(-1, 1)), one_token=True)
    assert (made.extras[PLACES].amax(1) + 1).tolist() == [3, 0, 2, 1]
    cuts = torch.tensor([4, 9, 3, 12])[:, None]
    return replace(made, document_ids=(torch.arange(24) >= cuts).long()) if documents else made


def composed(*values: str) -> Any:
    return tiny_models.composed("cross_attention.layers=[1]", *values, plugins=("scans:Scans", "cross_attention"))[1]


def prepared(given: Batch, attend: str = "all") -> Batch:
    return with_ranges(given, ["scan"], attend)


def written_out(layer: Any, hidden: Tensor, seen: list[list[Tensor]]) -> Tensor:
    """The layer, token by token; `seen` has for each token the vectors that it attends to."""
    rows = []
    for x_TD, of_row in zip(hidden, seen, strict=True):
        tokens = []
        for x, vectors in zip(x_TD, of_row, strict=True):
            tokens.append(_token(layer, x, vectors) if len(vectors) else x)
        rows.append(torch.stack(tokens))
    return torch.stack(rows)


def _token(layer: Any, x: Tensor, vectors: Tensor) -> Tensor:
    attention, size = layer.attention, layer.attention.head_dim

    def normed(y: Tensor, norm: Any) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight

    q = (attention.q.weight @ normed(x, layer.attention_norm)).view(-1, size)
    k, v = ((vectors @ one.weight.T).view(len(vectors), -1, size) for one in (attention.k, attention.v))
    q, k = normed(q, attention.q_norm), normed(k, attention.k_norm)
    heads = []
    for number, head in enumerate(q):
        of = number // (len(q) // k.shape[1])
        heads.append(((k[:, of] @ head) * size**-0.5).softmax(0) @ v[:, of])
    x = x + layer.attention_gate.weight.tanh() * (attention.o.weight @ torch.cat(heads))
    h, block = normed(x, layer.feed_forward_norm), layer.feed_forward
    out = block.down.weight @ (F.silu(block.gate.weight @ h) * (block.up.weight @ h))
    return x + layer.feed_forward_gate.weight.tanh() * out


def vectors_seen(model: Any, given: Batch, attend: str) -> list[list[Tensor]]:
    """For each token the vectors of the items at or before it in its document, each item encoded alone."""
    encoder, found = model.fusion.items.encoders["scan"], []
    for row in range(len(given.inputs)):
        sizes = given.extras[GRIDS][row].prod(-1).tolist()
        items, start = [], 0
        for size in sizes:
            alone = given.extras[VALUES][row : row + 1, start : start + size]
            items.append(encoder(alone, torch.tensor([[[1, 1, size]]]))[0] if size else None)
            start += size
        tokens = []
        for at in range(given.inputs.shape[1]):
            documents = given.document_ids
            mine = [
                items[int(given.extras[PLACES][row, before])]
                for before in range(at + 1)
                if given.extras[PLACES][row, before] >= 0
                and (documents is None or documents[row, before] == documents[row, at])
            ]
            mine = mine[-1:] if attend == "last" else mine
            tokens.append(torch.cat(mine) if mine else torch.empty(0, 32))
        found.append(tokens)
    return found


@pytest.mark.parametrize("attend", ["all", "last"])
@pytest.mark.parametrize("documents", [False, True])
def test_a_layer_is_what_it_is_written_out_with_its_gradients(attend: str, documents: bool) -> None:
    made = composed(OPEN, f'cross_attention.attend="{attend}"')
    model: Any = made.parts[0].double()
    given = batch(documents=documents)
    given = replace(given, extras={**given.extras, VALUES: given.extras[VALUES].double()})
    seen: dict[str, Tensor] = {}
    layer = model.fusion.layers["1"]
    layer.register_forward_hook(lambda _, args, out: seen.update(x=args[0], out=out))
    model(given.inputs, **prepared(given, attend).model_inputs())
    vectors = vectors_seen(model, given, attend)
    expected = written_out(layer, seen["x"], vectors)
    torch.testing.assert_close(seen["out"], expected, rtol=1e-9, atol=1e-9)
    names = [name for name, _ in model.fusion.named_parameters()]
    parameters = [*model.fusion.parameters(), model.embedding.weight]
    weights = torch.randn_like(expected)
    ours = torch.autograd.grad((seen["out"] * weights).sum(), parameters, retain_graph=True)
    theirs = torch.autograd.grad((expected * weights).sum(), parameters)
    for name, one, other in zip([*names, "embedding"], ours, theirs, strict=True):
        assert one.abs().max() > 1e-6, name
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def test_a_run_is_the_last_items_whose_placeholders_follow_each_other() -> None:
    places = torch.tensor([[-1, 0, 1, -1, 2, 3, 4, -1, 5, -1, 6]])
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2]])
    whole, apart = (item_ranges(places, ids, "run")[0].T.tolist() for ids in (None, documents))
    assert whole == [[0, 0, 0, 0, 2, 2, 2, 2, 5, 5, 6], [0, 1, 2, 2, 3, 4, 5, 5, 6, 6, 7]]
    assert apart == [[0, 0, 0, 0, 2, 3, 3, 3, 5, 6, 6], [0, 1, 2, 2, 3, 4, 5, 5, 6, 6, 7]]


def test_a_model_starts_as_that_of_text_alone() -> None:
    made = composed()
    model: Any = made.parts[0]
    given = prepared(batch())
    with torch.no_grad():
        hidden, text = model(given.inputs, **given.model_inputs()), model(given.inputs)
        assert torch.equal(hidden, text)
        for name, parameter in model.fusion.named_parameters():
            if "gate.weight" in name and parameter.shape == (1,):
                parameter.fill_(1.0)
        assert not torch.equal(model(given.inputs, **given.model_inputs()), text)


def test_tokens_without_an_item_pass_unchanged_and_padding_changes_nothing() -> None:
    made = composed(OPEN)
    model: Any = made.parts[0]
    given = prepared(batch())
    seen: dict[str, Tensor] = {}
    model.fusion.layers["1"].register_forward_hook(lambda _, args, out: seen.update(x=args[0], out=out))
    with torch.no_grad():
        hidden = model(given.inputs, **given.model_inputs())
        none = given.extras[PLACES].cummax(1).values < 0
        assert none[1].all()
        assert none[0].any()
        assert torch.equal(seen["x"][none], seen["out"][none])
        assert not (seen["x"] == seen["out"]).all(-1)[~none].any()
        poisoned = {**given.model_inputs(), VALUES: F.pad(given.extras[VALUES], (0, 0, 0, 7))}
        for row, grids in enumerate(given.extras[GRIDS]):
            poisoned[VALUES][row, int(grids.prod(-1).sum()) :] = 1e4
        encoder = model.fusion.items.encoders["scan"]
        hook = encoder.register_forward_hook(with_nan_behind)
        torch.testing.assert_close(model(given.inputs, **poisoned), hidden)
        hook.remove()
        for row in range(4):
            alone = given.slice("batch", (row, row + 1))
            torch.testing.assert_close(model(alone.inputs, **alone.model_inputs()), hidden[row : row + 1])


def with_nan_behind(_: Any, args: Any, vectors: Tensor) -> Tensor:
    """An encoder's vectors, with NaN where there is no item."""
    counts = args[1].prod(-1).sum(-1)
    return vectors.masked_fill((torch.arange(vectors.shape[1]) >= counts[:, None])[..., None], torch.nan)


def test_rows_without_items_give_no_gradient_and_no_nan() -> None:
    made = composed(OPEN)
    text = prepared(batch()).slice("batch", (1, 2))
    made.parts[0](text.inputs, **text.model_inputs()).square().sum().backward()
    for name, parameter in made.parts[0].fusion.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_generates_with_its_cache_what_it_gives_at_once() -> None:
    made = composed(OPEN)
    model: Any = made.parts[0].eval()
    given = batch()
    with torch.no_grad():
        whole = model(given.inputs, **prepared(given).model_inputs())
        cache, first = model.new_cache(4, 24), 15
        assert int(given.extras[PLACES][:, first:].max()) == -1
        extras = {**given.extras, PLACES: given.extras[PLACES][:, :first]}
        pieces = [model(given.inputs[:, :first], cache=cache, **extras)]
        pieces += [model(given.inputs[:, at : at + 1], cache=cache) for at in range(first, 24)]
        torch.testing.assert_close(torch.cat(pieces, 1), whole)
        with pytest.raises(TypeError, match="items come with the first tokens of a text"):
            model(given.inputs[:, :1], cache=cache, **extras)


def test_layers_stand_where_they_are_asked_for() -> None:
    def at(*values: str) -> list[str]:
        values = ("decoder.layers=6", *values)
        made = tiny_models.composed(*values, plugins=("scans:Scans", "cross_attention"))[1]
        return list(made.parts[0].fusion.layers)

    assert at() == ["3"]
    assert at("cross_attention.every=2") == ["1", "3", "5"]
    assert at("cross_attention.layers=[4, 0]") == ["0", "4"]
    with pytest.raises(ConfigError, match=r"cross_attention.every = 7: the model has 6 layers"):
        at("cross_attention.every=7")
    with pytest.raises(ConfigError, match=r"cross_attention.layers: the model has layers 0 to 5, found 6"):
        at("cross_attention.layers=[6]")
    with pytest.raises(ConfigError, match=r"cross_attention.every: has no effect beside cross_attention.layers"):
        at("cross_attention.layers=[1]", "cross_attention.every=2")


def test_counts_its_operations() -> None:
    fusion = composed().parts[0].fusion
    layer = fusion.layers["1"]
    used = [*(layer.attention.q, layer.attention.o), *layer.feed_forward.children()]
    assert fusion.flops_per_token(32) == 6 * sum(one.weight.numel() for one in used)
