"""Updates of `lora` that are not trained: adapters beneath the run's own, and what PiSSA begins with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_cli import forge
from forge_train import ConfigError
from forge_train.mesh.tensors import local
from forge_train_kit.model import updated_already, without_updates
from forge_train_plugins.tuning._lora.fixed import begin
from forge_train_plugins.tuning._lora.targets import Target
from forge_train_tools.offline.adapters import export_adapter
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.offline.opening import open_model
from forge_train_tools.testing import run_forge
from lora_models import logits, started, trained, write

peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
pytestmark = pytest.mark.unit
IDS = torch.arange(32).view(2, 16)
PISSA = ("lora.start=pissa", "lora.rank=4", "lora.alpha=6.0")


def base(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def pushed(model: nn.Module, out: Tensor) -> dict[str, Tensor]:
    """Gradients of a loss of these logits."""
    nn.functional.cross_entropy(out.flatten(0, 1), (IDS.flatten() + 1) % 50).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def begun(folder: Path, *settings: str, plugins: tuple[str, ...] = ()) -> Any:
    """A model before its first step."""
    _, model = started(folder, *settings, plugins=plugins)
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            begin(Target(name, module), len(module.lora_A), module.lora_scales["weight"])
    return model.parts[0]


@pytest.mark.parametrize("rslora", [False, True])
def test_pissa_is_that_of_peft(tmp_path: Path, rslora: bool) -> None:
    write(tmp_path / "hf", "")
    ends = ["q_proj", "o_proj", "down_proj"]
    made = peft.LoraConfig(r=4, lora_alpha=6, target_modules=ends, init_lora_weights="pissa", use_rslora=rslora)
    theirs = peft.get_peft_model(base(tmp_path / "hf"), made)
    modules = "lora.modules=['*.q', '*.o', '*.down']"
    mine = begun(tmp_path / "hf", *PISSA, modules, f"lora.rslora={str(rslora).lower()}")
    torch.testing.assert_close(logits_of(mine), base(tmp_path / "hf")(IDS).logits, rtol=0, atol=2e-5)
    pairs = {}
    for name, one in mine.named_modules():
        if hasattr(one, "lora_A"):
            own = name.replace("attention", "self_attn").replace("feed_forward", "mlp")
            other = theirs.get_submodule(f"base_model.model.model.{own}_proj")
            a, b = other.lora_A["default"].weight, other.lora_B["default"].weight
            torch.testing.assert_close(one.lora_B @ one.lora_A, b @ a, rtol=0, atol=1e-5)
            with torch.no_grad():  # singular vectors may have the other sign
                for mine_is, theirs_is in ((one.lora_A, a), (one.lora_B, b)):
                    mine_is.copy_(theirs_is)
                one.lora_A_start.copy_(a)
                one.lora_B_start.copy_(b)
                for own_factor, other_factor in ((one.lora_A, a), (one.lora_B, b)):
                    moved = torch.randn(a.shape if own_factor is one.lora_A else b.shape) * 0.1
                    own_factor.add_(moved)
                    other_factor.add_(moved)
            pairs[name] = (one, other)
    assert len(pairs) == 6
    found, expected = logits_of(mine), theirs(IDS).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    pushed(mine, found)
    pushed(theirs, expected)
    for name, (one, other) in pairs.items():
        for factor in ("lora_A", "lora_B"):
            grad, right = getattr(one, factor).grad, getattr(other, factor)["default"].weight.grad
            assert (grad - right).norm() <= 1e-5 * right.norm(), (name, factor)


def logits_of(part: Any) -> Tensor:
    found: Tensor = part.head(part(IDS))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("form", [(), ("lora.base=nf4", "lora.base_block=16"), ("lora.rslora=true",)])
def test_a_run_that_begins_so_is_exported_and_opened(tmp_path: Path, form: tuple[str, ...]) -> None:
    run = trained(tmp_path, *PISSA, *form, "adamw.lr=0.01")
    export_adapter(run, tmp_path / "adapter")
    export_checkpoint(run, tmp_path / "out")
    opened = open_model(run, text=False).model
    assert len(updated_already(opened)) == 14
    firsts = [one for name, one in opened.named_parameters() if name.endswith("_start")]
    assert len(firsts) == 2 * 14
    assert all(one.any() for one in firsts)
    with torch.no_grad():
        found = logits(opened, IDS)
        merged = base(tmp_path / "out")(IDS).logits
        torch.testing.assert_close(merged, found, rtol=0, atol=2e-6)
        with without_updates(opened.parts[0]):
            plain = logits(opened, IDS)
        assert (plain - found).abs().max() > 1e-3
        if form[:1] == ("lora.base=nf4",):  # the folder's base is in codes too
            return
        torch.testing.assert_close(plain, base(tmp_path / "hf")(IDS).logits, rtol=0, atol=2e-6)
        loaded = peft.PeftModel.from_pretrained(base(tmp_path / "hf"), tmp_path / "adapter")
        torch.testing.assert_close(loaded(IDS).logits, found, rtol=0, atol=2e-6)


def adapter(folder: Path, name: str, model: str, **config: Any) -> str:
    """A folder of PEFT with random updates."""
    made = peft.get_peft_model(base(folder / "hf"), peft.LoraConfig(lora_alpha=5, **config))
    with torch.no_grad():
        for one_name, one in made.named_parameters():
            if "lora_" in one_name:
                one.normal_(0, 0.2)
    made.save_pretrained(folder / name)
    return str(folder / name)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["", "qwen3_moe"])
def test_adapters_beneath_stay_and_are_exported(tmp_path: Path, model: str) -> None:
    """Two of them, of other ranks; with updates off, they are still on."""
    (tmp_path / "first").mkdir()
    write(tmp_path / "hf", model)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if model else None
    named = ["q_proj", "v_proj"] if model else ["q_proj", "down_proj", "embed_tokens", "lm_head"]
    one = adapter(tmp_path, "a", model, r=3, target_modules=named, target_parameters=experts)
    two = adapter(tmp_path, "b", model, r=2, target_modules=["q_proj"])
    modules = "['*.q', '*.v', '*.experts.*']" if model else "['*.q', '*.down', 'embedding', 'head']"
    settings = (f"lora.beneath=['{one}', '{two}']", f"lora.modules={modules}", "lora.rank=4", "lora.alpha=6.0")
    run = trained(tmp_path, *settings, "adamw.lr=0.02", model=model)
    opened = open_model(run, text=False).model
    both = base(tmp_path / "hf")
    with torch.no_grad():
        weights = dict(both.named_parameters())
        for path in (one, two):
            alone = peft.PeftModel.from_pretrained(base(tmp_path / "hf"), path).merge_and_unload()
            plain = dict(base(tmp_path / "hf").named_parameters())
            for name, weight in alone.named_parameters():
                weights[name].add_(weight - plain[name])
        with without_updates(opened.parts[0]):
            torch.testing.assert_close(logits(opened, IDS), both(IDS).logits, rtol=0, atol=5e-6)
        found = logits(opened, IDS)
        assert (found - both(IDS).logits).abs().max() > 1e-2
        export_checkpoint(run, tmp_path / "out")
        torch.testing.assert_close(base(tmp_path / "out")(IDS).logits, found, rtol=0, atol=5e-6)
        export_adapter(run, tmp_path / "adapter")
        loaded = peft.PeftModel.from_pretrained(base(tmp_path / "hf"), tmp_path / "adapter")
        torch.testing.assert_close(loaded(IDS).logits, found, rtol=0, atol=5e-6)
    trained_now = {name for name, one in opened.named_parameters() if one.requires_grad}
    assert not any(name.endswith("_beneath") for name in trained_now)


def test_an_exported_adapter_may_have_more_rows_than_its_weight(tmp_path: Path) -> None:
    """16 of its own, and 24 of one beneath, on 32 rows of `k`."""
    write(tmp_path / "hf", "")
    path = adapter(tmp_path, "a", "", r=24, target_modules=["k_proj"])
    run = trained(tmp_path, f"lora.beneath=['{path}']", "lora.rank=16", "lora.modules=['*.k']")
    export_adapter(run, tmp_path / "adapter")
    _, model = started(tmp_path / "hf", f"lora.adapter={tmp_path / 'adapter'}")
    opened = open_model(run, text=False).model
    torch.testing.assert_close(logits(model, IDS), logits(opened, IDS), rtol=0, atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [("lora.start=pissa",), ("lora.start=pissa", "lora.base=nf4", "lora.base_block=16"), ("lora.beneath=['{a}']",)],
)
def test_a_plan_knows_their_memory(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """Nothing that has no values is looked at, and nothing is computed of it."""
    write(tmp_path / "hf", "")
    path = adapter(tmp_path, "a", "", r=24, target_modules=["k_proj"])
    words = ["train.steps=3", "checkpoint.only=[]", "run.device=cpu", *(one.replace("{a}", path) for one in settings)]
    asked = [word for one in words for word in ("-s", one)]
    planned = forge("plan", "--from", tmp_path / "hf", "-p", "lora,synthetic", *asked, "--json")
    assert planned.code == 0, planned.err
    assert planned.json["memory"]["activations"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["", "qwen3_moe"])
def test_steps_in_bf16_are_near_those_in_fp32(tmp_path: Path, model: str) -> None:
    """Modules read narrow copies of their parameters there."""
    (tmp_path / "first").mkdir()
    write(tmp_path / "hf", model)
    named = ["q_proj"] if model else ["q_proj", "embed_tokens"]
    experts = ["mlp.experts.gate_up_proj"] if model else None
    path = adapter(tmp_path, "a", model, r=3, target_modules=named, target_parameters=experts)
    modules = "['*.q', '*.experts.*']" if model else "['*.q', 'embedding']"
    cases = [(f"lora.beneath=['{path}']", f"lora.modules={modules}"), ("lora.start=pissa", "lora.modules=['*.q']")]
    for number, case in enumerate(cases):
        both = []
        for precision in ("fp32", "bf16"):
            folder = tmp_path / f"{number}{precision}"
            slow = ("adamw.lr=1e-3", "log.every=1")
            run = trained(folder, *case, *slow, f"train.precision={precision}", model=model)
            lines = (run / "metrics.jsonl").read_text().splitlines()
            both.append([json.loads(line)["loss"] for line in lines])
        assert both[0] == pytest.approx(both[1], rel=1e-2)
        assert len(both[0]) == 3


def test_a_new_run_on_an_adapter_is_its_own_reference(tmp_path: Path) -> None:
    """The updates are zero where the adapter lies beneath, and not where it is continued."""
    write(tmp_path / "hf", "")
    path = adapter(tmp_path, "a", "", r=3, target_modules=["q_proj"])
    _, beneath = started(tmp_path / "hf", f"lora.beneath=['{path}']")
    _, continued = started(tmp_path / "hf", f"lora.adapter={path}")
    assert not updated_already(beneath)
    assert updated_already(continued) == ["layers.0.attention.q", "layers.1.attention.q"]
    assert not updated_already(begun(tmp_path / "hf", *PISSA))


@pytest.mark.slow
def test_a_run_is_resumed_to_the_bit(tmp_path: Path) -> None:
    start = run_forge(steps=2, folder=tmp_path, name="base").run
    config = {"train.init_from": str(start), "lora.start": "pissa", "lora.rank": 4}
    straight = run_forge(("lora",), config, folder=tmp_path, name="straight", steps=4)
    run_forge(("lora",), config, folder=tmp_path, name="stopped", steps=4, stop_at=2)
    resumed = run_forge(("lora",), config, folder=tmp_path, name="stopped", steps=4)
    assert resumed.numbers == straight.numbers
    for name, one in straight.model.named_parameters():
        assert torch.equal(local(one), local(dict(resumed.model.named_parameters())[name])), name
    again = {"train.init_from": str(straight.run), "train.init_missing": [], "lora.start": "pissa", "lora.rank": 4}
    further = run_forge(("lora",), {**again, "checkpoint.only": []}, folder=tmp_path, name="further", steps=1)
    before = dict(straight.model.named_parameters())
    for name, one in further.model.named_parameters():
        assert not name.endswith("_start") or torch.equal(local(one), local(before[name])), name


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("lora.start=pissa", "lora.modules=['embedding']"), r"lora\.start: 'embedding' is an embedding, and only"),
        (("lora.start=pissa", "lora.dora=true"), r"lora\.start: is not possible with lora\.dora"),
        (("lora.beneath=['{a}']", "lora.dora=true"), r"lora\.beneath: is not possible with lora\.dora"),
        (
            ("lora.beneath=['{a}']", "lora.modules=['*.v']"),
            r"lora\.beneath: .* updates model\.layers\.0\.self_",
        ),
        (("lora.beneath=['nowhere']",), r"lora\.beneath: there is no nowhere/adapter_config\.json"),
        (("lora.beneath=['{d}']",), r"lora\.beneath: .*d has magnitudes \(DoRA\), which only lora\.adapter continues"),
        (("lora.start=pissa", "lora.adapter={a}"), r"lora\.start: has no effect with lora\.adapter"),
    ],
)
def test_mistakes(tmp_path: Path, settings: tuple[str, ...], says: str) -> None:
    write(tmp_path / "hf", "")
    paths = {"{a}": adapter(tmp_path, "a", "", r=3, target_modules=["q_proj"])}
    paths["{d}"] = adapter(tmp_path, "d", "", r=3, target_modules=["q_proj"], use_dora=True)
    for name, path in paths.items():
        settings = tuple(one.replace(name, path) for one in settings)
    with pytest.raises(ConfigError, match=says):
        started(tmp_path / "hf", *settings)


def test_a_stack_does_not_begin_so(tmp_path: Path) -> None:
    write(tmp_path / "hf", "mixtral")
    with pytest.raises(ConfigError, match=r"lora\.start: 'layers\.0\.feed_forward\..*' is a stack of experts"):
        started(tmp_path / "hf", "lora.start=pissa")
