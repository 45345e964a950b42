"""Opening a folder in Hugging Face layout: by the rules of an import, and with messages that fit the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from expert_models import DEEPSEEK, GROUPS
from forge_train import ConfigError, Plugin, hookimpl
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.hf.folder import Folder
from forge_train_kit.layers import AttentionKernel
from forge_train_plugins.models.decoder import Decoder
from forge_train_tools.offline.convert import convert_folder
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.opening import open_model
from test_huggingface import SHAPE

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.unit]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return saved(tmp_path / "llama", "LlamaForCausalLM")


def saved(folder: Path, kind: str, **more: Any) -> Path:
    config = transformers.LlamaConfig(**SHAPE, **more)
    getattr(transformers, kind)(config).save_pretrained(folder)
    return folder


def refusals(folder: Path) -> tuple[str, str]:
    """What an import and an opening say of a folder."""
    with pytest.raises(ConfigError) as imported:
        import_checkpoint(folder, folder.parent / "imported")
    with pytest.raises(ConfigError) as opened:
        open_model(folder)
    return str(imported.value), str(opened.value)


class Plain(Plugin):
    """A kernel without document masks."""

    api = (1, 0)
    kernel_capabilities = KernelCapabilities(offsets=True)

    @hookimpl
    def attention_kernel(self) -> AttentionKernel:
        from forge_train_plugins.attention._sdpa import Kernel

        return Kernel("auto")


def test_what_the_data_needs_of_the_kernel_counts_only_where_data_is_read(llama: Path, tmp_path: Path) -> None:
    kernel = f"{__name__}:Plain"
    opened = open_model(llama, plugins=(kernel,))
    assert opened.job.hooks.provider("attention_kernel") == "plain"
    with pytest.raises(ConfigError, match="without document masks. Plugin 'text' asks for it"):
        import_checkpoint(llama, tmp_path / "out", plugins=(kernel,))


def test_values_that_contradict_each_other_are_refused_as_by_an_import(llama: Path) -> None:
    table = json.loads((llama / "config.json").read_text())
    table |= {"num_attention_heads": 3, "num_key_value_heads": 2}
    (llama / "config.json").write_text(json.dumps(table))
    imported, opened = refusals(llama)
    assert imported == opened
    assert "decoder.kv_heads: 2 does not divide decoder.heads (3)" in opened


def test_a_folder_that_lacks_a_tensor_is_refused_without_options_of_other_commands(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, llama / "model.safetensors")
    imported, opened = refusals(llama)
    assert imported == opened
    assert "of the model in config.json" in opened
    assert "--from" not in opened


def test_a_conversion_to_another_architecture_names_its_own_option(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Name another one with --architecture\.$") as error:
        convert_folder(llama, tmp_path / "out", architecture="Gemma2ForCausalLM")
    assert "decoder.architecture" not in str(error.value)


def test_another_head_takes_the_place_of_that_of_a_folder(tmp_path: Path) -> None:
    labels = {0: "a", 1: "b", 2: "c"}
    folder = saved(tmp_path / "classes", "LlamaForSequenceClassification", id2label=labels)
    plugins = ("reward", "text_pairs")
    with pytest.raises(ConfigError, match=r"both fill the slot 'task'; use --without classify\."):
        import_checkpoint(folder, tmp_path / "out", plugins=plugins)
    done = import_checkpoint(folder, tmp_path / "out", plugins=plugins, without=("classify",))
    assert any("head.score.weight starts as in a new model" in note for note in done.notes)
    assert any("head.score.weight, of the folder's own head: left out" in note for note in done.notes)
    weights = open_model(tmp_path / "out", text=False).model.state_dict()
    assert weights["head.score.weight"].shape == (1, SHAPE["hidden_size"])
    theirs = Folder.open(folder).read("model.embed_tokens.weight")
    assert torch.equal(weights["embedding.weight"], theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_k_dense_replace": 2}, r"first_k_dense_replace = 2 .*none of the 2 layers would have experts"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            r"rope_parameters = .*latent attention does not support 'dynamic', which depends on the length",
        ),
    ],
)
def test_what_a_deepseek_model_can_not_be_is_named_by_its_key(change: dict[str, Any], message: str) -> None:
    shape = {**SHAPE, **DEEPSEEK, **GROUPS, "num_hidden_layers": 2, **change}
    config = transformers.DeepseekV3Config(**shape)
    table = {**json.loads(config.to_json_string(use_diff=False)), "architectures": ["DeepseekV3ForCausalLM"]}
    with pytest.raises(ConfigError, match=message):
        Decoder(Decoder.Config()).import_hf(table)
