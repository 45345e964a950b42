"""The plugin `hf`: classes of transformers, built on meta, give what they give when run by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hf_models
from crossed import marked
from forge_train import ConfigError, Model
from forge_train_kit.model import Dropout
from forge_train_kit.model.chunks import chosen
from forge_train_tools.generation.memory import OneByOne, SideBySide, memory_for
from generation_rows import generated, recomputed, requests, worst

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.unit]

Gradients = dict[str, Tensor | None]


def tokens(rows: int = 2, columns: int = 12, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(hf_models.VOCABULARY, (rows, columns), generator=generator)


def run(model: Model, inputs: Tensor, labels: Tensor, **more: Tensor) -> tuple[Tensor, Gradients]:
    """Logits and gradients of forge's part."""
    (part,) = model.parts
    head: Any = part.get_submodule("head")
    logits = head(part(inputs, **more))
    F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum").backward()
    return logits.detach(), {name.removeprefix("head."): one.grad for name, one in model.named_parameters()}


def assert_equal(ours: tuple[Tensor, Gradients], theirs: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
    given = {name: gradient for name, gradient in ours[1].items() if gradient is not None}
    assert given.keys() == theirs[1].keys()
    for name, gradient in given.items():
        error = (gradient - theirs[1][name]).norm() / theirs[1][name].norm().clamp_min(1e-3)
        assert error <= 1e-5, f"{name}: {error:.1e}"


KINDS = list(hf_models.MODELS)


@pytest.mark.parametrize("kind", marked(KINDS, KINDS[::2]))
def test_gradients_are_those_of_the_class_run_by_hand(tmp_path: Path, kind: str) -> None:
    _, model = hf_models.composed(tmp_path, kind)
    inputs, labels = tokens(), tokens(seed=1)
    assert chosen(64, model.parts[0].get_submodule("head")) >= 64, "few logits are computed once"
    assert_equal(run(model, inputs, labels), hf_models.gradients(hf_models.by_hand(model), inputs, labels))


@pytest.mark.parametrize(("kind", "experts"), [("olmoe", 4), ("olmoe", 16), ("qwen2_moe", 16), ("glm4_moe", 16)])
def test_experts_that_rows_are_brought_to_compute_what_the_class_does(tmp_path: Path, kind: str, experts: int) -> None:
    changes = {**hf_models.MODELS[kind], "num_local_experts" if kind == "glm4_moe" else "num_experts": experts}
    _, model = hf_models.composed(tmp_path, kind, plugins=("ep",), changes=changes)
    assert any(hasattr(module, "transport") for module in model.parts[0].modules())
    inputs, labels = tokens(), tokens(seed=1)
    assert_equal(run(model, inputs, labels), hf_models.gradients(hf_models.by_hand(model), inputs, labels))


def test_attention_that_a_plan_does_not_split_is_computed_on_every_rank(tmp_path: Path) -> None:
    for kind, feed_forward in (("olmoe", "tokens"), ("deepseek_v3", "gather")):
        _, model = hf_models.composed(tmp_path, kind)
        declare: Any = model.parts[0].tensor_plan
        plan = declare()
        first = {path.removeprefix("model.layers.0."): style for path, style in plan.items() if ".layers.0." in path}
        assert first["self_attn"] == "summed"
        assert first["mlp"] == feed_forward
        assert not any(path.startswith("self_attn.") for path in first)


def test_a_feed_forward_block_that_a_plan_leaves_out_is_named(tmp_path: Path) -> None:
    changes = {**hf_models.GROUPED, "num_local_experts": 4, "shared_intermediate_size": 16}
    _, model = hf_models.composed(tmp_path, "granitemoeshared", changes=changes)
    declare: Any = model.parts[0].tensor_plan
    with pytest.raises(TypeError, match=r"base_model_tp_plan of GraniteMoeSharedModel .* leaves .*shared_mlp.* out"):
        declare()


WINDOW = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


def test_a_window_that_a_class_says_by_its_mask_alone_holds(tmp_path: Path) -> None:
    """A kernel, which is given no mask, would see all that is before."""
    _, model = hf_models.composed(tmp_path, "qwen2_moe", changes={**hf_models.MODELS["qwen2_moe"], **WINDOW})
    (part,) = model.parts
    assert not any(hasattr(module, "kernel") for module in part.modules())
    inputs, labels = tokens(), tokens(seed=1)
    assert_equal(run(model, inputs, labels), hf_models.gradients(hf_models.by_hand(model), inputs, labels))


def test_noise_in_the_choice_of_experts_is_refused(tmp_path: Path) -> None:
    changes = {**hf_models.GROUPED, "num_local_experts": 4, "router_jitter_noise": 0.01}
    with pytest.raises(ConfigError, match=r"switch them off: hf\.set\.router_jitter_noise = 0\.0"):
        hf_models.composed(tmp_path, "phimoe", changes=changes)


@pytest.mark.parametrize("kind", marked(KINDS, KINDS[1::2]))
def test_parameters_start_as_the_class_starts_them(tmp_path: Path, kind: str) -> None:
    _, model = hf_models.composed(tmp_path, kind)
    theirs = hf_models.by_hand(model)
    torch.manual_seed(5)
    fresh = dict(type(theirs)(theirs.config).named_parameters())  # type: ignore[call-arg,arg-type]
    for name, one in model.named_parameters():
        ours, other = one.detach(), fresh[name.removeprefix("head.")].detach()
        spread = other.std(unbiased=False)
        assert (ours.mean() - other.mean()).abs() <= 8 * spread / other.numel() ** 0.5 + 1e-6, name
        if other.numel() >= 16:  # GPT-OSS has one sink for each of four heads
            assert 0.5 * spread <= ours.std(unbiased=False) <= 2 * spread + 1e-6, name
    buffers = dict(theirs.named_buffers())
    for name, one in model.parts[0].named_buffers():
        assert one.equal(buffers[name.removeprefix("head.")]), name


def test_the_first_weights_follow_from_the_seed_alone(tmp_path: Path) -> None:
    first, same, other = (
        hf_models.composed(tmp_path, "gpt_neox", run={"seed": seed})[1].state_dict() for seed in (3, 3, 4)
    )
    assert all(one.equal(same[name]) for name, one in first.items())
    name = "gpt_neox.layers.0.mlp.dense_h_to_4h.weight"
    assert not first[name].equal(other[name])
    assert not first[name].equal(first[name.replace("layers.0", "layers.1")])


@pytest.mark.parametrize("kind", ["gpt_neox", "exaone4", "opt"])
def test_documents_of_a_row_do_not_see_each_other(tmp_path: Path, kind: str) -> None:
    _, model = hf_models.composed(tmp_path, kind, synthetic={"isolate": True})
    (part,) = model.parts
    row, cut = tokens(1), 5
    spans = torch.cat([torch.arange(cut), torch.arange(row.shape[1] - cut)])[None]
    documents = (torch.arange(row.shape[1]) >= cut).long()[None]
    packed = part(row, position_ids=spans, document_ids=documents)
    alone = torch.cat([part(row[:, :cut]), part(row[:, cut:])], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["falcon", "mamba", "nemotron"])
def test_a_class_that_can_not_keep_documents_apart_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match=r"can't keep the documents of a row apart.*Plugin 'synthetic' asks for it"):
        hf_models.composed(tmp_path, kind, synthetic={"isolate": True})
    _, model = hf_models.composed(tmp_path, kind)
    with pytest.raises(ConfigError, match="can't keep the documents of a row apart"):
        model.parts[0](tokens(), document_ids=torch.zeros(2, 12, dtype=torch.long))


