"""Folders of PEFT that hold modules in full (`modules_to_save`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from forge_train import ConfigError
from forge_train_kit.model import updated_already, without_updates
from forge_train_tools.offline.adapters import export_adapter
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.offline.opening import open_model
from lora_models import logits, started, trained, write

peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore")]

IDS = torch.arange(24).view(2, 12)
SAVED = ["lm_head", "embed_tokens", "layers.1.input_layernorm", "model.norm"]


def opened(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A folder of `peft` for the model in `hf` beside it, all of whose values are its own."""
    write(tmp_path / "hf", "")
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], modules_to_save=SAVED)
    made = peft.get_peft_model(opened(tmp_path / "hf"), config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, one in made.named_parameters():
            if one.requires_grad:
                norm = 1.0 if "norm" in name else 0.0
                one.copy_(norm + 0.1 * torch.randn(one.shape, generator=generator))
    made.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def by_peft(adapter: Path) -> Any:
    return peft.PeftModel.from_pretrained(opened(adapter.parent / "hf"), adapter, is_trainable=True)


@pytest.mark.parametrize("plugins", [(), ("hf",)])
def test_logits_and_gradients_are_those_of_peft(adapter: Path, plugins: tuple[str, ...]) -> None:
    """Of a decoder, and of a class of transformers."""
    theirs = by_peft(adapter)
    _, model = started(adapter.parent / "hf", f"lora.adapter={adapter}", plugins=plugins)
    found, expected = logits(model, IDS), theirs(IDS).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    with without_updates(model.parts[0]), theirs.disable_adapter():
        torch.testing.assert_close(logits(model, IDS), theirs(IDS).logits, rtol=0, atol=1e-6)
    for one in (found, expected):
        nn.functional.cross_entropy(one.flatten(0, 1), (IDS.flatten() + 1) % 50).backward()
    norms = [
        sorted(float(one.grad.norm()) for one in each.parameters() if one.requires_grad) for each in (model, theirs)
    ]
    assert len(norms[0]) == 2 * 2 * 2 + len(SAVED)
    torch.testing.assert_close(*map(torch.tensor, norms), rtol=1e-5, atol=1e-7)
    full = {name for name, one in model.named_parameters() if "lora_full" in name and one.requires_grad}
    assert len(full) == len(SAVED)
    roles = model.roles
    assert {roles.get(name) for name in full} == {"embedding", "head", None}
    assert {name.rpartition(".")[0] for name in full} <= {*updated_already(model)}
    _, narrow = started(adapter.parent / "hf", f"lora.adapter={adapter}", "train.precision=bf16", plugins=plugins)
    torch.testing.assert_close(logits(narrow, IDS).float(), expected, rtol=0, atol=0.1)


@pytest.mark.slow
def test_a_run_goes_on_from_it_and_is_written_again(adapter: Path) -> None:
    """What is saved are the copies; a merged export has them in the base's places."""
    folder = adapter.parent
    run = trained(folder, f"lora.adapter={adapter}", "adamw.lr=0.01", "adamw.weight_decay=0")
    ours = open_model(run, text=False).model
    export_adapter(run, folder / "again")
    names = {file: load_file(folder / file / "adapter_model.safetensors") for file in ("adapter", "again")}
    assert names["adapter"].keys() == names["again"].keys()
    assert not any(torch.equal(one, names["again"][name]) for name, one in names["adapter"].items())
    with torch.no_grad():
        torch.testing.assert_close(logits(ours, IDS), by_peft(folder / "again")(IDS).logits, rtol=0, atol=1e-6)
        export_checkpoint(run, folder / "merged")
        torch.testing.assert_close(logits(ours, IDS), opened(folder / "merged")(IDS).logits, rtol=0, atol=2e-6)
    (again,) = (started(folder / "hf", f"lora.adapter={folder / 'again'}")[1],)
    torch.testing.assert_close(logits(again, IDS), logits(ours, IDS), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_what_has_no_place_is_refused(adapter: Path) -> None:
    folder, key = adapter.parent, f"lora.adapter={adapter}"
    with pytest.raises(ConfigError, match=r"lora\.tune: 'head' has an update already"):
        started(folder / "hf", key, "lora.tune=['head']")
    with pytest.raises(ConfigError, match=r"lora\.beneath: .* has modules in full \(modules_to_save\), which only"):
        started(folder / "hf", f"lora.beneath=['{adapter}']")
    file = adapter / "adapter_model.safetensors"
    held = load_file(file)
    head = "base_model.model.lm_head.weight"
    for changed, says in (
        ({head: None}, r"has no tensors of 'lm_head', which adapter_config\.json names in modules_to_save"),
        (
            {"base_model.model.lm_head.bias": held[head][:, 0].clone()},
            r"updates lm_head\.bias, which this model has no",
        ),
        (
            {head: held[head][:-2].clone()},
            r"holds 'lm_head\.weight' of \d+ × 64, but 'head\.weight' has \d+ × 64\. If rows of added tokens",
        ),
        (
            {
                f"base_model.model.lm_head.lora_{a}.weight": torch.zeros(shape)
                for a, shape in (("A", (4, 64)), ("B", (len(held[head]), 4)))
            },
            "has 'lm_head' in full, and an update of it",
        ),
        ({"base_model.model.other.weight": held[head].clone()}, r"holds 'base_model\.model\.other\.weight', which"),
    ):
        save_file({name: one for name, one in {**held, **changed}.items() if one is not None}, file)
        with pytest.raises(ConfigError, match=says):
            started(folder / "hf", key)
    save_file(held, file)
    described = json.loads((folder / "hf" / "config.json").read_text())
    tied = opened(folder / "hf")
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    tied.save_pretrained(folder / "hf")
    assert not described["tie_word_embeddings"]
    with pytest.raises(ConfigError, match=r"in full, and 'embedding\.weight' and 'head\.weight' are tied"):
        started(folder / "hf", key)
