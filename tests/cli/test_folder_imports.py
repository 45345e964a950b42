"""A Hugging Face folder is imported once, with what makes its model alone; what trains it is the run's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import chat_model
from forge_command import Forge

pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

CHATS = ("-p", "sft", "-s", "sft.path=chats.jsonl", "-s", "run.device=cpu")


@pytest.fixture
def model(folder: Path) -> Path:
    chat_model.write_model(folder / "hf")
    chat_model.write_chats(folder / "chats.jsonl")
    pair = {"prompt": "say 3", "chosen": "three", "rejected": "3"}
    (folder / "pairs.jsonl").write_text(json.dumps(pair) + "\n", encoding="utf-8")
    return folder / "hf"


def shown(forge: Forge, *words: str) -> dict[str, Any]:
    found = json.loads(forge("config", "show", *words, "--json").out)
    return {key: one["value"] for key, one in found.items()}


def imports(folder: Path) -> list[str]:
    place = folder / "runs" / "imported"
    return sorted(one.name for one in place.iterdir() if one.is_dir()) if place.is_dir() else []


@pytest.mark.slow
@pytest.mark.usefixtures("model")
def test_defaults_follow_from_what_is_asked_of_the_run(forge: Forge) -> None:
    pairs = ("-p", "dpo,text_pairs", "-s", "text_pairs.path=pairs.jsonl")
    keys = ("dpo.beta", "dpo.length_normalised", "dpo.target_margin")
    for loss, wanted in {"simpo": (2, True, 1), "orpo": (0.1, True, 0), "sigmoid": (0.1, False, 0)}.items():
        values = shown(forge, "hf", *pairs, "-s", f"dpo.loss={loss}")
        assert tuple(values[key] for key in keys) == wanted, loss
        assert (values["adamw.lr"], values["train.steps"], values["train.sequence"]) == (1e-5, 500, 64)


@pytest.mark.usefixtures("model")
def test_a_required_option_is_seen(forge: Forge, folder: Path) -> None:
    forge("config", "show", "hf", *CHATS)
    teacher = str(folder / "runs" / "imported" / imports(folder)[0])
    assert shown(forge, "hf", "-p", "distill", *CHATS, "-s", f"distill.weights={teacher}")["distill.share"] == 0.5


@pytest.mark.slow
@pytest.mark.usefixtures("model")
def test_one_import_serves_whatever_trains_it(forge: Forge, folder: Path) -> None:
    forge("config", "show", "hf", *CHATS)
    (first,) = imports(folder)
    for more in (("-p", "lora,lion"), ("-p", "fsdp2,ema"), ("--without", "tensorboard")):
        values = shown(forge, "hf", *CHATS, *more)
        assert Path(values["train.init_from"]).name == first, more
    assert shown(forge, "hf", *CHATS, "-p", "lion")["lion.lr"] == 3e-6, "the preset's"
    assert imports(folder) == [first]


@pytest.mark.usefixtures("model")
def test_a_mistake_is_told_before_anything_is_imported(forge: Forge, folder: Path) -> None:
    for words, said in {
        ("-s", "tokenizer.ad=1"): "Did you mean",
        ("-p", "lora", "-s", "lora.rnk=2"): "lora.rnk",
        ("-p", "loar"): "there is no plugin named 'loar'",
        ("-s", "adamw.lr=much"): "adamw.lr",
    }.items():
        assert said in forge("train", "hf", *CHATS, *words, fails=2).err
    assert imports(folder) == []


@pytest.mark.slow
@pytest.mark.usefixtures("model")
def test_a_new_head_is_in_the_import_with_its_classes(forge: Forge, folder: Path) -> None:
    (folder / "labels.jsonl").write_text('{"text": "say", "label": "no"}\n', encoding="utf-8")
    words = ("-p", "classify,text_labels", "-s", "text_labels.path=labels.jsonl", "-s", 'classify.classes=["no","yes"]')
    values = shown(forge, "hf", *words)
    assert values["classify.classes"] == ["no", "yes"]
    assert "lm_head" not in values["plugins"]
    values = shown(forge, "hf", "-p", "reward,text_pairs", "-s", "text_pairs.path=pairs.jsonl")
    assert len(imports(folder)) == 2


TWO = ("-s", "train.steps=1", "-s", "train.global_batch=2", "-s", "run.device=cpu", "-s", "train.evaluate_every=0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more", "plugins"),
    [
        ("LlamaForCausalLM", {}, ("-p", "hf")),
        ("LlamaForCausalLM", {}, ("-p", "reward,text_pairs")),
        ("LlamaModel", {}, ("-p", "embed,text_pairs", "-s", "text_pairs.kind=embedding")),
        ("LlamaForSequenceClassification", {"num_labels": 1}, ("-p", "reward,text_pairs")),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 16, "head_dim": 16}, ()),
    ],
)
def test_every_kind_of_folder_trains(
    forge: Forge, folder: Path, family: str, more: dict[str, Any], plugins: tuple[str, ...]
) -> None:
    import transformers

    rows = chat_model.write_tokenizer(folder / "hf")
    sizes = {"vocab_size": rows, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, **more}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    config = getattr(transformers, family.partition("For")[0].removesuffix("Model") + "Config")(**sizes, **heads)
    getattr(transformers, family)(config).save_pretrained(folder / "hf")
    key = ("anchor", "positive") if "embed,text_pairs" in plugins else ("chosen", "rejected")
    pairs = [{"prompt": "say"} if key[0] == "chosen" else {}] * 8
    written = [{**one, key[0]: f"one {at}", key[1]: f"two {at}"} for at, one in enumerate(pairs)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in written), encoding="utf-8")
    (folder / "text.txt").write_text("say one two three\n" * 100)
    data = "text_pairs.path=pairs.jsonl" if "text_pairs" in " ".join(plugins) else "text.path=text.txt"
    held = ("-s", "text_pairs.held_out=0") if "pairs" in data else ()
    done = forge("train", "hf", *plugins, "-s", data, *held, *TWO, "--name", "r", "--json").json
    assert (done["outcome"], done["step"]) == ("done", 1)
    forge("checkpoint", "export", "runs/r", "out")
    assert json.loads((folder / "out" / "config.json").read_text())["architectures"]
    assert len(imports(folder)) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("model")
def test_a_run_that_keeps_a_part_imports_what_it_starts_from(forge: Forge, folder: Path) -> None:
    forge("config", "show", "--from", "hf", *CHATS)
    assert imports(folder) == [], "it reads the folder"
    (folder / "lora.toml").write_text('preset = "finetune"\nplugins = ["lora"]\n', encoding="utf-8")
    values = shown(forge, "lora.toml", "--from", "hf", *CHATS)
    assert [Path(values["train.init_from"]).name] == imports(folder)
    done = forge("train", "--from", "hf", "-p", "lora", *CHATS, *TWO, "--name", "tuned", "--json").json
    assert done["outcome"] == "done"
    forge("checkpoint", "export", "runs/tuned", "adapter", "--adapter")
    done = forge("train", "--from", "hf", "--adapter", "adapter", *CHATS, *TWO, "--name", "again", "--json").json
    assert done["outcome"] == "done"
    assert len(imports(folder)) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("model")
def test_a_run_that_is_named_as_a_folder_is_told_how_to_start_from_it(forge: Forge, folder: Path) -> None:
    pairs = ("-p", "dpo,text_pairs", "-s", "text_pairs.path=pairs.jsonl", "-s", "text_pairs.held_out=0", *TWO)
    said = forge("train", "--from", "hf", *CHATS, *TWO, "--name", "chat").out
    assert "forge generate runs/chat --chat --prompt" in said
    refused = forge("train", "runs/chat", *pairs, fails=2).err
    assert "To start from its model, use --from runs/chat." in refused
    assert "quickstart" not in refused, "no list of presets"
    assert "no file or model of that name. Did you mean 'hf'?" in forge("train", "hf2", *pairs, fails=2).err
    for template in ("", "chatml"):
        words = ("-s", "train.init_from=runs/chat", "-s", f"text_pairs.template={template}")
        refused = forge("train", *pairs, *words, fails=2).err
        assert f"To train that model further: forge train --from {folder / 'runs/chat'}" in refused
        refused = forge("train", *pairs, *words, "-s", "dpo.loss=simpo", fails=2).err
        assert f"`forge train --from {folder / 'runs/chat'} …` takes the tokenizer of that model too" in refused
    said = forge("train", "--from", "runs/chat", *pairs, "--name", "aligned").out
    assert "forge generate runs/aligned --chat --prompt" in said


@pytest.mark.usefixtures("model")
def test_a_model_of_judged_answers_is_tried_in_a_chat(forge: Forge, folder: Path) -> None:
    judged = [{"prompt": f"say {at}", "completion": "so", "label": at % 2 == 0} for at in range(8)]
    (folder / "judged.jsonl").write_text("".join(json.dumps(one) + "\n" for one in judged), encoding="utf-8")
    data = ("-s", "text_feedback.path=judged.jsonl", "-s", "text_feedback.held_out=0")
    said = forge("train", "hf", "-p", "kto,text_feedback", *data, *TWO, "-s", "train.global_batch=4", "--name", "k").out
    assert "forge generate runs/k --chat --prompt" in said
