"""Families under other heads: from transformers' classes and back, logits and every gradient of its own loss."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from crossed import few
from forge_train import ConfigError, Model
from forge_train.compose.compose import compose
from forge_train_kit.hf import HFModel, fit
from forge_train_kit.hf.folder import Folder
from forge_train_kit.hf.start import described
from forge_train_kit.state_map import Rename
from forge_train_kit.weights import fill
from forge_train_plugins.models._decoder import heads
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.offline.opening import lone_job

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.unit]

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Mistral": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Olmo2": {},
    "SmolLM3": {"pad_token_id": 0},
    "Gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5},
    "Gemma3Text": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
TEXTS, TOKENS, BASE = "ForSequenceClassification", "ForTokenClassification", "Model"
HAS = [
    (name, kind)
    for name in FAMILIES
    for kind in (TEXTS, TOKENS, BASE)
    if not (kind == TOKENS and name in ("Olmo2", "Gemma3Text"))
]
PLUGINS = {
    TEXTS: ("classify", "text_labels"),
    TOKENS: ("token_classify", "text_labels"),
    BASE: ("embed", "text_pairs"),
}
NAMES = ("apple", "pear", "plum")


def plugins_of(name: str, kind: str) -> tuple[str, ...]:
    return (*PLUGINS[kind], *(("eager",) if name == "Gemma2" else ()))  # the default kernel has no soft caps


def written(folder: Path, name: str, kind: str, **more: Any) -> Any:
    """A random model of transformers, in a folder."""
    torch.manual_seed(0)
    labels = (
        {} if kind == BASE else {"id2label": dict(enumerate(NAMES)), "label2id": {n: k for k, n in enumerate(NAMES)}}
    )
    shape = {"vocab_size": SHAPE["vocab_size"]} if name == "GPT2" else SHAPE
    values = {**shape, "pad_token_id": 0, "attn_implementation": "eager", **labels, **FAMILIES[name], **more}
    config = getattr(transformers, f"{name}Config")(**values)
    model = getattr(transformers, f"{name}{kind}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model


def read(folder: Path, plugins: tuple[str, ...]) -> tuple[Model, HFModel]:
    """Forge's model of a folder, built from what `import_hf` says of it, with its weights."""
    opened = Folder.open(folder)
    layout = described(opened, resolve(Request(plugins=plugins), training=False).hooks)
    assert layout is not None
    job = lone_job(resolve(Request(plugins=plugins, sections=layout.sections), training=False), folder)
    job.hooks.vacate("tokenizer")
    model = compose(job).model
    weights = model.state_dict()
    wanted = {name: (tuple(one.shape), one.dtype) for name, one in weights.items()}
    fill(weights, fit.plan(opened, layout, wanted), opened)
    model.train(False)
    return model, layout


def mapped(layout: HFModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under transformers' names → those under forge's."""
    plan = layout.map.plan({name: (tuple(one.shape), one.dtype) for name, one in tensors.items()})
    return dict(plan.stream(lambda name, box: tensors[name][tuple(slice(*bounds) for bounds in box)]))


def losses(theirs: Any, model: Model, kind: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Outputs and loss, ours and those of transformers, of rows with labels of their kind."""
    (part,) = model.parts
    ids = torch.randint(1, 61, (3, 12))
    ours = part.head(part(ids))
    if kind == BASE:
        found = theirs(ids, use_cache=False).last_hidden_state
        return (ours, ours.square().mean()), (found, found.square().mean())
    labels = torch.tensor([2, 0, 1]) if kind == TEXTS else torch.randint(0, 3, (3, 12))
    if kind == TOKENS:
        labels[0, 3:7] = -100
    else:
        ours = ours[:, -1]
    found = theirs(ids, labels=labels, use_cache=False)
    mine = torch.nn.functional.cross_entropy(ours.flatten(0, -2), labels.flatten())
    return (ours, mine), (found.logits, found.loss)


@pytest.mark.parametrize(("name", "kind"), HAS)
def test_outputs_and_gradients_are_those_of_transformers(tmp_path: Path, name: str, kind: str) -> None:
    theirs = written(tmp_path, name, kind)
    model, layout = read(tmp_path, plugins_of(name, kind))
    (outputs, loss), (expected, their_loss) = losses(theirs, model, kind)
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    their_loss.backward()
    gradients = mapped(layout, {n: one.grad for n, one in theirs.named_parameters() if one.grad is not None})
    assert gradients.keys() == {one for one, _ in model.named_parameters()}
    for one, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[one], rtol=1e-5, atol=1e-5)


