"""Folders of PEFT that the plugin `lora` continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from forge_train import ConfigError
from forge_train_tools.offline.adapters import export_adapter
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.offline.opening import open_model
from lora_models import logits, started, trained, write

peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
pytestmark = pytest.mark.unit


@pytest.mark.slow
def test_an_adapter_of_peft_is_continued(tmp_path: Path) -> None:
    """It begins with the stored factors, and is written again as it was."""
    first = trained(tmp_path / "one", "lora.rank=4", "lora.alpha=6.0", "lora.modules=['*.q', '*.down', 'embedding']")
    export_adapter(first, tmp_path / "adapter")
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "adapter").iterdir()}
    assert len(modes) == 1  # whoever may read one file may read the other
    folder = f"lora.adapter={tmp_path / 'adapter'}"
    second = trained(tmp_path / "two", folder, "train.steps=1", "adamw.lr=1e-30", "adamw.weight_decay=0")
    export_adapter(second, tmp_path / "again")
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(one, after[name]) for name, one in before.items())
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("adapter", "again")]
    assert configs[0] | {"base_model_name_or_path": ""} == configs[1] | {"base_model_name_or_path": ""}
    for change, says in (
        ({"use_dora": True}, r"lora\.dora: 'embedding' is an embedding, and only linears"),
        ({"modules_to_save": ["lm_head"]}, r"has no tensors of 'lm_head', which adapter_config\.json names in"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which lora can't continue"),
        ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens is \[1\], which lora can't continue"),
        ({"a_key_of_tomorrow": {"a": 1}}, r"a_key_of_tomorrow is \{'a': 1\}, which lora can't continue"),
        ({"rank_pattern": {"q_proj": 2}}, r"holds 4 rows for '.*\.q', and its adapter_config\.json says 2"),
        ({"r": 3}, r"holds 4 rows for 'embedding', and its adapter_config\.json says 3"),
    ):
        (tmp_path / "again" / "adapter_config.json").write_text(json.dumps(configs[1] | change))
        with pytest.raises(ConfigError, match=says):
            started(tmp_path / "one" / "hf", f"lora.adapter={tmp_path / 'again'}")
    with pytest.raises(ConfigError, match=r"lora\.modules: has no effect with lora\.adapter"):
        started(tmp_path / "one" / "hf", folder, "lora.modules=['*.q']")
    for option, says in (("dora=true", "False"), ("rank=8", "4"), ("alpha=8.0", "6.0"), ("rslora=true", "False")):
        with pytest.raises(
            ConfigError, match=rf"lora\.{option.partition('=')[0]}: is {says} in .*, and can't be changed"
        ):
            started(tmp_path / "one" / "hf", folder, f"lora.{option}")


def test_files_that_are_cut_off_are_named(tmp_path: Path) -> None:
    write(tmp_path / "hf", "")
    made = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), peft.LoraConfig(r=2))
    made.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"lora\.adapter: .*adapter_model\.safetensors is no whole file: .*"):
        started(tmp_path / "hf", f"lora.adapter={tmp_path / 'adapter'}")


@pytest.mark.slow
def test_an_adapter_that_is_gone_is_told_as_such(tmp_path: Path) -> None:
    export_adapter(trained(tmp_path / "one"), tmp_path / "adapter")
    second = trained(tmp_path / "two", f"lora.adapter={tmp_path / 'adapter'}")
    (tmp_path / "adapter").rename(tmp_path / "moved")
    with pytest.raises(
        ConfigError, match=r"step-00000003 can't be opened:\nlora\.adapter: there is no .*adapter_config"
    ):
        open_model(second, text=False)
    open_model(second, text=False, settings=(f"lora.adapter={tmp_path / 'moved'}",))


def test_ranks_and_alphas_by_pattern_of_peft_are_continued(tmp_path: Path) -> None:
    """Patterns as somebody writes them, and a magnitude of each row."""
    write(tmp_path / "hf", "")
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ends = ["q_proj", "down_proj", "up_proj"]
    patterns: Any = {"rank_pattern": {r"layers\.1\..*q_proj": 2, "down_proj": 3}, "alpha_pattern": {"up_proj": 5}}
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=ends, use_dora=True, **patterns)
    theirs = peft.get_peft_model(theirs, config)
    with torch.no_grad():
        for name, one in theirs.named_parameters():
            if "lora_" in name:
                one.mul_(1 + 0.2 * torch.randn(one.shape)) if "magnitude" in name else one.normal_(0, 0.2)
    theirs.save_pretrained(tmp_path / "adapter")
    _, model = started(tmp_path / "hf", f"lora.adapter={tmp_path / 'adapter'}")
    found = {len(one) for name, one in model.named_parameters() if name.endswith("lora_A")}
    assert found == {2, 3, 4}
    ids = torch.arange(24).view(2, 12)
    torch.testing.assert_close(logits(model, ids), theirs(ids).logits, rtol=0, atol=2e-6)
    for one in (logits(model, ids), theirs(ids).logits):
        nn.functional.cross_entropy(one.flatten(0, 1), (ids.flatten() + 1) % 50).backward()
    norm = nn.utils.get_total_norm
    own = norm([one.grad for one in model.parameters() if one.grad is not None])
    torch.testing.assert_close(own, norm([one.grad for one in theirs.parameters() if one.grad is not None]))


@pytest.mark.slow
def test_an_adapter_with_magnitudes_is_written_again_as_it_was(tmp_path: Path) -> None:
    settings = ("lora.rank=4", "lora.dora=true", "lora.groups=[{match='*.q', rank=2, alpha=3.0}]")
    first = trained(tmp_path / "one", *settings)
    export_adapter(first, tmp_path / "adapter")
    folder = f"lora.adapter={tmp_path / 'adapter'}"
    second = trained(tmp_path / "two", folder, "train.steps=1", "adamw.lr=1e-30", "adamw.weight_decay=0")
    export_adapter(second, tmp_path / "again")
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(one, after[name]) for name, one in before.items())
    opened = [open_model(one, text=False).model for one in (first, second)]
    ids = torch.arange(24).view(2, 12)
    torch.testing.assert_close(*(logits(one, ids) for one in opened), rtol=0, atol=1e-6)
    export_checkpoint(first, tmp_path / "merged one")
    export_checkpoint(second, tmp_path / "merged two")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("merged one", "merged two"))
    for name, one in before.items():
        torch.testing.assert_close(after[name], one, rtol=0, atol=1e-6)


def test_an_embedding_of_peft_is_continued(tmp_path: Path) -> None:
    """Beside its update, PEFT stores the base's weights."""
    write(tmp_path / "hf", "")
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head", "embed_tokens"]))
    for name, one in theirs.named_parameters():
        if "lora_" in name:
            nn.init.normal_(one, 0, 0.2)
    theirs.save_pretrained(tmp_path / "adapter")
    assert any(name.endswith("base_layer.weight") for name in load_file(tmp_path / "adapter/adapter_model.safetensors"))
    _, model = started(tmp_path / "hf", f"lora.adapter={tmp_path / 'adapter'}")
    ids = torch.arange(24).view(2, 12)
    torch.testing.assert_close(logits(model, ids), theirs(ids).logits, rtol=0, atol=2e-5)
