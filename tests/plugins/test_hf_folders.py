"""The plugin `hf` in whole runs: trained, resumed, exported, imported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_models
from forge_train import ConfigError
from forge_train.checkpoint import checkpoint
from forge_train.compose.compose import compose
from forge_train_plugins.models._hf.files import imported
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.generation.completion import Completion
from forge_train_tools.generation.sampling import Sampling
from forge_train_tools.offline.evaluate import evaluate
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.hf_request import starting_from
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.offline.opening import Wanted, lone_job, open_model
from forge_train_tools.testing.runs import RunForge

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.unit]


SHAPES: dict[str, dict[str, Any]] = {
    **{kind: {**hf_models.MODELS[kind], "vocab_size": 257} for kind in ("falcon", "stablelm")},
    "gemma2": {**hf_models.GROUPED, "vocab_size": 257, "head_dim": 8, "attn_logit_softcapping": 3.0},
}
"""Models of bytes whose class can't keep documents apart under the default kernel."""


def small(kind: str) -> dict[str, Any]:
    """A model of bytes."""
    return {key: one for key, one in hf_models.MODELS[kind].items() if key != "vocab_size"}


def values(kind: str, **more: Any) -> dict[str, Any]:
    found = {"hf": {"type": kind, "set": small(kind)}, "checkpoint.every": 2, "train.evaluate_every": 2}
    return {**found, **more}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt_neox", "bloom"])
def test_a_run_is_resumed_evaluated_and_exported(run_forge: RunForge, tmp_path: Path, kind: str) -> None:
    settings = values(kind, **{"text.isolate": kind not in hf_models.JOINED})
    whole = run_forge(["hf"], settings, steps=4, folder=tmp_path / "whole")
    run_forge(["hf"], settings, steps=4, name="cut", stop_at=2, folder=tmp_path / "cut")
    rest = run_forge(["hf"], settings, steps=4, name="cut", folder=tmp_path / "cut")
    assert rest.numbers[-2:] == whole.numbers[-2:]
    assert sum(event["event"] == "evaluation" for event in whole.events) == 2
    export_checkpoint(whole.run, tmp_path / "folder")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    ids = torch.arange(24).view(2, 12)
    (part,) = whole.model.parts
    head: Any = part.get_submodule("head")
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, head(part.eval()(ids)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["bloom", "cohere2", "gpt_neox"])
def test_a_folder_is_imported_and_comes_back(tmp_path: Path, kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind, **hf_models.MODELS[kind])
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.save_pretrained(tmp_path / "theirs")
    apart = kind not in hf_models.JOINED  # the documents of a row; else the folder alone can't be imported
    settings = () if apart else ("text.isolate=false",)
    import_checkpoint(tmp_path / "theirs", tmp_path / "here", plugins=("hf",), settings=settings)
    assert ("isolate = false" in (tmp_path / "here" / "config.toml").read_text()) is not apart
    state = checkpoint.read_state(tmp_path / "here")
    assert "hf" in {one["name"] for one in state["enabled"]}
    export_checkpoint(tmp_path / "here", tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == kind
    ours = dict(back.named_parameters())
    assert all(one.equal(ours[name]) for name, one in theirs.named_parameters())


@pytest.mark.parametrize("kind", ["falcon", "stablelm", "gemma2"])
def test_text_is_generated_by_a_class_that_can_not_keep_documents_apart(tmp_path: Path, kind: str) -> None:
    theirs = saved(tmp_path, kind, **SHAPES[kind])
    opened = open_model(tmp_path, plugins=("hf",))
    done = Completion(opened.job, opened.model, "abc", Sampling(tokens=4, temperature=0))
    assert len([*done]) > 0
    assert done.tokens == 4
    (part,) = opened.model.parts
    head: Any = part.get_submodule("head")
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(head(part(ids)), theirs(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["falcon", "stablelm", "gemma2"])
def test_rows_of_documents_need_an_option_or_a_kernel(tmp_path: Path, kind: str) -> None:
    saved(tmp_path / "theirs", kind, **SHAPES[kind])
    (tmp_path / "text.txt").write_text("one two three\n" * 200)
    sets = (f"text.path={tmp_path / 'text.txt'}", f"text.cache={tmp_path / 'cache'}", "run.device=cpu")
    sets += ("train.sequence=16", "train.global_batch=2", "train.evaluate_batches=1")
    with pytest.raises(ConfigError, match=r"add -s text\.isolate=false\.$") as refused:
        evaluate(tmp_path / "theirs", wanted=Wanted(("hf",), sets))
    with pytest.raises(ConfigError, match=r"add -s text\.isolate=false\.$"):
        import_checkpoint(tmp_path / "theirs", tmp_path / "here", plugins=("hf",))
    assert ("auto, eager" in str(refused.value)) == (kind == "gemma2"), "no kernel helps the others"
    joined = evaluate(tmp_path / "theirs", wanted=Wanted(("hf",), (*sets, "text.isolate=false")))
    assert joined.tokens > 0
    if kind == "gemma2":
        assert evaluate(tmp_path / "theirs", wanted=Wanted(("hf", "eager"), sets)).tokens > 0


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ({"tokens": {"path": "."}}, "add -s tokens.packing=split -s tokens.isolate=false."),
        ({"sft": {"path": "."}}, "Plugin 'sft' asks for it."),
    ],
)
def test_the_options_are_those_of_the_data(tmp_path: Path, data: dict[str, Any], options: str) -> None:
    ((name, section),) = data.items()
    section = {"packing": "best_fit", **section}
    laid = {
        "hf": {"type": "falcon", "set": small("falcon")},
        name: section,
        "run": {"device": "cpu"},
        "train": {"steps": 1},
    }
    setup = resolve(Request(plugins=("hf", name), sections=laid), data=False)
    with pytest.raises(ConfigError, match=re.escape(options) + "$"):
        compose(lone_job(setup, tmp_path, "cpu"), allocate=False)


