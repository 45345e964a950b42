"""The decoder: what it computes, what it declares, and what it refuses."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fakes
from forge_train import ConfigError
from forge_train_plugins.models.decoder import Decoder, Rope

pytestmark = pytest.mark.unit

TOKENS = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(3))
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": True, "head_dim": 16},
    "tied": {"tied": True},
    "biases and LayerNorm": {"bias": True, "qkv_bias": True, "o_bias": True, "norm": "layer", "activation": "gelu"},
    "yarn": {"rope": Rope(scaling="yarn", factor=4.0, original_sequence=16)},
}


@pytest.fixture(params=list(VARIANTS.values()), ids=list(VARIANTS))
def model(request: pytest.FixtureRequest) -> Any:
    return fakes.decoder(**request.param)


def test_reads_like_the_paper(model: Any) -> None:
    x = model.embedding(TOKENS)
    for layer in model.layers.values():
        x = x + layer.attention(layer.attention_norm(x))
        x = x + layer.feed_forward(layer.feed_forward_norm(x))
    torch.testing.assert_close(model(TOKENS), model.norm(x))


def test_a_token_sees_no_later_one(model: Any) -> None:
    changed = TOKENS.clone()
    changed[:, 7:] += 1
    torch.testing.assert_close(model(changed % 61)[:, :7], model(TOKENS)[:, :7])


def test_generating_with_a_cache_gives_the_full_forward(model: Any) -> None:
    cache = model.new_cache(2, 12)
    with torch.no_grad():
        steps = [model(TOKENS[:, a:b], cache=cache) for a, b in ((0, 5), (5, 8), *((t, t + 1) for t in range(8, 12)))]
    torch.testing.assert_close(torch.cat(steps, 1), model(TOKENS), rtol=1e-4, atol=1e-5)


def test_documents_in_a_row_are_documents_on_their_own(model: Any) -> None:
    document_ids = torch.tensor([[0] * 5 + [1] * 7]).expand(2, -1)
    position_ids = torch.tensor([[*range(5), *range(7)]]).expand(2, -1)
    packed = model(TOKENS, position_ids=position_ids, document_ids=document_ids)
    alone = torch.cat((model(TOKENS[:, :5]), model(TOKENS[:, 5:])), 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_an_unknown_input_is_an_error(model: Any) -> None:
    with pytest.raises(TypeError, match="images"):
        model(TOKENS, images=torch.zeros(2))


# -- what it declares ---------------------------------------------------------------------------------------------


def test_every_parameter_declares_its_start_and_every_buffer_is_reset(model: Any) -> None:
    for name, _ in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).initial(leaf)
    for module in model.modules():
        assert not list(module.buffers(recurse=False)) or hasattr(module, "reset_buffers")


def test_residual_projections_start_smaller() -> None:
    model = fakes.decoder()
    for layer in model.layers.values():
        assert layer.attention.o.initial("weight").std == pytest.approx(0.02 / 4**0.5)
        assert layer.feed_forward.down.initial("weight").std == pytest.approx(0.02 / 4**0.5)
    assert fakes.decoder(depth_scaled=False).layers["0"].attention.o.initial("weight").std == 0.02


def test_units_stages_roles_and_plan_name_what_exists(model: Any) -> None:
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    assert model.units == ("layers.0", "layers.1")
    assert model.stages == (("embedding",), ("layers.0",), ("layers.1",), ("norm", "head"))
    assert model.roles.keys() <= parameters.keys()
    assert set(model.roles.values()) == ({"embedding"} if model.tied else {"embedding", "head"})
    assert model.tensor_plan().keys() <= modules.keys()
    owners = {name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)}
    assert owners <= model.tensor_plan().keys(), "every module with parameters has its place in the plan"


def test_the_head_of_a_tied_model_is_its_embedding() -> None:
    model = fakes.decoder(tied=True)
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_operations_are_those_of_every_matrix_and_of_causal_attention() -> None:
    model = fakes.decoder()
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and name != "embedding.weight")
    assert model.flops_per_token(64) == 6 * matrices + 2 * 6 * 64 * 32


def test_a_module_that_declares_nothing_counts_each_matrix_once() -> None:
    model = fakes.decoder()
    before = model.flops_per_token(64)
    model.layers["0"].feed_forward = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))
    assert before - model.flops_per_token(64) == 6 * 32 * 48


def test_parts_of_a_cut_model_do_what_the_whole_does(model: Any) -> None:
    first, last = copy.deepcopy(model), copy.deepcopy(model)
    first.norm = first.head = None
    del first.layers["1"]
    last.embedding = None
    del last.layers["0"]
    torch.testing.assert_close(last(first(TOKENS)), model(TOKENS))
    assert {name for part in (first, last) for name, _ in part.named_parameters()} <= {
        name for name, _ in model.named_parameters(remove_duplicate=False)
    }
    assert [part.stages for part in (first, last)] == [model.stages[:2], model.stages[2:]]
    assert first.flops_per_token(8) + last.flops_per_token(8) == model.flops_per_token(8)
    assert (first.tensor_plan() | last.tensor_plan()).keys() == model.tensor_plan().keys()


def test_the_meta_device_suffices_to_build_it() -> None:
    with torch.device("meta"):
        model = fakes.make(Decoder, **fakes.TINY).build_model(fakes.job())
    assert {p.device.type for p in model.parameters()} == {"meta"}


# -- what it refuses ----------------------------------------------------------------------------------------------


def problems(sequence: int = 16, **values: Any) -> list[str]:
    plugin = fakes.make(Decoder, **(fakes.TINY | values))
    return [problem.key for problem in plugin.check_config(fakes.run_config(sequence))]


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({}, None),
        ({"heads": 3, "kv_heads": 1}, "decoder.heads"),
        ({"kv_heads": 3}, "decoder.kv_heads"),
        ({"head_dim": 7}, "decoder.head_dim"),
        ({"dim": 36, "kv_heads": 0}, "decoder.head_dim"),
        ({"sequence": 65}, "train.sequence"),
        ({"rope": Rope(factor=2.0)}, "decoder.rope.factor"),
        ({"rope": Rope(scaling="linear", factor=2.0, truncate=False)}, "decoder.rope.truncate"),
        ({"rope": Rope(scaling="yarn", factor=2.0)}, "decoder.rope.original_sequence"),
        ({"rope": Rope(scaling="llama3", factor=2.0, original_sequence=8, low=4.0)}, "decoder.rope.low"),
        ({"rope": Rope(scaling="yarn", factor=2.0, original_sequence=8, low=4.0)}, None),
        ({"rope": Rope(sections=(1, 2, 1))}, None),
        ({"rope": Rope(sections=(1, 2, 2))}, "decoder.rope.sections"),
        ({"rope": Rope(sections=(2, 2))}, "decoder.rope.sections"),
        (
            {"rope": Rope(scaling="dynamic", factor=2.0, original_sequence=16, sections=(1, 2, 1))},
            "decoder.rope.sections",
        ),
    ],
)
def test_values_that_do_not_fit_each_other(values: dict[str, Any], key: str | None) -> None:
    assert problems(**values) == ([key] if key else [])


def vocabulary(wanted: int, tokenizer: int | None) -> int:
    job = fakes.job(tokenizer=None if tokenizer is None else SimpleNamespace(vocabulary=tokenizer, end=None))
    values = fakes.TINY | {"vocabulary": wanted}
    return int(fakes.make(Decoder, **values).build_model(job).embedding.weight.shape[0])


@pytest.mark.parametrize(("wanted", "tokenizer", "size"), [(0, 70, 70), (80, 70, 80), (61, None, 61)])
def test_vocabulary_is_the_tokenizers_or_larger(wanted: int, tokenizer: int | None, size: int) -> None:
    assert vocabulary(wanted, tokenizer) == size


@pytest.mark.parametrize(
    ("wanted", "tokenizer", "message"), [(60, 70, "at least the tokenizer's 70, found 60"), (0, None, "set it")]
)
def test_a_vocabulary_that_cannot_be(wanted: int, tokenizer: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=f"decoder.vocabulary.*{message}"):
        vocabulary(wanted, tokenizer)


def test_hidden_is_two_thirds_of_four_widths_in_whole_tiles() -> None:
    model = fakes.decoder(hidden=0, dim=96)
    assert model.layers["0"].feed_forward.up.out_features == 256


def test_a_cache_longer_than_the_model() -> None:
    with pytest.raises(ValueError, match="at most 64 tokens, but 65 were requested"):
        fakes.decoder().new_cache(1, 65)


@pytest.mark.parametrize("ask", [lambda m: m.new_cache(1, 8), lambda m: m.tensor_plan()], ids=["cache", "plan"])
def test_an_attention_that_cannot_says_so(ask: Any) -> None:
    model = fakes.decoder()
    model.layers["1"].attention = nn.Identity()
    with pytest.raises(TypeError, match="Identity"):
        ask(model)
