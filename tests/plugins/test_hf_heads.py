"""The plugin `hf` under other heads: outputs and gradients are those of the classes, which go in and out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_models
from forge_train import ConfigError
from forge_train.compose.compose import compose
from forge_train_kit.hf import fit
from forge_train_kit.hf.folder import Folder
from forge_train_kit.hf.start import described
from forge_train_kit.weights import fill
from forge_train_plugins.models._hf.config import of
from forge_train_plugins.models._hf.files import exported
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.offline.opening import lone_job

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.unit]
NAMES = ("apple", "pear", "plum")
TEXTS, TOKENS, REWARDS, BASE = "classify", "token_classify", "reward", "embed"
DATA = {TEXTS: "text_labels", TOKENS: "text_labels", REWARDS: "text_pairs", BASE: "text_pairs"}
CASES = [("gpt_neox", TEXTS), ("gpt_neox", TOKENS), ("starcoder2", TOKENS), ("gpt_neox", REWARDS), ("glm", BASE)]


def written(folder: Path, kind: str, head: str) -> Any:
    """A random model of transformers, in a folder."""
    torch.manual_seed(0)
    names = ("good",) if head == REWARDS else NAMES
    labels = (
        {} if head == BASE else {"id2label": dict(enumerate(names)), "label2id": {n: k for k, n in enumerate(names)}}
    )
    config = transformers.AutoConfig.for_model(kind, **{**hf_models.MODELS[kind], "pad_token_id": 0, **labels})
    auto = {TOKENS: transformers.AutoModelForTokenClassification, BASE: transformers.AutoModel}
    model = auto.get(head, transformers.AutoModelForSequenceClassification).from_config(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(("kind", "head"), CASES)
def test_a_class_under_another_head_goes_in_and_out(tmp_path: Path, kind: str, head: str) -> None:
    theirs = written(tmp_path / "theirs", kind, head)
    plugins = ("hf", head, DATA[head])
    opened = Folder.open(tmp_path / "theirs")
    request = Request(plugins=plugins, sections={"hf": {"type": kind, "set": hf_models.MODELS[kind]}})
    layout = described(opened, resolve(request, training=False).hooks)
    assert layout is not None
    job = lone_job(resolve(Request(plugins=plugins, sections=layout.sections), training=False), tmp_path)
    job.hooks.vacate("tokenizer")
    model = compose(job).model
    weights = model.state_dict()
    wanted = {name: (tuple(one.shape), one.dtype) for name, one in weights.items()}
    fill(weights, fit.plan(opened, layout, wanted), opened)
    model.train(False)
    (part,) = model.parts
    ids = torch.randint(1, hf_models.VOCABULARY, (3, 12))
    ours = part.get_submodule("head")(part(ids))
    answer = theirs(ids, use_cache=False)
    expected = answer.last_hidden_state if head == BASE else answer.logits
    ours = ours[:, -1] if head in (TEXTS, REWARDS) else ours
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    ours.square().mean().backward()
    expected.square().mean().backward()
    gradients = {one for one in (p.grad for p in theirs.parameters()) if one is not None}
    norm = sum(float(one.square().sum()) for one in gradients)
    assert sum(float(one.grad.square().sum()) for one in model.parameters()) == pytest.approx(norm, rel=1e-4)  # type: ignore[union-attr]


@pytest.mark.parametrize(("kind", "head"), CASES)
def test_an_imported_class_goes_back(tmp_path: Path, kind: str, head: str) -> None:
    theirs = written(tmp_path / "theirs", kind, head)
    import_checkpoint(tmp_path / "theirs", tmp_path / "here", plugins=("hf", head, DATA[head]))
    export_checkpoint(tmp_path / "here", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["architectures"] == [type(theirs).__name__]
    back = type(theirs).from_pretrained(tmp_path / "back")
    ours = dict(back.named_parameters())
    assert all(one.equal(ours[name]) for name, one in theirs.named_parameters())
    if head in (TEXTS, TOKENS):
        assert back.config.id2label == dict(enumerate(NAMES))


def test_a_new_head_starts_on_the_weights_of_a_language_model(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("glm", **{**hf_models.MODELS["glm"], "pad_token_id": 0})
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.save_pretrained(tmp_path / "folder")
    sections = {
        "hf": {"weights": str(tmp_path / "folder")},
        "classify": {"classes": NAMES},
        "text_labels": {"path": str(tmp_path)},
    }
    request = Request(plugins=("hf", TEXTS, DATA[TEXTS]), sections=sections)
    job = lone_job(resolve(request, training=False), tmp_path)
    job.hooks.vacate("tokenizer")
    ours = dict(compose(job).model.named_parameters())
    assert ours.pop("head.score.weight").shape == (len(NAMES), 32)
    trunk = {name: one for name, one in theirs.named_parameters() if name.startswith("model.")}
    assert ours.keys() == trunk.keys()
    assert all(one.equal(trunk[name]) for name, one in ours.items())


@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        ("cohere", "text_class_logits", "hf: transformers has no class for sequence classification of type 'cohere'"),
        ("codegen", "token_class_logits", "hf: transformers has no class for token classification of type 'codegen'"),
    ],
)
def test_a_class_that_transformers_lacks_is_named(kind: str, given: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        exported(of(kind, hf_models.MODELS[kind]), given)
