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
from forge_train_kit.plugins import find
from forge_train_plugins.models.decoder import Decoder, Rope

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
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "quick_gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "short_factor is missing"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "ntk"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "architectures"),
        ({"model_type": "mistral"}, "model_type = 'mistral'"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"auto_map": {"AutoModel": "mine.Model"}}, "auto_map"),
        ({"unheard_of": None}, "unheard_of = None"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, r"rope_parameters\.full_attention = \{"),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, r"rope_scaling\.factor = 2\.0"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}},
            r"rope_scaling\.mrope_section",
        ),
        ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, r"rope_scaling\.type = 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
        ({"rope_scaling": {"rope_theta": 1.0}, "rope_parameters": {"rope_theta": 2.0}}, "rope_scaling = "),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear'.*expected a table"),
        ({"original_max_position_embeddings": 32}, "original_max_position_embeddings = 32"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false'.*expected true or false"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers = 2.0.*expected an integer"),
        ({"rms_norm_eps": True}, "rms_norm_eps = True.*expected a number"),
    ],
)
def test_what_has_no_counterpart_is_named(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        read(**values)


def test_dropout_of_attention_weights_is_kept_both_ways() -> None:
    assert read(attention_dropout=0.25).sections["decoder"]["attention_dropout"] == 0.25
    assert read(attention_dropout=None).sections["decoder"]["attention_dropout"] == 0.0
    assert export(attention_dropout=0.25).config["attention_dropout"] == 0.25


def test_all_that_is_not_understood_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        read(rope_theta=5e5, embedding_multiplier=2.0, logit_scale=[0.1] * 100, use_cache=False, eos_token_id=[1, 2])
    lines = str(refused.value).splitlines()
    assert [line.split(" = ")[0] for line in lines] == ["config.json: embedding_multiplier", "config.json: logit_scale"]
    assert max(map(len, lines)) < 200


def test_what_changes_no_number_is_not_in_the_way() -> None:
    harmless = {"torch_dtype": "bfloat16", "use_cache": True, "bos_token_id": 1, "eos_token_id": [2, 3]}
    harmless |= {"attention_dropout": 0.0, "pretraining_tp": 1, "rope_scaling": None, "sliding_window": None}
    assert read(**harmless).sections == read().sections
    qwen3 = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False, "sliding_window": 4096}
    assert read(**qwen3, max_window_layers=28, layer_types=["full_attention"] * 2).sections["decoder"]["qk_norm"]


# -- export -------------------------------------------------------------------------------------------------------


def export(activation: str = "swiglu", **values: Any) -> Any:
    return fakes.make(Decoder, **(fakes.TINY | values)).export_hf(fakes.job(activation=activation))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"norm": "layer"}, r'Llama\w+: decoder.norm is "layer" here, but "rms" there'),
        ({"o_bias": True}, "decoder.o_bias is true"),
        ({"qk_norm": True, "bias": True}, r"Qwen3\w+: decoder.bias is true"),
        ({"qk_norm": True, "window": 8, "rope": Rope(layers=(True, False))}, r"decoder.rope.layers is \[true, false\]"),
        ({"soft_cap": 5.0}, "decoder.soft_cap is 5.0 here, but 0.0 there"),
        ({"activation": "relu2"}, "swiglu.activation is relu2 here, but swiglu there"),
        ({"architecture": "Gemma2ForCausalLM"}, r'Gemma2ForCausalLM: decoder.norm_at is "pre" here'),
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


def test_the_vocabulary_is_the_tokenizers() -> None:
    job = fakes.job(tokenizer=SimpleNamespace(vocabulary=70))
    assert fakes.make(Decoder, **(fakes.TINY | {"vocabulary": 0})).export_hf(job).config["vocab_size"] == 70


def test_defaults_that_follow_from_others_are_written_out() -> None:
    config = export(kv_heads=0, hidden=0, rope=Rope(scaling="llama3", factor=8.0, original_sequence=32)).config
    assert (config["num_key_value_heads"], config["head_dim"], config["intermediate_size"]) == (4, 8, 128)
    assert config["rope_scaling"]["high_freq_factor"] == 4.0


def test_enabling_the_model_and_reading_a_config_import_no_torch() -> None:
    names = ("adamw", "cosine", "cross_entropy", "decoder", "gqa", "lion", "next_token", "sdpa", "sequential", "swiglu")
    modules = tuple(find(name).module for name in names)
    code = (
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
        "from forge_train_plugins.models.decoder import Decoder\n"
        f"assert Decoder(Decoder.Config()).import_hf({LLAMA})\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
