"""Folders of models with experts: every layout that files have is imported, trained, and exported as published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from crossed import marked
from doubles import BOUND, in_double
from expert_models import DEEPSEEK, GROUPS, MIXTRAL, OLMOE, QWEN
from forge_train import ConfigError
from forge_train_cli.app import run as forge
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint
from test_huggingface import SHAPE, TOKENS, load, logits, trained_and_exported

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.e2e]

DEEP = {"num_hidden_layers": 3, "bos_token_id": None, "eos_token_id": None}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": ("Mixtral", MIXTRAL, {}),
    "mixtral, one expert a token": ("Mixtral", {**MIXTRAL, "num_experts_per_tok": 1}, {}),
    "mixtral tied, stacked": ("Mixtral", {**MIXTRAL, "tie_word_embeddings": True}, {"save_original_format": False}),
    "qwen3, in several files": ("Qwen3Moe", {**QWEN, "mlp_only_layers": [0]}, {"max_shard_size": "40KB"}),
    "qwen3, stacked": ("Qwen3Moe", QWEN, {"save_original_format": False, "max_shard_size": "40KB"}),
    "olmoe": ("Olmoe", OLMOE, {}),
    "deepseek v2": ("DeepseekV2", DEEPSEEK, {}),
    "deepseek v3, in several files": ("DeepseekV3", {**DEEPSEEK, **GROUPS}, {"max_shard_size": "40KB"}),
}
"""Family, configuration, how it is saved."""


def random_model(family: str, values: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    shape = {**SHAPE, **DEEP, **values, "initializer_range": 0.2}
    config = getattr(transformers, f"{family}Config")(**shape)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("mlp.gate.weight"):
                tensor.normal_(0, 0.2)
            elif name.endswith("e_score_correction_bias"):
                tensor.uniform_(-0.2, 0.2)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", marked(CASES, ["mixtral, one expert a token", "mixtral tied, stacked", "qwen3, in several files"])
)
def test_folders_with_experts_are_imported_trained_and_exported(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, values, saving = CASES[case]
    reference = random_model(family, values)
    reference.save_pretrained(tmp_path / "hf", **saving)
    stored = {name for file in (tmp_path / "hf").glob("*.safetensors") for name in load_file(file)}
    stacked = not saving.get("save_original_format", True)
    assert any(name.endswith("experts.gate_up_proj") for name in stored) is stacked
    start = tmp_path / "start"
    assert forge(["checkpoint", "import", str(tmp_path / "hf"), str(start)]) == 0
    part, ours = logits(start, TOKENS)
    assert (in_double(part, TOKENS) - in_double(reference, TOKENS)).abs().max() <= BOUND
    trained_and_exported(start, ours)


@pytest.mark.parametrize(("family", "values"), [("Qwen3Moe", QWEN), ("DeepseekV3", {**DEEPSEEK, **GROUPS})])
def test_narrow_experts_come_back_bit_for_bit_under_the_published_names(
    family: str, values: dict[str, Any], tmp_path: Path
) -> None:
    model = random_model(family, values).bfloat16()
    for module in model.modules():  # as published
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = module.e_score_correction_bias.float() + 1e-4
    model.save_pretrained(tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "start")
    export_checkpoint(tmp_path / "start", tmp_path / "back", dtype=torch.bfloat16)
    first, second = (load_file(tmp_path / one / "model.safetensors") for one in ("hf", "back"))
    assert first.keys() == second.keys()
    assert any(".experts.7.up_proj.weight" in name for name in first)
    assert {name: tensor.dtype for name, tensor in first.items()} == {n: tensor.dtype for n, tensor in second.items()}
    assert all(torch.equal(first[name], second[name]) for name in first)
    kept = {tensor.dtype for name, tensor in second.items() if name.endswith("e_score_correction_bias")}
    assert kept <= {torch.float32}, "rounded biases would choose other experts"


def test_settings_of_plugins_that_an_import_enables_are_taken(tmp_path: Path) -> None:
    random_model("Qwen3Moe", QWEN).save_pretrained(tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "start", settings=("moe.balance=0.5",))
    written = (tmp_path / "start" / "config.toml").read_text()
    assert "balance = 0.5" in written
    assert '"moe"' in written
    with pytest.raises(ConfigError, match=r"moe\.balanse"):
        import_checkpoint(tmp_path / "hf", tmp_path / "other", settings=("moe.balanse=0.5",))


BLOCK = 16


def quantised(folder: Path) -> None:
    """Write a folder's weights in blocks of fp8, as DeepSeek-V3 is published; beside the last layer lies another."""
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        if tensor.dim() < 2 or not name.startswith("model.layers.") or name.endswith("mlp.gate.weight"):
            found[name] = tensor
            continue
        rows, columns = (-(-size // BLOCK) for size in tensor.shape)
        scales = torch.rand(rows, columns) / 100 + 0.001
        whole = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: tensor.shape[0], : tensor.shape[1]]
        found[name], found[f"{name}_scale_inv"] = (tensor / whole).clamp(-448, 448).to(torch.float8_e4m3fn), scales
    ahead = {name.replace("layers.2.", "layers.3."): one.clone() for name, one in found.items() if "layers.2." in name}
    save_file(found | ahead | {"model.layers.3.enorm.weight": torch.ones(32)}, file)
    how = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": how}))


def test_blocks_of_fp8_become_weights(tmp_path: Path) -> None:
    reference = random_model("DeepseekV3", {**DEEPSEEK, **GROUPS, "num_mtp_layers": 1})
    reference.save_pretrained(tmp_path / "hf")
    quantised(tmp_path / "hf")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    plain = {name: tensor for name, tensor in stored.items() if "layers.3." not in name and "scale_inv" not in name}
    for name, scales in ((name, stored.get(f"{name}_scale_inv")) for name in [*plain]):
        if scales is not None:
            whole = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            rows, columns = stored[name].shape
            plain[name] = stored[name].float() * whole[:rows, :columns]
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "plain" / "config.json").write_text(
        json.dumps({key: one for key, one in config.items() if key != "quantization_config"})
    )
    import_checkpoint(tmp_path / "hf", tmp_path / "start")
    part, _ = logits(tmp_path / "start", TOKENS)
    assert (in_double(part, TOKENS) - in_double(load(tmp_path / "plain"), TOKENS)).abs().max() <= BOUND
    del stored["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(stored, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts\.5\.up_proj"):
        import_checkpoint(tmp_path / "hf", tmp_path / "again")
