"""Folders of GPT-2, Phi-3 and GPT-OSS, in every layout that files have: imported, trained, and exported."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from doubles import BOUND, in_double
from forge_train import ConfigError
from forge_train_cli.app import run as forge
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint
from test_huggingface import TOKENS, load, logits, trained_and_exported

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.e2e]

NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SHAPE = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    **NONE,
}
GPT2 = {"vocab_size": 257, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.2}
DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.0, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0]}
OSS = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {**GPT2, **DRY, **NONE}, {}),
    "gpt2 untied, in several files": (
        "GPT2LMHeadModel",
        {**GPT2, **DRY, **NONE, "tie_word_embeddings": False},
        {"max_shard_size": "40KB"},
    ),
    "phi3 longrope, in several files": (
        "Phi3ForCausalLM",
        {**SHAPE, "original_max_position_embeddings": 16, "rope_parameters": LONG},
        {"max_shard_size": "20KB"},
    ),
    "gpt-oss": ("GptOssForCausalLM", {**SHAPE, **OSS}, {"max_shard_size": "40KB"}),
}
"""Class, configuration, how it is saved."""


def random_model(name: str, values: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    made = getattr(transformers, name)
    config = made.config_class(**values)
    config._attn_implementation = "eager"
    model = made(config).eval()
    with torch.no_grad():
        for tensor_name, tensor in model.named_parameters():
            if tensor_name.endswith("bias"):
                tensor.normal_(0, 0.2)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_folders_of_fused_layouts_are_imported_trained_and_exported(case: str, tmp_path: Path) -> None:
    name, values, saving = CASES[case]
    reference = random_model(name, values)
    reference.save_pretrained(tmp_path / "hf", **saving)
    assert (len([*(tmp_path / "hf").glob("*.safetensors")]) > 1) is bool(saving)
    start = tmp_path / "start"
    assert forge(["checkpoint", "import", str(tmp_path / "hf"), str(start)]) == 0
    part, ours = logits(start, TOKENS)
    assert (in_double(part, TOKENS) - in_double(reference, TOKENS)).abs().max() <= BOUND
    trained_and_exported(start, ours)


@pytest.mark.parametrize("case", ["gpt2", "gpt-oss"])
def test_narrow_fused_layouts_come_back_bit_for_bit(case: str, tmp_path: Path) -> None:
    name, values, _ = CASES[case]
    random_model(name, values).bfloat16().save_pretrained(tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "start")
    export_checkpoint(tmp_path / "start", tmp_path / "back", dtype=torch.bfloat16)
    first, second = (load_file(tmp_path / one / "model.safetensors") for one in ("hf", "back"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[one], second[one]) for one in first)


def test_gpt2_as_first_published(tmp_path: Path) -> None:
    """Without a prefix, and with masks among the weights."""
    reference = random_model("GPT2LMHeadModel", {**GPT2, **NONE})
    reference.save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    bare = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 128, 128).tril() for layer in range(2)}
    save_file(bare | masks, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"without dropout of attention weights\. .*: auto, eager; enable one"):
        import_checkpoint(tmp_path / "hf", tmp_path / "start", plugins=("sdpa",))
    for name, settings in (("dry", ("decoder.attention_dropout=0",)), ("start", ())):
        import_checkpoint(tmp_path / "hf", tmp_path / name, settings=settings)
        written = tomllib.loads((tmp_path / name / "config.toml").read_text(encoding="utf-8"))
        assert ("auto" in written["plugins"]) == (not settings)
    part, _ = logits(tmp_path / "start", TOKENS)
    assert (in_double(part, TOKENS) - in_double(reference, TOKENS)).abs().max() <= BOUND
    del bare["h.1.mlp.c_fc.weight"]
    save_file(bare, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"h\.1\.mlp\.c_fc\.weight"):
        import_checkpoint(tmp_path / "hf", tmp_path / "again")


def test_experts_in_mxfp4_become_weights(tmp_path: Path) -> None:
    """As GPT-OSS is published, against transformers' own function for it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    reference = random_model("GptOssForCausalLM", {**SHAPE, **OSS})
    reference.save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    stored, narrow = load_file(file), {}
    for name in [one for one in stored if one.endswith("_proj") and ".experts." in one]:
        count, rows, columns = stored.pop(name).shape  # as [in, out]
        blocks = torch.randint(0, 256, (count, columns, rows // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 126, (count, columns, rows // 32), dtype=torch.uint8)
        narrow |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            reference.get_parameter(name).copy_(convert_moe_packed_tensors(blocks, scales))
    save_file(stored | narrow, file, {"format": "pt"})
    table = json.loads((tmp_path / "hf" / "config.json").read_text())
    how = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**table, "quantization_config": how}))
    import_checkpoint(tmp_path / "hf", tmp_path / "start")
    _, ours = logits(tmp_path / "start", TOKENS)
    expected = reference(TOKENS).logits.detach()
    assert (ours - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    export_checkpoint(tmp_path / "start", tmp_path / "out")
    assert (load(tmp_path / "out")(TOKENS).logits - ours).abs().max() <= 1e-5
