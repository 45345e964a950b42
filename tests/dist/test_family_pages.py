"""Every command on the pages of model families, typed as it stands there, with a tiny random model for a download."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import chat_model
from crossed import marked
from forge_cli import forge

transformers = pytest.importorskip("transformers")
pytestmark = [
    *(pytest.mark.e2e, pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(900)),
]

PAGES = Path(__file__).parents[2] / "docs" / "families"
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
FEW_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "topk_method": "greedy",
}
DOWNLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen3-0.6B": ("qwen3", {"tie_word_embeddings": True}),
    "google/gemma-3-1b-pt": ("gemma3_text", {"sliding_window": 16}),
    "google/gemma-2-2b": ("gemma2", {"sliding_window": 16, "query_pre_attn_scalar": 8}),
    "openai-community/gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "allenai/OLMoE-1B-7B-0924": ("olmoe", FEW_EXPERTS),
    "openai/gpt-oss-20b": ("gpt_oss", {**FEW_EXPERTS, "sliding_window": 16}),
    "deepseek-ai/DeepSeek-V2-Lite": ("deepseek_v2", LATENT),
    "deepseek-ai/DeepSeek-V3-Base": ("deepseek_v3", {**LATENT, "num_hidden_layers": 3, "topk_method": "noaux_tc"}),
}
"""What a page downloads → type and configuration of the model that stands for it."""
FEW = ("train.steps=2", "train.global_batch=4", "train.sequence=32", "train.evaluate_batches=1", "text.held_out=0.2")
SMALL = (
    "decoder.dim=32",
    "decoder.layers=1",
    "decoder.heads=2",
    "decoder.hidden=64",
    "decoder.vocabulary=0",
    "train.micro_batch=2",
    "cosine.warmup=0",
)
"""What a page leaves out, so that its commands are fast here."""


def download(repository: str, folder: Path) -> str:
    """A random model in its place; gives the name of its class."""
    kind, values = DOWNLOADS[repository]
    torch.manual_seed(0)
    vocabulary = chat_model.write_tokenizer(folder)
    special = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    sizes = {} if kind == "gpt2" else SIZES
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **special, **values, "vocab_size": vocabulary})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    if kind == "deepseek_v3":
        add_module_for_a_further_token(folder, model)
    return type(model).__name__


def add_module_for_a_further_token(folder: Path, model: Any) -> None:
    """As the published files have it and transformers does not write it: a layer, what joins it, and copies."""
    from safetensors.torch import load_file, save_file

    tensors, count, dim = load_file(folder / "model.safetensors"), len(model.model.layers), model.config.hidden_size
    last, new = f"model.layers.{count - 1}.", f"model.layers.{count}."
    tensors |= {name.replace(last, new): one.clone() for name, one in tensors.items() if name.startswith(last)}
    tensors |= {f"{new}{norm}.weight": torch.ones(dim) for norm in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{new}eh_proj.weight"] = torch.randn(dim, 2 * dim) / 8
    tensors[f"{new}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{new}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))


def commands(page: str) -> list[list[str]]:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return [shlex.split(line.removeprefix("$ ")) for block in blocks for line in block.splitlines()]


def more(command: list[str]) -> list[str]:
    """Settings after a command, so that it is done in seconds."""
    if command[1] == "generate":
        return ["--tokens", "4"]
    if command[1] not in ("train", "verify"):
        return []
    preset = "--from" not in command
    sets = [word for one in (*FEW, *(SMALL if preset else ())) for word in ("-s", one)]
    if command[1] == "verify":
        return [*sets, "--steps", "1"]
    return [*sets, "--quiet", *(("--without", "compile") if preset else ())]


@pytest.mark.parametrize("page", marked(sorted(file.stem for file in PAGES.glob("*.md")), ["deepseek", "experts"]))
def test_from_download_to_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    for number in range(20):
        lines = (f"{number}: " + " ".join(chat_model.WORDS[number % 7 :]) for _ in range(20))
        (tmp_path / "texts" / f"{number}.txt").write_text("\n".join(lines))
    asked = commands(page)
    classes: list[str] = []
    for command in asked:
        if command[:2] == ["hf", "download"]:
            classes.append(download(command[2], tmp_path / command[4]))
            continue
        assert command[0] == "forge"
        ended = forge(*command[1:], *more(command))
        assert ended.code == 0, f"{shlex.join(command)}\n{ended.out}{ended.err}"
    exports = [command[-1] for command in asked if command[1:3] == ["checkpoint", "export"]]
    assert len(exports) >= len(classes)
    for folder in exports:
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert type(found).__name__ in classes
        assert json.loads((tmp_path / folder / "config.json").read_text())["vocab_size"] >= 256
        assert found(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
