"""`lora.base`: a base in 4- or 8-bit codes. What is trained, saved and exported is that of its decoded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forge_train import ConfigError, Model
from forge_train.checkpoint.checkpoint import shapes
from forge_train.mesh.tensors import held_bytes, local
from forge_train_kit.model.block_codes import BlockTensor
from forge_train_kit.model.block_format import BlockFormat
from forge_train_plugins.tuning.lora import LoRA
from forge_train_tools.offline.adapters import export_adapter
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.offline.opening import open_model
from forge_train_tools.testing import run_forge
from lora_models import logits, started, trained, write

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.unit
IDS = torch.arange(24).view(2, 12)
NF4 = ("lora.base=nf4", "lora.base_block=16", "lora.rank=4")
FORMS = [NF4, (*NF4, "lora.base_double=true"), ("lora.base=int8", "lora.base_block=8", "lora.rank=4")]


def coded(model: Model) -> dict[str, BlockTensor]:
    return {name: one for name, one in model.named_parameters() if isinstance(one, BlockTensor)}


def gradients(model: Model) -> dict[str, Tensor]:
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("form", FORMS, ids=["nf4", "nf4, double", "int8"])
@pytest.mark.parametrize(("model", "linears"), [("", 14), ("mixtral", 8 + 6)])
def test_gradients_are_those_of_lora_on_the_decoded_base(
    tmp_path: Path, form: tuple[str, ...], model: str, linears: int
) -> None:
    """Linears of attention and of feed-forward blocks, and stacks of experts."""
    folder = tmp_path / "hf"
    write(folder, model)
    _, quantised = started(folder, *form)
    _, plain = started(folder, "lora.rank=4")
    weights = coded(quantised)
    assert len(weights) == linears
    own, other = dict(quantised.named_parameters()), dict(plain.named_parameters())
    assert own.keys() == other.keys()
    with torch.no_grad():
        for name, one in other.items():
            if name in weights:
                assert not torch.equal(one, weights[name].plain())
                one.copy_(weights[name].plain())
            elif "lora_B" in name:
                one.normal_(0, 0.2)
                own[name].copy_(one)
    found, expected = logits(quantised, IDS), logits(plain, IDS)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for one in (found, expected):
        torch.nn.functional.cross_entropy(one.flatten(0, 1), (IDS.flatten() + 1) % 50).backward()
    grads = gradients(plain)
    assert grads.keys() == gradients(quantised).keys()
    assert all("lora_" in name for name in grads)
    for name, one in grads.items():
        torch.testing.assert_close(gradients(quantised)[name], one, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("form", [NF4, FORMS[1]], ids=["nf4", "nf4, double"])
def test_a_run_saves_its_updates_alone_and_its_export_has_its_logits(tmp_path: Path, form: tuple[str, ...]) -> None:
    run = trained(tmp_path, *form)
    held = [name for name in shapes(run / "checkpoints" / "step-00000003") if name.startswith("model.")]
    assert held
    assert all("lora_" in name for name in held)
    opened = open_model(run, text=False).model
    weights = coded(opened)
    assert len(weights) == 14
    export_checkpoint(run, tmp_path / "out")
    export_adapter(run, tmp_path / "adapter")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        found = logits(opened, IDS)
        torch.testing.assert_close(merged(IDS).logits, found, rtol=0, atol=1e-6)
        assert (base(IDS).logits - found).abs().max() > 1e-2


def test_merged_weights_of_a_base_in_bf16_are_rounded_once(tmp_path: Path) -> None:
    run = trained(tmp_path, *NF4, "lora.modules=['*.o']", dtype=torch.bfloat16)
    export_checkpoint(run, tmp_path / "out")
    (part,) = open_model(run, text=False).model.parts
    layer: Any = part.get_submodule("layers.0.attention.o")
    update = layer.lora_B @ layer.lora_A * layer.lora_scales["weight"]
    merged = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"]
    assert torch.equal(merged, (layer.weight.plain() + update).bfloat16())


def test_rows_with_magnitudes_too(tmp_path: Path) -> None:
    """Magnitudes begin as lengths of the decoded rows."""
    run = trained(tmp_path, *NF4, "lora.dora=true", "adamw.lr=0.02")  # at 0.05, logits differ by more in rounding
    export_checkpoint(run, tmp_path / "out")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        found = logits(open_model(run, text=False).model, IDS)
        torch.testing.assert_close(merged(IDS).logits, found, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_resumed_it_is_the_run_that_went_through(tmp_path: Path) -> None:
    base = run_forge(steps=2, folder=tmp_path, name="base").run
    config = {"train.init_from": str(base), "lora.base": "nf4", "lora.base_block": 8}
    straight = run_forge(("lora",), config, folder=tmp_path, name="straight", steps=4)
    assert coded(straight.model)
    run_forge(("lora",), config, folder=tmp_path, name="stopped", steps=4, stop_at=2)
    resumed = run_forge(("lora",), config, folder=tmp_path, name="stopped", steps=4)
    assert resumed.numbers == straight.numbers
    for name, one in straight.model.named_parameters():
        assert torch.equal(local(one), local(dict(resumed.model.named_parameters())[name])), name
    with pytest.raises(ConfigError, match=r"lora\.base"):
        run_forge(("lora",), {**config, "lora.base": "int8"}, folder=tmp_path, name="stopped", steps=6)


def test_codes_of_8_bits_come_in_blocks_of_any_size() -> None:
    assert not list(LoRA(LoRA.Config(base="int8", base_block=7)).check_config())
    values = torch.randn(3, 21, generator=torch.Generator().manual_seed(0))
    found = BlockTensor.of(values, BlockFormat("int8", 7)).plain()
    assert torch.allclose(found, values, rtol=0, atol=float(values.abs().max()) / 254 * 1.001)


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
def test_experts_are_read_from_a_folder_that_holds_them_one_by_one(tmp_path: Path, model: str) -> None:
    """Straight from it, codes are those of its weights."""
    write(tmp_path / "hf", model)
    file = tmp_path / "hf" / "model.safetensors"
    apart = {}
    for name, one in load_file(file).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            for at, weight in enumerate(one):
                gate = weight.chunk(2)[0] if "gate_up" in name else weight
                kinds = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
                for kind, part in zip(kinds, weight.chunk(2) if "gate_up" in name else [gate], strict=True):
                    apart[f"{name.rpartition('.')[0]}.{at}.{kind}.weight"] = part.contiguous()
        else:
            apart[name] = one
    save_file(apart, file, {"format": "pt"})
    _, plain = started(tmp_path / "hf", "lora.modules=['*.experts.*']")
    _, held = started(tmp_path / "hf", "lora.modules=['*.experts.*']", "lora.base=int8", "lora.base_block=8")
    right, found = dict(plain.named_parameters()), coded(held)
    assert len(found) == 6
    for name, one in found.items():
        torch.testing.assert_close(local(one).plain(), right[name], rtol=0, atol=float(right[name].abs().max()) / 127)


def test_bytes_of_the_base(tmp_path: Path) -> None:
    write(tmp_path / "hf", "")
    _, model = started(tmp_path / "hf", *NF4)
    for weight in coded(model).values():
        assert held_bytes([weight]) == weight.numel() // 2 + weight.numel() // 16 * 4


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            ("lora.base=nf4", "lora.base_block=24"),
            r"lora\.base_block: 24 does not divide the \d+ columns that a rank has of 'layers\.0\.",
        ),
        (("lora.base=nf4", "lora.base_block=7"), r"lora\.base_block: must be even with nf4: two codes share"),
        (("lora.base=int8", "lora.base_block=7"), r"lora\.base_block: 7 does not divide the \d+ columns that a rank"),
        (("lora.base_block=32",), r"lora\.base_block: has no effect without lora\.base"),
        (("lora.base_double=true",), r"lora\.base_double: has no effect without lora\.base"),
        (("lora.base=nf5",), r"lora\.base: .*nf4"),
        ((*NF4, "lora.modules=['*.q']", "lora.tune=['*.q']"), r"lora\.tune: 'layers\.0\.attention\.q' has an update"),
    ],
)
def test_mistakes(tmp_path: Path, settings: tuple[str, ...], says: str) -> None:
    write(tmp_path / "hf", "")
    with pytest.raises(ConfigError, match=says):
        started(tmp_path / "hf", *settings)
