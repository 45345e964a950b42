"""The plugin `lora` on stacks of experts in one process: its gradients are PEFT's, and so are its folders."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from forge_train import ConfigError
from forge_train_plugins.experts._moe.experts import Experts
from forge_train_plugins.tuning._lora.adapters import Adapters
from forge_train_plugins.tuning._lora.layers import LowRankStacks
from forge_train_plugins.tuning.lora import LoRA
from forge_train_tools.offline.adapters import export_adapter
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.offline.opening import open_model
from lora_models import logits, started, trained, write

peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
pytestmark = pytest.mark.unit
IDS = torch.arange(32).view(2, 16)
STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def loaded(folder: Path, adapter: Path) -> Any:
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return peft.PeftModel.from_pretrained(base, adapter, autocast_adapter_dtype=False, is_trainable=True)


def gradients(model: nn.Module, out: Tensor) -> dict[str, Tensor]:
    nn.functional.cross_entropy(out.flatten(0, 1), (IDS.flatten() + 1) % 50).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe"])
def test_peft_has_the_same_logits_and_gradients_as_the_run_and_its_export(tmp_path: Path, model: str) -> None:
    groups = "lora.groups=[{match = '*.up', rank = 2, alpha = 5.0}, {match = '*.down', rank = 8}]"
    run = trained(tmp_path, "lora.rank=4", "lora.rslora=true", "adamw.lr=0.005", groups, model=model)
    done = export_adapter(run, tmp_path / "adapter")
    theirs = loaded(tmp_path / "hf", tmp_path / "adapter")
    held = {name: one for name, one in theirs.named_parameters() if one.requires_grad}
    assert sum(one.numel() for one in held.values()) == done.parameters
    opened = open_model(run, text=False).model
    (ours,) = opened.parts
    for name, one in ours.named_parameters():
        one.requires_grad_("lora_" in name)
    found, expected = logits(opened, IDS), theirs(IDS).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    own, other = gradients(ours, found), gradients(theirs, expected)
    at = "layers.1.feed_forward.routed.experts"
    gate_up, down = (f"base_model.model.model.layers.1.mlp.experts{end}" for end in (".base_layer", ""))
    first, last = (f".lora_{factor}.default.weight" for factor in "AB")
    count = own[f"{at}.gate_lora_A"].shape[0]
    a = torch.cat([own[f"{at}.gate_lora_A"], own[f"{at}.up_lora_A"]], 1).flatten(0, 1)
    b = other[gate_up + last].unflatten(1, (-1, count)).permute(2, 0, 1)
    scale = (5 / 2**0.5) / (32 / 4**0.5)  # of up over gate: `B` of the fused update has it
    pairs = {
        "A of gate and up": (a, other[gate_up + first].clone()),
        "B of gate": (own[f"{at}.gate_lora_B"], b[:, : b.shape[1] // 2, :4]),
        "B of up": (own[f"{at}.up_lora_B"], b[:, b.shape[1] // 2 :, 4:] * scale),
        "A of down": (own[f"{at}.down_lora_A"].flatten(0, 1), other[down + first]),
        "B of down": (own[f"{at}.down_lora_B"].permute(1, 2, 0).flatten(1), other[down + last]),
    }
    for name, (one, another) in pairs.items():
        assert one.abs().max() > 1e-5
        torch.testing.assert_close(one, another, rtol=1e-4, atol=1e-6, msg=name)
    export_checkpoint(run, tmp_path / "out")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(merged(IDS).logits, found, rtol=0, atol=1e-6)
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(IDS).logits
    assert (before - found).abs().max() > 0.1


def test_an_export_whose_update_peft_would_lose_is_refused(tmp_path: Path) -> None:
    """It converts the names of linears of single experts, which a dense block has too."""
    run = trained(tmp_path, "lora.rank=2", "train.steps=1", model="dense_first")
    with pytest.raises(ConfigError, match=r"peft takes 'gate_proj' for .*'model\.layers\.0\.mlp\.gate_proj'"):
        export_adapter(run, tmp_path / "adapter")


@pytest.mark.slow
def test_an_adapter_of_forge_is_continued(tmp_path: Path) -> None:
    """It is written again as it was: gate and up have factors of their own."""
    settings = ("lora.rank=4", "lora.alpha=8.0", "lora.modules=['*.experts.*', '*.q']")
    export_adapter(trained(tmp_path / "one", *settings, model="mixtral"), tmp_path / "adapter")
    still = ("train.steps=1", "adamw.lr=1e-30", "adamw.weight_decay=0", f"lora.adapter={tmp_path / 'adapter'}")
    export_adapter(trained(tmp_path / "two", *still, model="mixtral"), tmp_path / "again")
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(one, after[name]) for name, one in before.items())
    file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"rank_pattern": {"q_proj": 8}}))
    with pytest.raises(ConfigError, match=r"holds 4 rows for '.*\.q', and its adapter_config\.json says 8"):
        started(tmp_path / "one" / "hf", f"lora.adapter={tmp_path / 'adapter'}")


@pytest.mark.slow
@pytest.mark.parametrize("groups", ["[]", "[{match='*.up', rank=2, alpha=3.0}]", "[{match='*.up', alpha=3.0}]"])
def test_stacks_of_other_sizes_are_continued(tmp_path: Path, groups: str) -> None:
    """Where gate and up have other ranks or scales, each has all columns, and the same function."""
    settings = ("lora.rank=4", "lora.alpha=8.0", "lora.modules=['*.experts.*']", f"lora.groups={groups}")
    first = trained(tmp_path / "one", *settings, model="mixtral")
    export_adapter(first, tmp_path / "adapter")
    _, model = started(tmp_path / "one" / "hf", f"lora.adapter={tmp_path / 'adapter'}")
    before = logits(open_model(first, text=False).model, IDS)
    torch.testing.assert_close(logits(model, IDS), before, rtol=0, atol=2e-6)


def test_an_adapter_of_peft_is_continued(tmp_path: Path) -> None:
    """There, gate and up have a common `A`."""
    write(tmp_path / "hf", "qwen3_moe")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["v_proj"], target_parameters=[*STACKS])
    theirs = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, one in theirs.named_parameters():
            if "lora_" in name:
                one.normal_(0, 0.3)
    theirs.save_pretrained(tmp_path / "adapter")
    _, model = started(tmp_path / "hf", f"lora.adapter={tmp_path / 'adapter'}")
    torch.testing.assert_close(logits(model, IDS), theirs(IDS).logits, rtol=0, atol=2e-5)


def test_a_class_of_transformers_has_the_logits_of_peft(tmp_path: Path) -> None:
    """Its experts compute with updated weights."""
    write(tmp_path / "hf", "qwen3_moe")
    _, model = started(tmp_path / "hf", "lora.rank=4", "lora.alpha=8.0", plugins=("hf",))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    linears = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=linears, target_parameters=[*STACKS])
    theirs = peft.get_peft_model(base, config)
    ours = {name.replace("experts.", ""): one for name, one in model.named_parameters() if one.requires_grad}
    held = {name: one for name, one in theirs.named_parameters() if one.requires_grad}
    assert len(ours) == len(held)
    with torch.no_grad():
        for name, one in held.items():
            one.normal_(0, 0.3)
            path = name.removeprefix("base_model.model.").removesuffix(".default.weight")
            if "experts" not in path:
                ours[path].copy_(one)
                continue
            stack, count = "gate_up_proj" if "base_layer" in path else "down_proj", 8
            ours[path.replace("experts.", "").replace("base_layer.", "").replace(".lora", f".{stack}_lora")].copy_(
                one.unflatten(0, (count, -1)) if "lora_A" in path else one.unflatten(1, (-1, count)).permute(2, 0, 1)
            )
    torch.testing.assert_close(logits(model, IDS), theirs(IDS).logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("lora.dropout=0.1", r"lora\.dropout: 'layers\.0\.feed_forward\.routed\.experts\.gate' is a stack of experts"),
        ("lora.rank=33", r"lora\.rank: 33 is above a dimension of .*lora\.groups"),
        ("lora.modules=['*.gat']", r"'\*\.gat' matches nothing that lora adapts\. Did you mean '\*\.gate'\?"),
    ],
)
def test_what_stacks_can_not_have_is_refused(tmp_path: Path, setting: str, says: str) -> None:
    write(tmp_path / "hf", "mixtral")
    with pytest.raises(ConfigError, match=says):
        started(tmp_path / "hf", setting)


def test_experts_whose_matrices_are_transposed_are_refused() -> None:
    job: Any = SimpleNamespace(dist=SimpleNamespace(layout=SimpleNamespace(pp=1)))
    part = nn.ModuleDict({"experts": Experts(4, 8, 8)})
    part.experts.is_transposed = True
    with pytest.raises(ConfigError, match=r"lora\.modules: 'experts\.gate' holds the matrix of each expert transposed"):
        Adapters(LoRA.Config(rank=2, modules=("*",)), job).apply(part)


def test_stacks_whose_updates_have_no_effect_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where something replaces the weights that the product is given."""
    monkeypatch.setattr(LowRankStacks, "_product", lambda self, updates: self.product)
    with pytest.raises(ConfigError, match=r"the model computes layers\.0\.feed_forward\.routed\.experts\.ga.*effect"):
        trained(tmp_path, "lora.rank=4", "lora.modules=['*.experts.*', '*.q']", model="mixtral")


