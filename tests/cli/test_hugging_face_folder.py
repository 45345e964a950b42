"""A Hugging Face folder as the argument of each command that takes a configuration: imported once, by one code path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import chat_model
from forge_command import Forge

pytest.importorskip("transformers")

CHATS = ("-p", "sft", "-s", "sft.path=chats.jsonl", "-s", "run.device=cpu")


@pytest.fixture
def model(folder: Path) -> Path:
    chat_model.write_model(folder / "hf")
    chat_model.write_chats(folder / "chats.jsonl")
    return folder / "hf"


@pytest.mark.slow
def test_shown_planned_and_verified(forge: Forge, folder: Path, model: Path) -> None:
    shown = forge("config", "show", "hf", *CHATS, "--json")
    assert f"{model} is imported as runs/imported/" in shown.err
    values = {key: one["value"] for key, one in json.loads(shown.out).items()}
    (checkpoint,) = (folder / "runs" / "imported").glob("hf-*")
    assert Path(values["train.init_from"]).resolve() == checkpoint
    assert values["decoder.dim"] == json.loads((model / "config.json").read_text())["hidden_size"]

    planned = forge("plan", "hf", *CHATS, "--json")
    assert "imported" not in planned.err, "it is there already"
    size = ("-s", "train.global_batch=2", "-s", "train.evaluate_batches=1")
    verified = forge("verify", "hf", *CHATS, *size, "--nproc", "2", "--steps", "1")
    assert "imported" not in verified.err
    assert "agree" in verified.out
    assert [path.name for path in (folder / "runs").iterdir()] == ["imported"]


def test_what_is_no_such_folder(forge: Forge, folder: Path) -> None:
    (folder / "plain").mkdir()
    ended = forge("plan", "plain", fails=2)
    assert "plain" in ended.err
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_trained_straight_from_the_folder(forge: Forge, folder: Path, model: Path) -> None:
    sets = ("train.steps=2", "train.global_batch=2", "train.micro_batch=2", "train.evaluate_batches=1")
    values = [word for one in sets for word in ("-s", one)]
    done = forge("train", "--from", "hf", *CHATS, *values, "--name", "r", "--quiet", "--export")
    assert "imported" not in done.err
    assert sorted(path.name for path in (folder / "runs").iterdir() if not path.name.startswith(".")) == ["r"]
    run = folder / "runs" / "r"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [one["checkpoint"] for one in events if one["event"] == "initialised"] == [str(model)]
    assert (run / "tokenizer" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert (run / "export" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    again = forge("train", "--from", "hf", *CHATS, *values, "-s", "train.steps=3", "--name", "r", "--json")
    assert again.json["step"] == 3, "it went on"
    assert "no such folder" in forge("train", "--from", "nowhere", *CHATS, fails=2).err
    assert "knows the architecture" in forge("train", "--from", strange(folder), *CHATS, fails=2).err


@pytest.mark.slow
def test_looked_at_without_a_checkpoint(forge: Forge, folder: Path, model: Path) -> None:
    (folder / "text.txt").write_text("say one two three\n" * 200)
    text = ("-s", "text.path=text.txt", "-s", "train.sequence=16", "-s", "train.global_batch=2")
    before = sorted(folder.iterdir())
    asked = ("--prompt", "say 7", "--tokens", "8", "--temperature", "0", "--json")
    there, evaluated = forge("generate", "hf", *asked).json, forge("eval", "hf", *text, "--json").json
    assert sorted(folder.iterdir()) == before, "nothing is written"
    assert (there["tokens"], there["step"], evaluated["step"]) == (8, 0, 0)
    assert forge("generate", "hf", "-p", "eager", *asked).json["text"] == there["text"]
    forge("checkpoint", "import", "hf", "start")
    refused = [forge("generate", "start", "-p", "eager", *more, fails=2).err for more in ((), ("--samples", "2"))]
    assert "section [sdpa] has no effect, because 'eager' takes the place of 'sdpa'" in refused[0]
    assert refused[0] == refused[1]
    assert forge("generate", "start", "-p", "tp", *asked).json["text"] == there["text"]
    assert forge("generate", "start", *asked).json["text"] == there["text"]
    assert forge("eval", "start", *text, "--json").json["loss"] == evaluated["loss"]
    assert forge("eval", "hf", *text, "--nproc", "2", "--json").json["loss"] == pytest.approx(evaluated["loss"])


def test_text_that_the_model_has_not_learned_to_read_is_told(forge: Forge, folder: Path, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "hf has no tokenizer: text is read as bytes" in forge("generate", "hf", "--tokens", "2").err
    assert "set it to your files" in forge("eval", "hf", fails=2).err
    assert "Did you mean" in forge("generate", misspelt(folder), fails=2).err


@pytest.mark.slow
@pytest.mark.parametrize("plugins", [(), ("-p", "hf")])
@pytest.mark.parametrize("kind", ["pieces", "merges", "none"])
def test_a_folder_without_tokenizer_json_is_never_silently_read_as_bytes(
    forge: Forge, folder: Path, model: Path, kind: str, plugins: tuple[str, ...]
) -> None:
    """Its other files are the tokenizer, of the run and of an import; without any, that is said."""
    table = json.loads((model / "tokenizer.json").read_text())["model"]
    (model / "tokenizer.json").unlink()
    if kind == "pieces":
        train_pieces(model)
    elif kind == "merges":
        (model / "vocab.json").write_text(json.dumps(table["vocab"]))
        (model / "merges.txt").write_text("\n".join(" ".join(pair) for pair in table["merges"]))
        (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (folder / "text.txt").write_text("say one two three\n" * 200)
    shown = forge("config", "show", "--from", "hf", *plugins, "--json")
    path = {key: one["value"] for key, one in json.loads(shown.out).items()}["tokenizer.path"]
    assert (path == "bytes") == (kind == "none")
    if plugins:
        return
    values = ("text.path=text.txt", "train.steps=1", "train.global_batch=2", "train.sequence=16", "run.device=cpu")
    sets = [word for one in (*values, "train.evaluate_every=0") for word in ("-s", one)]
    done = forge("train", "--from", "hf", *sets, "--name", "r", "--quiet")
    assert ("text is read as bytes" in done.err) == (kind == "none")
    kept = {path.name for path in (folder / "runs" / "r" / "tokenizer").iterdir()}
    assert kept >= {"pieces": {"tokenizer.model"}, "merges": {"vocab.json", "merges.txt"}, "none": set()}[kind]
    if kind == "merges":
        forge("train", "--from", "hf", *sets, "-s", "train.steps=2", "--name", "r", "--quiet")
        forge("checkpoint", "export", "runs/r", "out")
        assert (folder / "out" / "merges.txt").is_file()


def train_pieces(folder: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["say one two three", "four five six seven"] * 50),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
        model_type="bpe",
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))


def misspelt(folder: Path) -> str:
    name = strange(folder)
    (folder / name / "config.json").write_text('{"architectures": ["LLamaForCausalLM"]}')
    return name


def strange(folder: Path) -> str:
    (folder / "strange").mkdir()
    (folder / "strange" / "config.json").write_text('{"architectures": ["Strange"]}')
    (folder / "strange" / "model.safetensors").write_bytes((folder / "hf" / "model.safetensors").read_bytes())
    return "strange"


@pytest.mark.slow
def test_adapted_from_the_folder(forge: Forge, folder: Path, model: Path) -> None:
    """The import has no adapters; what is trained has nothing else."""
    values = [word for one in ("lora.rank=2", "train.global_batch=2", "train.steps=2") for word in ("-s", one)]
    said = forge("train", "hf", "-p", "lora", *CHATS, *values, "--name", "r", "--quiet").err
    assert f"{model} is imported as runs/imported/" in said
    (imported,) = (folder / "runs" / "imported").glob("hf-*")
    assert "lora" not in (imported / "config.toml").read_text()
    forge("generate", "runs/r", "--prompt", "say 7", "--tokens", "4")
    inspected = forge("checkpoint", "inspect", "runs/r", "--json").json
    names = [one["name"] for one in inspected["tensors"] if one["name"].startswith("model.")]
    assert len(names) == 28
    assert all(name.endswith(("lora_A", "lora_B")) for name in names)
    forge("checkpoint", "export", "runs/r", "out")
    assert forge("generate", "out", "--prompt", "say 7", "--tokens", "4", "--temperature", "0", "--json").json["text"]
    done = forge("checkpoint", "export", "runs/r", "adapter", "--adapter", "--json").json
    assert done["files"] == ["adapter_model.safetensors"]
    assert "It holds an adapter of PEFT, not a model" in forge("generate", "adapter", "--prompt", "say", fails=2).err
    assert (
        "--dtype and --nproc don't apply"
        in forge("checkpoint", "export", "runs/r", "again", "--adapter", "--dtype", "bf16", fails=2).err
    )
    more = ("--name", "s", "--json")
    again = forge("train", "hf", "--adapter", "adapter", *CHATS, *values[2:], *more).json
    assert again["outcome"] == "done"
    assert "expected a folder of PEFT" in forge("plan", "hf", "--adapter", "hf", *CHATS, fails=2).err
    (folder / "adapter" / "adapter_config.json").write_text('{"peft_type": "LOHA"}')
    refused = forge("plan", "hf", "--adapter", "adapter", *CHATS, fails=2).err
    assert "no installed plugin continues an adapter of the kind 'LOHA'" in refused
