"""`forge generate BASE --adapter A --adapter B=0.5`: what `peft` computes with the same adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import chat_model
from forge_train import ConfigError
from forge_train.engine import train
from forge_train_cli.app import run
from forge_train_tools import generate, open_model
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore")]

IDS = list(range(3, 20))
SHORT = (
    *("train.steps=1", "train.global_batch=2", "train.sequence=16", "train.evaluate_every=0", "run.device=cpu"),
    *("adamw.lr=1e-30", "adamw.weight_decay=0"),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, the same as a checkpoint and as a run, a run of updates, and four adapters of the base."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("adapters")
    chat_model.write_model(folder / "base")
    import_checkpoint(folder / "base", folder / "checkpoint")
    for name, plugins in (("run", ()), ("updates", ("lora",))):
        (folder / "text.txt").write_text("say one two three\n" * 200, encoding="utf-8")
        request = Request(
            config=str(folder / "checkpoint" / "config.toml"),
            plugins=plugins,
            without=("console", "tensorboard"),
            set=(*SHORT, f"text.path={folder / 'text.txt'}", f"run.name={name}"),
        )
        train(resolve(request), run_dir=folder)
    stretched = {"use_dora": True, "rank_pattern": {"q_proj": 1}, "alpha_pattern": {r"layers\.0\..*": 2}}
    adapters: tuple[tuple[str, Any, dict[str, Any]], ...] = (
        ("a", "all-linear", {}),
        ("b", ["q_proj", "down_proj"], {}),
        ("c", ["q_proj", "down_proj"], stretched),
        ("d", ["q_proj"], {"modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
    )
    for number, (name, targets, more) in enumerate(adapters):
        torch.manual_seed(number)
        base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
        made = peft.get_peft_model(base, peft.LoraConfig(r=2 + number, lora_alpha=5, target_modules=targets, **more))
        with torch.no_grad():
            for one_name, one in made.named_parameters():
                if "magnitude" in one_name:
                    one.mul_(1 + 0.2 * torch.randn(one.shape))
                elif "lora_" in one_name:
                    one.normal_(std=0.3)
                elif "modules_to_save" in one_name:
                    one.add_(0.1 * torch.randn(one.shape))
        made.save_pretrained(folder / name)
    return folder


def by_peft(models: Path, factors: dict[str, float]) -> torch.Tensor:
    """Logits of the base with each adapter's change of the weights, times its factor."""
    import peft
    import transformers

    def weights(*adapter: str) -> dict[str, torch.Tensor]:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(models / "base")
        if adapter:
            model = peft.PeftModel.from_pretrained(model, models / adapter[0]).merge_and_unload()
        return dict(model.state_dict())

    base = weights()
    total = {name: one.clone() for name, one in base.items()}
    for adapter, factor in factors.items():
        for name, one in weights(adapter).items():
            total[name] += factor * (one - base[name])
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(models / "base")
    model.load_state_dict(total)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("base", ["base", "checkpoint", "run"])
@pytest.mark.parametrize(
    "factors", [{"a": 1.0}, {"a": 0.5, "b": -2.0}, {"a": 0.5, "c": 0.7}, {"d": 1.0}, {"a": 0.5, "d": 0.7}]
)
def test_logits_are_those_of_peft(models: Path, base: str, factors: dict[str, float]) -> None:
    adapters = {str(models / name): factor for name, factor in factors.items()}
    found = open_model(models / base, adapters=adapters).logits(IDS)
    plain = open_model(models / base).logits(IDS)
    wanted = by_peft(models, factors)[:, : found.shape[1]]
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-5)
    assert (found - plain).abs().max() > 0.1


def test_a_run_of_some_weights_whose_base_was_moved(models: Path, tmp_path: Path) -> None:
    """The command names its place."""
    import_checkpoint(models / "base", tmp_path / "base")
    only = (
        'freeze.parameters=["*"]',
        'freeze.but=["layers.0.*"]',
        'checkpoint.only=["layers.0.*"]',
        f"train.init_from={tmp_path / 'base'}",
    )
    request = Request(
        config=str(tmp_path / "base" / "config.toml"),
        plugins=("freeze",),
        without=("console", "tensorboard"),
        set=(*SHORT, "adamw.lr=0.01", f"text.path={models / 'text.txt'}", *only),
    )
    run_ = train(resolve(request), run_dir=tmp_path).run
    before = open_model(run_, adapters={str(models / "a"): 1.0}).logits(IDS)
    (tmp_path / "base").rename(tmp_path / "moved")
    values = {"train.init_from": tmp_path / "moved"}
    found = open_model(run_, set=values, adapters={str(models / "a"): 1.0}).logits(IDS)
    assert torch.equal(found, before)
    assert not torch.equal(found, open_model(run_, set=values).logits(IDS))


