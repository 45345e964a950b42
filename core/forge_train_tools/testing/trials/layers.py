"""Trials of what a model's layers are made of: attention, its kernel, feed-forward blocks, and the expert transport."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forge_train.base.format import format_list
from forge_train.compose.initialise import materialise
from forge_train_kit.heads import HeadSpec, Trunk
from forge_train_kit.modalities import FusionSpec, extras_of
from forge_train_kit.model import Embedding, Linear, RMSNorm, Slots, TensorStyle, filled, flops_per_token

from ..bench import TOKENS, Bench, Trials, close
from ..conformance import DoubtError, SkippedError, require

BATCH, SEQUENCE = 2, 12


def _module(bench: Bench, chain: str) -> nn.Module:
    """The module that the plugin builds for the first layer it claims, with its initial weights."""
    layer = bench.layer
    for index in range(layer.num_layers):
        with torch.device("meta"):
            module = bench.answer(chain, layer=replace(layer, index=index))
        if module is not None:
            require(isinstance(module, nn.Module), f"expected an nn.Module, found {type(module).__name__}")
            materialise(module, torch.device("cpu"), seed=0)
            return module  # type: ignore[no-any-return]
    raise SkippedError(f"it claims none of the {layer.num_layers} layers of the tiny model")


def _input(bench: Bench) -> Tensor:
    return torch.randn(BATCH, SEQUENCE, bench.layer.dim)


def attention_trains(bench: Bench) -> str:
    return _trains(_module(bench, "attention"), _input(bench))


def feed_forward_trains(bench: Bench) -> str:
    return _trains(_module(bench, "feed_forward"), _input(bench))


def _trains(module: nn.Module, x: Tensor) -> str:
    """Shape and gradients, with the initial weights."""
    x.requires_grad_()
    out = module(x)
    require(out.shape == x.shape, f"gives {list(out.shape)} for {list(x.shape)}")
    require(bool(torch.isfinite(out).all()), "gives values that are not finite")
    out.square().sum().backward()
    require(x.grad is not None and bool(torch.isfinite(x.grad).all()), "its input gets no finite gradient")
    idle = [name for name, parameter in module.named_parameters() if parameter.grad is None]
    if idle:
        raise DoubtError(f"{format_list(idle)} gets no gradient")
    return f"{sum(parameter.numel() for parameter in module.parameters())} parameters"


def attention_looks_only_back(bench: Bench) -> None:
    _looks_only_back(_module(bench, "attention"), _input(bench))


def feed_forward_looks_only_back(bench: Bench) -> str:
    """Outside of training, or it declares why not."""
    module = _module(bench, "feed_forward").eval()
    if reason := next((reason for one in module.modules() if (reason := getattr(one, "looks_ahead", ""))), ""):
        return f"declared: {reason}"
    _looks_only_back(module, _input(bench))
    return ""


def _looks_only_back(module: nn.Module, x: Tensor) -> None:
    changed = x.clone()
    changed[:, SEQUENCE // 2 :] += 1
    with torch.no_grad():
        before, after = module(x)[:, : SEQUENCE // 2], module(changed)[:, : SEQUENCE // 2]
    close(after, before, "what comes before a changed token", 1e-5)


def attention_keeps_documents_apart(bench: Bench) -> None:
    module, x = _module(bench, "attention"), _input(bench)
    middle = SEQUENCE // 2
    document_ids = (torch.arange(SEQUENCE) >= middle).long().expand(BATCH, -1)
    position_ids = (torch.arange(SEQUENCE) % middle).expand(BATCH, -1)
    changed = x.clone()
    changed[:, :middle] += 1
    with torch.no_grad():
        before, after = (module(one, position_ids=position_ids, document_ids=document_ids) for one in (x, changed))
    close(after[:, middle:], before[:, middle:], "a document after another one was changed", 1e-5)


def attention_continues_from_its_cache(bench: Bench) -> None:
    module: Any = _module(bench, "attention")
    x = _input(bench)
    if not callable(getattr(module, "new_cache", None)):
        raise DoubtError("it has no new_cache: a model with it can't generate")
    cache = module.new_cache(BATCH, SEQUENCE)
    cuts = [(0, SEQUENCE - 3), (SEQUENCE - 3, SEQUENCE - 2), (SEQUENCE - 2, SEQUENCE)]
    with torch.no_grad():
        whole = module(x)
        pieces = [
            module(x[:, start:end], position_ids=torch.arange(start, end).expand(BATCH, -1), cache=cache)
            for start, end in cuts
        ]
    close(torch.cat(pieces, dim=1), whole, "attention in pieces, through the cache", 1e-5)


def attention_continues_rows_side_by_side(bench: Bench) -> str:
    """Two rows of different lengths that begin one after the other and continue together."""
    module: Any = _module(bench, "attention")
    if not callable(getattr(module, "new_slots", None)):
        return "it has no new_slots: rows are generated one after the other"
    module.eval()
    x, begun = _input(bench), (SEQUENCE - 2, 3)
    slots = Slots(BATCH, SEQUENCE, x.device, joint=False)
    cache = module.new_slots(slots)
    with torch.no_grad():
        whole = module(x)
        for row, length in enumerate(begun):
            slots.begin(row, length)
            module(x[row : row + 1, :length], position_ids=torch.arange(length)[None], cache=cache)
        for step in range(2):
            slots.advance(BATCH)
            at = torch.tensor(filled([length + step for length in begun], 0))
            rows = torch.tensor(filled(range(BATCH), 0))
            found = module(x[rows, at][:, None], position_ids=at[:, None], cache=cache)[:BATCH, 0]
            close(found, whole[rows, at][:BATCH], "rows that continue side by side", 1e-5)
    return ""


def attention_shows_its_kernel(bench: Bench) -> None:
    module = _module(bench, "attention")
    if not any(callable(getattr(module, name, None)) for name in ("kernel", "recurrence")):
        raise DoubtError("it exposes no `.kernel` and no `.recurrence`, which context parallelism replaces")


def head_trains(bench: Bench) -> str:
    with torch.device("meta"):
        module = bench.answer("head", spec=HeadSpec(bench.layer.dim, vocabulary=61))
    require(isinstance(module, nn.Module), f"expected an nn.Module, found {type(module).__name__}")
    materialise(module, torch.device("cpu"), seed=0)
    hidden = _input(bench).requires_grad_()
    outputs = module(hidden)
    given, shape = bench.job.hooks.gives("head"), list(outputs.shape)
    require(given != TOKENS or shape == [BATCH, SEQUENCE, 61], f"{given}: expected [batch, sequence, vocabulary]")
    require(len(outputs) == BATCH, f"gives {len(outputs)} rows for {BATCH} sequences")
    require(bool(torch.isfinite(outputs).all()), "gives values that are not finite")
    outputs.square().sum().backward()
    require(hidden.grad is not None and bool(hidden.grad.any()), "hidden states get no gradient")
    return f"{given} {shape}"


def tail_follows_a_model(bench: Bench) -> str:
    layer = bench.layer
    with torch.device("meta"):
        table = Embedding(61, layer.dim)

        def again() -> nn.Module:
            other = Embedding(61, layer.dim)
            other.weight = table.weight
            return other

        trunk = Trunk(layer.dim, 2, partial(RMSNorm, layer.dim), again, lambda index, count: _Plain(layer.dim))
        module = bench.answer("tail", trunk=trunk)
    require(isinstance(module, nn.Module), f"expected an nn.Module, found {type(module).__name__}")
    for unit in module.units:
        require(unit in dict(module.named_modules()), f"units names {unit!r}, and there is no such module")
    for name in module.tensor_plan():
        require(name in dict(module.named_modules()), f"tensor_plan() names {name!r}, and there is no such module")
    materialise(module, torch.device("cpu"), seed=0)
    hidden = _input(bench)
    out = module(hidden, None, None)
    require(out.shape[1:] == hidden.shape[1:] and len(out) % BATCH == 0, f"gives {list(out.shape)}")
    close(out[:BATCH], hidden, "the first rows, which are what it was given", 1e-6)
    return f"units {', '.join(module.units) or 'none'}"


class _Plain(nn.Module):
    """A layer for a tail."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mixer = Linear(dim, dim)

    def forward(self, x: Tensor, position_ids: Any = None, document_ids: Any = None, cache: Any = None) -> Tensor:
        mixed: Tensor = self.mixer(x)
        return x + mixed

    def new_cache(self, batch: int, length: int) -> None:
        return None

    def tensor_plan(self) -> dict[str, TensorStyle]:
        return {"mixer": "sequence"}

    def flops_per_token(self, sequence: int) -> int:
        return flops_per_token(sequence, weights=self.mixer.weight.numel())


