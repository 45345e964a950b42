"""`lora.dora` in one process: its gradients are PEFT's, and so is its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_models
from forge_train import ConfigError, Model
from forge_train_tools.offline.adapters import export_adapter
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.offline.opening import open_model
from lora_models import logits, started, trained, write

peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
pytestmark = pytest.mark.unit
IDS = torch.arange(24).view(2, 12)


def parameters(model: nn.Module | Model) -> dict[str, nn.Parameter]:
    """Those that are trained, under one name in both worlds."""
    calls = {"self_attn": "attention", "mlp": "feed_forward", "lora_magnitude_vector": "lora_magnitude"}
    found = {}
    for name, one in model.named_parameters():
        if one.requires_grad:
            path = name.removeprefix("base_model.model.").removesuffix(".weight").removesuffix(".default")
            path = path.removeprefix("model.").replace("_proj", "")
            found[".".join(calls.get(part, part) for part in path.split("."))] = one
    return found


@pytest.mark.parametrize("kind", ["llama", "phi"])
def test_logits_and_gradients_are_those_of_peft(tmp_path: Path, kind: str) -> None:
    """A family of `decoder`, and a class of `hf` whose linears have biases."""
    folder, plugins = tmp_path / "hf", () if kind == "llama" else ("hf",)
    if kind == "llama":
        write(folder, "")
    else:
        config = transformers.AutoConfig.for_model(kind, **{**hf_models.MODELS[kind], "vocab_size": 300})
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, one in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(one, 0, 0.3)
        model.save_pretrained(folder)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    linears = [name for name, one in theirs.named_modules() if isinstance(one, nn.Linear) and "layers." in name]
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=4, lora_alpha=8, target_modules=linears, use_dora=True))
    _, model = started(folder, "lora.rank=4", "lora.alpha=8.0", "lora.dora=true", plugins=plugins)
    own, other = parameters(model), parameters(theirs)
    assert own.keys() == other.keys()
    with torch.no_grad():
        for name, one in other.items():
            if name.endswith("lora_magnitude"):
                begin = one.clone()
                one.mul_(1 + 0.2 * torch.randn(one.shape))
                own[name].copy_(one - begin)
            else:
                own[name].copy_(one.normal_(0, 0.2))
    found, expected = logits(model, IDS), theirs(IDS).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    for one in (found, expected):
        nn.functional.cross_entropy(one.flatten(0, 1), (IDS.flatten() + 1) % 50).backward()
    for name, one in other.items():
        torch.testing.assert_close(own[name].grad, one.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_peft_and_an_export_have_the_logits_of_the_run(tmp_path: Path) -> None:
    settings = ("lora.rank=4", "lora.dora=true", "lora.modules=['*.attention.*', 'layers.1.*.down', 'head']")
    run = trained(tmp_path, *settings, "adamw.lr=0.02")
    export_adapter(run, tmp_path / "adapter")
    export_checkpoint(run, tmp_path / "out")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", autocast_adapter_dtype=False)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    opened = open_model(run, text=False).model
    gains = [one for name, one in opened.named_parameters() if name.endswith("lora_magnitude")]
    assert len(gains) == 2 * 4 + 2
    assert all(one.abs().max() > 1e-3 for one in gains)
    with torch.no_grad():
        found = logits(opened, IDS)
        torch.testing.assert_close(loaded(IDS).logits, found, rtol=0, atol=1e-6)
        torch.testing.assert_close(merged(IDS).logits, found, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        ("", ("lora.modules=['embedding']",), r"lora\.dora: 'embedding' is an embedding, and only linears"),
        ("mixtral", (), r"lora\.dora: 'layers\.0\.feed_forward\.routed\.experts\.gate' is a stack of experts"),
    ],
)
def test_what_has_no_magnitude_is_refused(tmp_path: Path, model: str, settings: tuple[str, ...], says: str) -> None:
    write(tmp_path / "hf", model)
    with pytest.raises(ConfigError, match=says):
        started(tmp_path / "hf", "lora.dora=true", *settings)