@pytest.mark.slow
def test_the_command(models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(models)

    def text(*more: str) -> str:
        assert run(["generate", "base", "--prompt", "a", "--tokens", "12", "--temperature", "0", *more]) == 0
        return capsys.readouterr().out

    plain = text()
    assert text("--adapter", "a=0") == plain
    assert text("--adapter", "a", "--adapter", "b=0.5") != plain
    told = json.loads(text("--adapter", "a", "--adapter", "b=0.5", "--json"))
    assert told["adapters"] == {"a": 1.0, "b": 0.5}
    found = generate("base", "a", tokens=12, temperature=0, adapters={"a": 1.0, "b": 0.5})
    assert found.answers[0].text == told["text"]
    Path("a").rename("a=1x")  # the folder's own name has the sign
    try:
        assert text("--adapter", "a=1x") != plain
    finally:
        Path("a=1x").rename("a")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("nowhere",), "--adapter nowhere: expected a folder of PEFT with an adapter_config.json"),
        (("checkpoint",), "Write the one of a run: forge checkpoint export checkpoint NEW --adapter"),
        (
            ("a/adapter_config.json",),
            "--adapter a/adapter_config.json: expected a folder of PEFT with an adapter_config",
        ),
        (("a=inf",), "--adapter a=inf: 'inf' is no finite number."),
        (("a=half",), "--adapter a=half: 'half' is no finite number."),
        (("a", "a=2"), "--adapter a: given twice."),
    ],
)
def test_bad_input_is_one_sentence(
    models: Path,
    given: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(models)
    more = [word for one in given for word in ("--adapter", one)]
    assert run(["generate", "base", "--tokens", "1", *more]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "train"])
@pytest.mark.parametrize(("base", "warns"), [("other", True), ("base", False), ("checkpoint", False), ("run", False)])
def test_an_adapter_of_another_base_is_told(
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    base: str,
    warns: bool,
    command: str,
) -> None:
    """Of the same shapes, so that nothing else would show it."""
    monkeypatch.chdir(models)
    if not Path("other").is_dir():
        shutil.copytree("base", "other")
    more = {"generate": [base, "--prompt", "a", "--tokens", "1"], "train": ["--from", base, "-s", "train.step=1"]}
    assert run([command, *more[command], "--adapter", "a"]) == {"generate": 0, "train": 2}[command]
    said = f"Warning: --adapter a: its adapter_config.json names the base {models / 'base'}, and this model is that of"
    assert (said in capfd.readouterr().err) == warns


def test_a_run_of_updates_is_merged_first(models: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--adapter .*: the model of .* has updates of its own \(lora\)\. Merge them"
    ):
        open_model(models / "updates", adapters={str(models / "a"): 1.0})
    export_checkpoint(models / "updates", tmp_path / "merged")
    assert open_model(tmp_path / "merged", adapters={str(models / "a"): 1.0}).logits(IDS).isfinite().all()


def test_an_adapter_of_another_model_is_refused(models: Path, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(models / "base", hidden_size=48, head_dim=12)
    other = transformers.AutoModelForCausalLM.from_config(config)
    peft.get_peft_model(other, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "other")
    with pytest.raises(
        ConfigError, match=r"updates a weight of 48 × 48, but 'layers\.0\.attention\.q' has 64 × 64: it is"
    ):
        open_model(models / "base", adapters={str(tmp_path / "other"): 1.0})


def test_adapters_with_different_chat_templates_do_not_chat(models: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        shutil.copytree(models / folder.name, folder)
        (folder / "chat_template.jinja").write_text(f"{folder.name}: {{{{ messages[0].content }}}}")
    opened = open_model(models / "base", adapters=dict.fromkeys(map(str, folders), 1.0))
    with pytest.raises(ConfigError, match=r"chat: .*a and .*b have different chat templates; leave --chat out\."):
        opened.generate("say 3", chat=True)
    assert opened.generate("say 3", tokens=2) is not None