def test_a_null_that_toml_can_not_say_is_refused() -> None:
    config = transformers.AutoConfig.for_model("cohere2", **hf_models.MODELS["cohere2"]).to_dict()
    with pytest.raises(ConfigError, match="sliding_window is null in config.json"):
        imported({**config, "sliding_window": None})
    found = imported({**config, "pad_token_id": None, "eos_token_id": 7})
    assert found is not None
    assert "pad_token_id" not in found.sections["hf"]["set"]
    assert found.sections["hf"]["set"]["eos_token_id"] == 7


def test_code_that_comes_with_weights_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}))
    with pytest.raises(ConfigError, match="trust_remote_code"):
        hf_models.composed(tmp_path, "", section={"config": str(tmp_path)})


def test_a_key_that_the_class_does_not_list_is_kept(tmp_path: Path) -> None:
    """GLM-4-MoE's attention reads a `head_dim` that its configuration does not have."""
    keys = {key: one for key, one in hf_models.GROUPED.items() if key != "vocab_size"}
    keys |= {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "head_dim": 16}
    theirs = saved(tmp_path / "theirs", "glm4_moe", **keys, pad_token_id=None, n_group=1, topk_group=1)
    assert theirs.model.layers[0].self_attn.q_proj.out_features == 64
    import_checkpoint(tmp_path / "theirs", tmp_path / "here", plugins=("hf",))
    assert_same_logits(tmp_path / "here", theirs)
    export_checkpoint(tmp_path / "here", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["head_dim"] == 16


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"set": {"hidden_sise": 32}}, r"hf\.set\.hidden_sise.*Did you mean 'hidden_size'"),
        ({"set": {"quite_new": 1}}, r"hf\.set\.quite_new.* set it in hf\.extra"),
        ({"extra": {"hidden_size": 32}}, r"hf\.extra\.hidden_size: .* lists it; set it in hf\.set"),
    ],
)
def test_keys_are_listed_or_extra(tmp_path: Path, section: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        hf_models.composed(
            tmp_path, "", section={"type": "cohere", **section, "set": {"vocab_size": 61, **section.get("set", {})}}
        )


def test_a_vocabulary_of_the_class_s_default_size_is_kept() -> None:
    """It may be larger than the tokenizer's."""
    config = transformers.AutoConfig.for_model("gpt_neox", hidden_size=32, num_attention_heads=4).to_dict()
    found = imported(config)
    assert found is not None
    assert found.sections["hf"]["set"]["vocab_size"] == config["vocab_size"] == 50432


def test_a_null_for_padding_is_exported(tmp_path: Path) -> None:
    """The class's default lies beyond a small vocabulary."""
    keys = {key: one for key, one in hf_models.MODELS["glm"].items() if key != "vocab_size"}
    theirs = saved(tmp_path / "theirs", "glm", **keys, pad_token_id=None)
    import_checkpoint(tmp_path / "theirs", tmp_path / "here", plugins=("hf",))
    export_checkpoint(tmp_path / "here", tmp_path / "back")
    described = json.loads((tmp_path / "back" / "config.json").read_text())
    assert described["pad_token_id"] is None
    again = imported(described)
    assert again is not None
    assert "pad_token_id" not in again.sections["hf"]["set"]
    assert_same_logits(tmp_path / "here", theirs)


def described_by(folder: Path, **more: Any) -> dict[str, Any]:
    """The sections of a resolved run that starts from a folder's weights."""
    request = Request(plugins=("hf", "synthetic"), sections={"hf": {"weights": str(folder)}, **more})
    return dict(resolve(request, training=False).config.sections)


def test_a_folder_of_weights_brings_its_tokenizer(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2", **OWN)
    assert described_by(tmp_path)["tokenizer"].path == "bytes"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert described_by(tmp_path)["tokenizer"].path == str(tmp_path)
    assert described_by(tmp_path, tokenizer={"path": "bytes"})["tokenizer"].path == "bytes"
    request = Request(plugins=hf_models.PLUGINS, without=("tokenizer",), sections={"hf": {"weights": str(tmp_path)}})
    assert "tokenizer" not in resolve(request, training=False).config.sections


@pytest.mark.parametrize("key", ["config", "weights"])
def test_a_config_json_that_has_changed_since_the_run_began_is_refused(
    run_forge: RunForge, tmp_path: Path, key: str
) -> None:
    saved(tmp_path / "theirs", "gpt2", **{**OWN, "n_positions": 64}, pad_token_id=None)
    file = tmp_path / "theirs" / "config.json"
    settings = {f"hf.{key}": str(tmp_path / "theirs"), "checkpoint.every": 1}
    settings |= {"synthetic.vocabulary": hf_models.VOCABULARY}
    plain: Any = {"without": ("tokenizer",), "name": "a", "folder": tmp_path / "runs"}
    run = run_forge(["hf", "synthetic"], settings, steps=1, **plain)
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(dict(sorted(stored.items(), reverse=True)), indent=4))
    open_model(run.run, text=False)
    file.write_text(json.dumps({**stored, "layer_norm_epsilon": 0.5}))
    with pytest.raises(ConfigError, match=r"config\.json has other values than when the run began"):
        open_model(run.run, text=False)
    with pytest.raises(ConfigError, match="hf.fingerprint"):
        run_forge(["hf", "synthetic"], settings, steps=2, **plain)


OWN = {"n_embd": 32, "n_layer": 2, "n_head": 4, **hf_models.DRY}


def saved(path: Path, kind: str, **keys: Any) -> Any:
    """A random model of transformers in a folder."""
    torch.manual_seed(0)  # another one may end its text at once
    config = transformers.AutoConfig.for_model(kind, **{"vocab_size": hf_models.VOCABULARY, **keys})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(path)
    return model


def assert_same_logits(checkpoint_path: Path, theirs: Any) -> None:
    (part,) = open_model(checkpoint_path, text=False).model.parts
    head: Any = part.get_submodule("head")
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(head(part(ids)), theirs(ids).logits, rtol=1e-5, atol=1e-5)


def test_a_tensor_that_a_pattern_of_leftovers_matches_is_imported_all_the_same(tmp_path: Path) -> None:
    theirs = saved(tmp_path / "theirs", "gpt2", **OWN)  # which ignores "attn.bias", and has "attn.c_attn.bias"
    import_checkpoint(tmp_path / "theirs", tmp_path / "here", plugins=("hf",))
    assert_same_logits(tmp_path / "here", theirs)


@pytest.mark.parametrize("original", [8, 32])
def test_tables_of_long_sequences_are_not_kept_from_the_run_on_meta(tmp_path: Path, original: int) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "long_factor": [3.0] * 4, "short_factor": [1.0] * 4}
    keys = {key: one for key, one in hf_models.GROUPED.items() if key != "vocab_size"}
    theirs = saved(
        tmp_path / "theirs",
        "phi3",
        **keys,
        pad_token_id=0,
        original_max_position_embeddings=original,
        rope_parameters=rope,
    )
    import_checkpoint(tmp_path / "theirs", tmp_path / "here", plugins=("hf",))
    assert_same_logits(tmp_path / "here", theirs)


def test_a_table_that_replaces_what_a_folder_says_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "theirs", "gpt2", **OWN, layer_norm_epsilon=0.01)
    request = Request(
        model_from=str(tmp_path / "theirs"),
        plugins=("hf", "synthetic"),
        without=("text", "tokenizer"),
        set=("hf.set={n_embd=32, n_layer=2, n_head=4, vocab_size=61, resid_pdrop=0.0, attn_pdrop=0.0}",),
    )
    setup = resolve(starting_from(request))
    with pytest.raises(ConfigError, match=r"hf\.set drops embd_pdrop, layer_norm_epsilon"):
        compose(lone_job(setup, tmp_path, "cpu"), allocate=False)