@pytest.mark.parametrize(("kernel", "used"), [("eager", True), ("sdpa", False)])
def test_a_kernel_that_lacks_what_is_asked_leaves_attention_to_the_class(
    tmp_path: Path, kernel: str, used: bool
) -> None:
    shape = {**hf_models.GROUPED, "head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 3.0}
    _, model = hf_models.composed(tmp_path, "gemma2", plugins=(kernel,), changes=shape)
    (part,) = model.parts
    assert any(hasattr(one, "kernel") for one in part.modules()) == used
    inputs, labels = tokens(), tokens(seed=1)
    assert_equal(run(model, inputs, labels), hf_models.gradients(hf_models.by_hand(model), inputs, labels))


@pytest.mark.parametrize("kind", ["gpt_neox", "cohere2", "falcon"])
def test_tokens_one_by_one_give_what_a_row_gives(tmp_path: Path, kind: str) -> None:
    _, model = hf_models.composed(tmp_path, kind)
    part: Any = model.parts[0].eval()
    row = tokens(1, 10)
    with torch.no_grad():
        whole, cache = part(row), part.new_cache(1, 10)
        steps = [part(row[:, :3], cache=cache), *(part(row[:, at : at + 1], cache=cache) for at in range(3, 10))]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-5)


ALONE = hf_models.JOINED
"""Types whose rows are computed one by one."""
TOGETHER = ("bloom", "cohere2", "opt")


@pytest.mark.parametrize("kind", marked(KINDS, [kind for kind in KINDS if kind not in TOGETHER]))
def test_rows_side_by_side_give_what_each_gives_alone(tmp_path: Path, kind: str) -> None:
    job, model = hf_models.composed(tmp_path, kind)
    assert isinstance(memory_for(job, model, 2, 20), OneByOne if kind in ALONE else SideBySide)
    rows = [requests(5, vocabulary=hf_models.VOCABULARY) for _ in range(3)]
    wanted = [recomputed(job, model, row) for row in rows[0]]
    assert worst(generated(job, model, rows[1], 3), wanted) <= 1e-6
    assert worst(generated(job, model, rows[2], 1), wanted) <= 1e-6


