"""Adapters of PEFT that are added to the weights of a layout, against one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import chat_model
from crossed import marked
from forge_train_tools.testing import Pool

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore")]

ADAPTERS: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "plain": ("all-linear", {}),
    "stretched": (["q_proj", "down_proj"], {"use_dora": True}),
    "whole": (["v_proj"], {"modules_to_save": ["lm_head", "norm"]}),
}
LAYOUTS: Mapping[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "fsdp2 on 3": (3, ("fsdp2",), ("train.global_batch=3", "train.micro_batch=1")),
    "tp2": (2, ("tp",), ("parallel.tp=2",)),
    "pp2": (2, ("pp",), ("parallel.pp=2",)),
    "fsdp2 × tp2": (4, ("fsdp2", "tp"), ("parallel.tp=2",)),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, and adapters that change all of its weights but some norms and the embedding."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("adapted")
    chat_model.write_model(folder / "base")
    for number, (name, (targets, more)) in enumerate(ADAPTERS.items()):
        torch.manual_seed(number)
        base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
        made = peft.get_peft_model(base, peft.LoraConfig(r=2 + number, lora_alpha=5, target_modules=targets, **more))
        with torch.no_grad():
            for parameter_name, one in made.named_parameters():
                if one.requires_grad:
                    scale = 0.3 if "lora_A" in parameter_name or "lora_B" in parameter_name else 0.1
                    one.add_(scale * torch.randn(one.shape))
        made.save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("name", marked(LAYOUTS, ("fsdp2 on 3", "pp2", "fsdp2 × tp2")))
def test_answers_are_those_of_one_process(ranks: Pool, models: Path, name: str) -> None:
    world, plugins, values = LAYOUTS[name]
    adapters = {str(models / "plain"): 0.5, str(models / "stretched"): 1.0, str(models / "whole"): -0.7}
    asked: dict[str, Any] = {"base": str(models / "base")}
    (bare,) = ranks.run("adapted_cases:answers", 1, adapters={}, plugins=(), values=(), **asked)
    (wanted,) = ranks.run("adapted_cases:answers", 1, adapters=adapters, plugins=(), values=(), **asked)
    found = ranks.run("adapted_cases:answers", world, adapters=adapters, plugins=plugins, values=values, **asked)
    for mine in found:
        for (ids, logs), (others, other), (_, without) in zip(mine, wanted, bare, strict=True):
            assert ids == others
            assert logs == pytest.approx(other, abs=1e-5)
            assert logs != pytest.approx(without, abs=1e-2)
