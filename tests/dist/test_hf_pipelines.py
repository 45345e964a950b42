"""A class of transformers on a pipeline: stopped, resumed on one process, evaluated, generated from and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_models
from forge_cli import forge
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.testing import Pool
from hf_pipeline_cases import trained

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.dist]


def values(**more: Any) -> dict[str, Any]:
    model = {key: one for key, one in hf_models.MODELS["cohere"].items() if key != "vocab_size"}
    train = {"train.global_batch": 4, "train.micro_batch": 2, "train.evaluate_every": 2, "checkpoint.every": 2}
    return {"hf": {"type": "cohere", "set": {**model, "tie_word_embeddings": True}}, **train, **more}


def test_a_run_on_two_parts_is_exported_and_goes_on_in_one(ranks: Pool, tmp_path: Path) -> None:
    alone = trained(str(tmp_path / "one"), ["hf"], values(), None)
    settings = values(**{"parallel.pp": 2})
    arguments: dict[str, Any] = {"folder": str(tmp_path / "two"), "plugins": ["hf", "pp"], "config": settings}
    split, _ = ranks.run("hf_pipeline_cases:trained", 2, **arguments, stop_at=2)
    count = len(split["losses"])
    assert 2 <= count < 4
    assert split["losses"] == pytest.approx(alone["losses"][:count], rel=1e-5)

    export_checkpoint(Path(split["run"]), tmp_path / "folder")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    ended = forge(*("generate", split["run"], "--prompt", "The ", "--tokens", 8, "--temperature", 0, "--json"))
    assert ended.code == 0, ended.err
    prompt = torch.tensor([list(b"The ")])
    said = theirs.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert json.loads(ended.out)["text"] == bytes(said[0, 4:].tolist()).decode(errors="replace")

    rest = trained(str(tmp_path / "two"), ["hf"], values(), None)
    assert rest["losses"][-1] == pytest.approx(alone["losses"][-1], rel=1e-5)
    assert rest["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-5)