def test_weights_of_a_folder_are_the_first_ones(tmp_path: Path) -> None:
    _, model = hf_models.composed(tmp_path, "cohere")
    theirs: Any = hf_models.by_hand(model)
    theirs.save_pretrained(tmp_path / "folder")
    _, loaded = hf_models.composed(tmp_path, "", folder=tmp_path / "folder", run={"seed": 9})
    ours = model.state_dict()
    assert all(one.equal(ours[name]) for name, one in loaded.state_dict().items())


def test_each_name_of_a_shared_weight_is_in_the_folder(tmp_path: Path) -> None:
    """A part of a pipeline has the head without the embedding."""
    from forge_train_plugins.models._hf.weights import Stored

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**shape, vocab_size=32, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    stored = Stored(str(tmp_path), model, "model")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert stored.parameter(name, 0).equal(model.lm_head.weight)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    _, model = hf_models.composed(tmp_path, "cohere")
    theirs: Any = hf_models.by_hand(model)
    theirs.save_pretrained(tmp_path / "folder")
    with pytest.raises(ConfigError) as caught:
        hf_models.composed(
            tmp_path, "", folder=tmp_path / "folder", changes={"num_hidden_layers": 3, "attention_bias": True}
        )
    text = str(caught.value)
    assert "model.layers.0.self_attn.q_proj.bias: missing" in text
    with pytest.raises(ConfigError, match=r"\[48, 32\] in the file, \[50, 32\] here"):
        hf_models.composed(tmp_path, "", folder=tmp_path / "folder", changes={"intermediate_size": 50})
    with pytest.raises(ConfigError, match="model.layers.1.*: no parameter takes it"):
        hf_models.composed(tmp_path, "", folder=tmp_path / "folder", changes={"num_hidden_layers": 1})


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("falcn", {}, "knows no model of type 'falcn'. Did you mean 'falcon'"),
        ("vit", {}, "no causal language model of type 'vit'"),
        ("bert", {"vocab_size": 61}, "'bert' looks at later tokens"),
        ("falcon", {"vocab_size": 61, "hiden_size": 32}, "hf.set.hiden_size.*Did you mean 'hidden_size'"),
        ("falcon", {}, "hf.set.vocab_size: no enabled plugin provides a tokenizer"),
        ("opt", {**hf_models.MODELS["opt"], "dropout": 0.1}, r"switch them off: hf\.set\.dropout = 0\.0\."),
        ("phi", {**hf_models.SHAPE, "resid_pdrop": 0.1}, r"switch them off: hf\.set\.resid_pdrop = 0\.0\."),
        (
            "gpt_neox",
            {**hf_models.SHAPE, "attention_dropout": 0.3, "hidden_dropout": 0.1},
            r"off: hf\.set\.attention_dropout",
        ),
        ("apertus", hf_models.GROUPED, "only in its constructor"),
        ("cohere", {**hf_models.GROUPED, "num_attention_heads": "four"}, "transformers rejects this configuration"),
    ],
)
def test_what_can_not_be_built_is_told(tmp_path: Path, kind: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        hf_models.composed(tmp_path, kind, changes=changes)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "hf.config: is required"),
        ({"type": "falcon", "config": "there"}, "hf.type: hf.config already determines the type"),
        ({"config": "there"}, r"hf\.config: there is no .*there, which describes the model"),
    ],
)
def test_where_the_configuration_comes_from(tmp_path: Path, values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        hf_models.composed(tmp_path, "", section=values)


def test_the_library_is_named_where_it_is_missing() -> None:
    from forge_train_plugins.models.hf import HF

    assert HF.needs == {"transformers": "pip install 'forge-train[hf]'"}


def test_modules_of_dropout_are_replaced_by_forges(tmp_path: Path) -> None:
    changes = {**hf_models.MODELS["gpt_neox"], "hidden_dropout": 0.3}
    _, model = hf_models.composed(tmp_path, "gpt_neox", changes=changes)
    found = {name: module.rate for name, module in model.named_modules() if isinstance(module, Dropout)}
    layers = [f"gpt_neox.layers.{at}.post_{what}_dropout" for at in (0, 1) for what in ("attention", "mlp")]
    assert found == dict.fromkeys(["gpt_neox.emb_dropout", *layers], 0.3)


def test_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM is given token ids alone, and nothing would read image"):
        hf_models.composed(tmp_path, "llama", plugins=("image",), changes=hf_models.GROUPED)