IN_CI = [one for one in HAS if (HAS.index(one) + list(FAMILIES).index(one[0])) % 3 == 0]
"""Every family with one of its heads."""


@pytest.mark.parametrize(("name", "kind"), few(HAS, IN_CI))
def test_an_imported_model_goes_back_to_transformers(tmp_path: Path, name: str, kind: str) -> None:
    theirs = written(tmp_path / "hf", name, kind)
    import_checkpoint(tmp_path / "hf", tmp_path / "forge", plugins=plugins_of(name, kind))
    export_checkpoint(tmp_path / "forge", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["architectures"] == [name + kind]
    again = getattr(transformers, name + kind).from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    ids = torch.randint(1, 61, (2, 10))
    for mine, one in zip(again(ids).to_tuple(), theirs(ids).to_tuple(), strict=False):
        torch.testing.assert_close(mine, one, rtol=1e-6, atol=1e-6)
        break
    if kind != BASE:
        assert again.config.id2label == dict(enumerate(NAMES))


def test_one_label_is_a_reward(tmp_path: Path) -> None:
    theirs = written(tmp_path / "hf", "Llama", TEXTS, id2label={0: "good"}, label2id={"good": 0})
    import_checkpoint(tmp_path / "hf", tmp_path / "forge", plugins=("reward", "text_pairs"))
    export_checkpoint(tmp_path / "forge", tmp_path / "back")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "back").eval()
    ids = torch.randint(1, 61, (1, 10))
    assert again.num_labels == 1
    torch.testing.assert_close(again(ids).logits, theirs(ids).logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"problem_type": "multi_label_classification"}, "Forge supports one class per text"),
        ({"id2label": {"0": "a", "2": "b"}}, "id2label must name the labels 0, 1, …, each once"),
        ({"hidden_act": "tanh"}, "hidden_act"),
    ],
)
def test_what_can_not_be_imported_is_told(tmp_path: Path, more: dict[str, Any], says: str) -> None:
    written(tmp_path / "hf", "Llama", TEXTS)
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    with pytest.raises(ConfigError, match=says):
        import_checkpoint(tmp_path / "hf", tmp_path / "forge", plugins=PLUGINS[TEXTS])


def test_a_folder_enables_the_plugin_of_its_head_which_asks_for_labels(tmp_path: Path) -> None:
    written(tmp_path / "hf", "Llama", TEXTS)
    with pytest.raises(ConfigError, match="'classify' .* takes 'labelled_rows' from the slot 'build_data'"):
        import_checkpoint(tmp_path / "hf", tmp_path / "forge")


def test_a_class_that_transformers_lacks_is_not_written(tmp_path: Path) -> None:
    written(tmp_path / "hf", "Olmo2", TEXTS)
    import_checkpoint(tmp_path / "hf", tmp_path / "forge", plugins=PLUGINS[TEXTS])
    found = Folder.open(tmp_path / "hf").config
    assert heads.gives({**found, "architectures": ["Olmo2ForTokenClassification"]})[0] == "token_class_logits"
    layout = HFModel(Rename({}), {"architectures": ["Olmo2ForCausalLM"]})
    with pytest.raises(ConfigError, match="transformers has no Olmo2ForTokenClassification"):
        heads.exported(layout, "token_class_logits", torch.nn.Identity(), None, None)
