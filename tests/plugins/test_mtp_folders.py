"""Modules for further tokens in Hugging Face layout: where the family has a place for them, and where it has none."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.testing import TinyRun, run_forge

transformers = pytest.importorskip("transformers")

DEEPSEEK: dict[str, Any] = {
    "decoder.architecture": "DeepseekV3ForCausalLM",
    "decoder.kv_heads": 4,
    "decoder.layers": 2,
    "mla.kv_rank": 16,
    "mla.q_rank": 24,
    "mla.rope_dim": 8,
    "moe.experts": 4,
    "moe.hidden": 16,
    "moe.shared": 1,
    "moe.dense_first": 1,
    "moe.router": "sigmoid",
    "moe.scaling": 2.5,
    "moe.bias_speed": 0.01,
}
PLUGINS = ("mla", "moe")


def trained(tmp_path: Path, name: str, plugins: tuple[str, ...], config: dict[str, Any]) -> TinyRun:
    values = {"decoder.vocabulary": 257, "adamw.lr": 0.01, **config}
    return run_forge(plugins, values, steps=3, folder=tmp_path, name=name)


def names_in(folder: Path) -> set[str]:
    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {*opened.keys()}
    return found


@pytest.mark.slow
def test_deepseeks_layout_has_them_behind_the_last_layer(tmp_path: Path) -> None:
    run = trained(tmp_path, "run", (*PLUGINS, "mtp"), {**DEEPSEEK, "mtp.depths": 2})
    folder = tmp_path / "hf"
    told = export_checkpoint(run.run, folder)
    assert not any("Left out" in note for note in told.notes)
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 2
    names = names_in(folder)
    for at in (2, 3):
        own = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", "input_layernorm.weight"}
        own |= {"self_attn.kv_b_proj.weight", "mlp.experts.3.down_proj.weight", "mlp.gate.e_score_correction_bias"}
        assert {f"model.layers.{at}.{name}" for name in own} <= names
    assert not any(name.startswith("model.layers.4.") for name in names)

    there = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    part: Any = run.model.parts[0].eval()
    ids = torch.randint(0, 257, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (part.head(part(ids)) - there(ids).logits).abs().max() <= 1e-5

    state = run.model.state_dict()
    back = {"train.init_from": str(folder), "moe.bias_speed": 1e-30}
    for plugins, more in (((*PLUGINS, "mtp"), {"mtp.depths": 2}), (PLUGINS, {})):
        again = begun(tmp_path / str(len(plugins)), plugins, {**DEEPSEEK, **more, **back})
        assert again.keys() == {name for name in state if "mtp" in plugins or not name.startswith("tail.")}
        assert all(torch.equal(again[name], state[name]) for name in again)


def begun(folder: Path, plugins: tuple[str, ...], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What a run that starts from a folder begins with."""
    run = run_forge(plugins, {"decoder.vocabulary": 257, **config, "adamw.lr": 1e-30}, steps=1, folder=folder)
    return run.model.state_dict()


def test_another_layout_is_exported_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forge_train")
    run = trained(tmp_path, "run", ("mtp",), {})
    told = export_checkpoint(run.run, tmp_path / "hf")
    (note,) = [note for note in told.notes if "Left out" in note]
    assert "tail.layers.0.embedding_norm.weight" in note
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    part: Any = run.model.parts[0].eval()
    ids = torch.randint(0, 257, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (part.head(part(ids)) - there(ids).logits).abs().max() <= 1e-5
    start = {"train.init_from": str(tmp_path / "hf"), "train.init_missing": ["tail.*"]}
    again = begun(tmp_path / "again", ("mtp",), start)
    kept = {name: one for name, one in run.model.state_dict().items() if not name.startswith("tail.")}
    assert all(torch.equal(again[name], one) for name, one in kept.items())