def fusion_joins_items(bench: Bench) -> str:
    """A row with an item of three patches, and one without."""
    dim, given = bench.layer.dim, bench.job.hooks.gives("fusion")
    with torch.device("meta"):
        spec = FusionSpec(dim, 2, {"item": _Patches(dim)}, bench.layer)
        module = bench.answer("fusion", spec=spec)
    for declared in (*getattr(module, "units", ()), *module.tensor_plan()):
        require(declared in dict(module.named_modules()), f"it declares {declared!r}, and there is no such module")
    materialise(module, torch.device("cpu"), seed=0)
    places = torch.full((BATCH, SEQUENCE), -1)
    places[0, 2 : 3 if given == "token" else 5] = torch.arange(1 if given == "token" else 3)
    grids = torch.zeros(BATCH, 1, 3, dtype=torch.int64)
    grids[0, 0] = torch.tensor([1, 1, 3])
    hidden, values = _input(bench), torch.randn(BATCH, 3, 5)

    def joined(values: Tensor) -> Tensor:
        extras = dict(zip(extras_of("item"), (values, grids, places), strict=True))
        out: Tensor = hidden if module.enter is None else module.enter(hidden, **extras)
        more = module.features(**extras) if hasattr(module, "features") and len(module.layers) else {}
        for layer in module.layers.values():
            out = layer(out, **extras, **more)
        return out

    found, other = joined(values), joined(values + 1)
    require(found.shape == hidden.shape, f"gives {list(found.shape)} for hidden states of {list(hidden.shape)}")
    require(bool(torch.isfinite(found).all()), "gives values that are not finite")
    require(found[1:].equal(other[1:]), "a row without items depends on the items of another")
    return f"gives {given}; {len(module.layers)} layers of its own"