@pytest.mark.parametrize("form", [(), ("lora.base=nf4", "lora.base_block=16")])
def test_experts_learn_in_bf16_too(tmp_path: Path, form: tuple[str, ...]) -> None:
    """Modules read narrow copies of their weights there: each update must still find its own."""
    grads = []
    for precision in ("fp32", "bf16"):
        settings = ("lora.rank=4", "lora.modules=['*.experts.*']", "train.steps=1", "adamw.lr=1e-30", *form)
        run = trained(tmp_path / precision, *settings, f"train.precision={precision}", model="mixtral")
        lines = (run / "metrics.jsonl").read_text().splitlines()
        grads.append(json.loads(lines[0])["grad_norm"])
    assert grads[0] > 0.01
    assert grads[1] == pytest.approx(grads[0], rel=2e-2)


def test_experts_of_transformers_round_like_gathered_weights(tmp_path: Path) -> None:
    """Where a transform gathers weights in bf16, the update is added to a narrow weight: on one process, too."""
    write(tmp_path / "hf", "qwen3_moe")
    _, model = started(tmp_path / "hf", "lora.rank=4", "train.precision=bf16", plugins=("hf",))
    with torch.no_grad():
        for name, one in model.named_parameters():
            if name.endswith("lora_B"):
                one.normal_(0, 0.3)
        found = logits(model, IDS)
        for _, one in model.named_parameters():
            one.data = one.bfloat16()
    assert torch.equal(logits(model, IDS), found)
