"""What of Hugging Face's layout can't be imported, and what of a decoder can't be exported; both say why."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fakes
from forge_train import ConfigError
from forge_train_plugins.decoder import Decoder, Rope

pytestmark = pytest.mark.unit

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def read(**values: Any) -> Any:
    return fakes.make(Decoder).import_hf(LLAMA | values)


def test_another_architecture_is_somebody_elses() -> None:
    assert read(architectures=["MambaForCausalLM"]) is None
    assert read(architectures=None) is None


def test_keys_that_are_left_out_have_the_architectures_defaults() -> None:
    section = read().sections["decoder"]
    assert (section["kv_heads"], section["head_dim"], section["tied"]) == (4, 8, False)
    assert section["rope"] == {"theta": 10_000.0}
    assert read(architectures=["Qwen3ForCausalLM"]).sections["decoder"]["head_dim"] == 128


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_both_forms_of_rope_are_read(key: str, kind: str) -> None:
    section = read(**{key: {kind: "linear", "factor": 2}}, rope_theta=5e5).sections["decoder"]
    assert section["rope"] == {"theta": 5e5, "scaling": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "quick_gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"hidden_size": None}, "hidden_size is missing"),
    ],
)
def test_what_has_no_counterpart_is_named(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        read(**values)


# -- export -------------------------------------------------------------------------------------------------------


def export(activation: str = "swiglu", **values: Any) -> Any:
    return fakes.make(Decoder, **(fakes.TINY | values)).export_hf(fakes.job(activation=activation))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"norm": "layer"}, "decoder.norm"),
        ({"bias": True}, "decoder.bias"),
        ({"qkv_bias": True}, "decoder.qkv_bias"),
        ({"qk_norm": True, "bias": True, "qkv_bias": True}, "decoder.qk_norm"),
        ({"activation": "relu2"}, "swiglu.activation = relu2"),
    ],
)
def test_what_neither_architecture_knows_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export(**values)


def test_a_block_of_another_kind_is_named() -> None:
    job = fakes.job()
    job.hooks.feed_forward = lambda layer: nn.ParameterDict({"experts": nn.Parameter(torch.zeros(2, 3))})
    with pytest.raises(ConfigError, match=r"no place for layers\.0\.feed_forward\.experts"):
        fakes.make(Decoder, **fakes.TINY).export_hf(job)


def test_the_tokenizer_says_where_a_document_ends() -> None:
    job = fakes.job(tokenizer=SimpleNamespace(vocabulary=70, end=3))
    config = fakes.make(Decoder, **(fakes.TINY | {"vocabulary": 0})).export_hf(job).config
    assert (config["vocab_size"], config["eos_token_id"], config["bos_token_id"]) == (70, 3, None)


def test_defaults_that_follow_from_others_are_written_out() -> None:
    config = export(kv_heads=0, hidden=0, rope=Rope(scaling="llama3", factor=8.0, original_sequence=32)).config
    assert (config["num_key_value_heads"], config["head_dim"], config["intermediate_size"]) == (4, 8, 128)
    assert config["rope_scaling"]["high_freq_factor"] == 4.0


def test_enabling_the_model_and_reading_a_config_import_no_torch() -> None:
    names = ("adamw", "cosine", "cross_entropy", "decoder", "gqa", "lion", "next_token", "sdpa", "sequential", "swiglu")
    code = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module('forge_train_plugins.' + name)\n"
        "from forge_train_plugins.decoder import Decoder\n"
        f"assert Decoder(Decoder.Config()).import_hf({LLAMA})\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