class _Patches(nn.Module):
    """An encoder that projects each patch."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.project = Linear(5, dim)

    def forward(self, values: Tensor, grids: Tensor) -> Tensor:
        features: Tensor = self.project(values)
        return features


def dispatch_goes_round(bench: Bench) -> str:
    transport = bench.answer("token_dispatch")
    tokens, dim, count, top_k = 10, 8, 4, 2
    x = torch.randn(tokens, dim, requires_grad=True)
    experts = torch.stack([torch.randperm(count)[:top_k] for _ in range(tokens)])
    experts[0] = torch.tensor([0, 1])
    weights = torch.rand(tokens, top_k, requires_grad=True)
    sorted_rows, sizes, handle = transport.dispatch(x, experts, count)
    require(len(sizes) == count, f"in one process all {count} experts are local, found {len(sizes)} sizes")
    require(int(sizes.sum()) == len(sorted_rows), f"{len(sorted_rows)} rows for sizes {sizes.tolist()}")
    expected_sizes = torch.bincount(experts.flatten(), minlength=count)
    require(sizes.tolist() == expected_sizes.tolist(), f"sizes {sizes.tolist()}, expected {expected_sizes.tolist()}")
    factors = torch.arange(1.0, count + 1)
    out = transport.combine(sorted_rows * factors.repeat_interleave(sizes)[:, None], weights, handle)
    expected = (weights * factors[experts]).sum(1, keepdim=True) * x
    close(out, expected, "each token through its experts and back", 1e-5)
    got, wanted = (torch.autograd.grad(one.square().sum(), (x, weights)) for one in (out, expected))
    close(got[0], wanted[0], "gradient of the tokens", 1e-4)
    close(got[1], wanted[1], "gradient of the weights", 1e-4)
    return f"{tokens} tokens, {count} experts, top {top_k}"


TRIALS: Trials = {
    "attention": [
        ("shape and gradients", attention_trains),
        ("looks only back", attention_looks_only_back),
        ("keeps documents apart", attention_keeps_documents_apart),
        ("continues from its cache", attention_continues_from_its_cache),
        ("continues rows side by side", attention_continues_rows_side_by_side),
        ("shows its kernel", attention_shows_its_kernel),
    ],
    "feed_forward": [
        ("shape and gradients", feed_forward_trains),
        ("looks only back", feed_forward_looks_only_back),
    ],
    "head": [("shape and gradients", head_trains)],
    "tail": [("follows a model", tail_follows_a_model)],
    "fusion": [("joins items with text", fusion_joins_items)],
    "token_dispatch": [("tokens go to their experts and back", dispatch_goes_round)],
}
