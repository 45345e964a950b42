"""A tokenizer and what else comes with a model: from an import into runs and checkpoints, and out again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
import toys
from forge_train import ConfigError, Plugin, hookimpl
from forge_train.checkpoint.checkpoint import check
from forge_train.engine import train
from forge_train_cli.app import run as forge
from forge_train_kit import hookspecs
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.offline.opening import open_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

TEMPLATE = "{% for message in messages %}{{ bos_token }}{{ message['content'] }}{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer of its own: it begins texts with 1, ends documents with 3, and stops at 2 too."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    root = tmp_path_factory.mktemp("model") / "hf"
    names = ["<|endoftext|>", "<s>", "</s>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({name: id for id, name in enumerate(names)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in names[:4]])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=len(names), max_position_embeddings=64, bos_token_id=1, eos_token_id=[2, 3], pad_token_id=0, **shape
    )
    llama = transformers.LlamaForCausalLM(config)
    llama.generation_config = transformers.GenerationConfig(
        bos_token_id=1, eos_token_id=[3, 2], do_sample=True, temperature=0.6
    )
    llama.save_pretrained(root)
    fast.save_pretrained(root)
    assert {"chat_template.jinja", "tokenizer_config.json", "generation_config.json"} <= contents(root).keys()
    return root


def contents(folder: Path) -> dict[str, bytes]:
    """Name → bytes of the files that go with a model."""
    left_out = ("model.safetensors", "config.json")
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name not in left_out}


def special(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return {key: value for key, value in config.items() if key.endswith("_token_id")}


def trained(folder: Path, config: Path, *values: str, name: str = "r", **more: Any) -> Path:
    text = tiny_models.text_file(folder)
    values = (*tiny_models.TRAIN, f"text.path={text}", f"text.cache={folder / 'cache'}", f"run.name={name}", *values)
    request = Request(config=str(config), set=values, without=("console", "tensorboard"), **more)
    return train(resolve(request), run_dir=folder / "runs").run


# -- there and back --------------------------------------------------------------------------------------------------


def test_a_model_keeps_its_tokens_and_files_through_training(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(model, tmp_path / "hf")
    import_checkpoint(source, tmp_path / "base")
    shutil.rmtree(source)
    base = (tmp_path / "base").rename(tmp_path / "moved")
    export_checkpoint(base, tmp_path / "same")
    run = trained(tmp_path, base / "config.toml", f"train.init_from={base}", "text.held_out=0.2")
    shutil.rmtree(base)
    run = run.rename(tmp_path / "elsewhere")
    export_checkpoint(run, tmp_path / "tuned")
    for out in (tmp_path / "same", tmp_path / "tuned"):
        assert contents(out) == contents(model), "byte for byte"
        assert special(out) == special(model) == {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0}
        theirs = transformers.AutoTokenizer.from_pretrained(out)
        assert theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<s>hi<|im_end|>"
        assert transformers.AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id == [3, 2]
    opened = open_model(run)
    tokenizer = hookspecs.tokenizer(opened.job)
    assert (tokenizer.begin, tokenizer.end, tokenizer.stops) == ((1,), 3, (3, 2))
    assert [*tokenizer.begin, *tokenizer.encode("one, two")] == theirs("one, two").input_ids
    assert forge(["generate", str(run), "--prompt", "The", "--tokens", "4", "--temperature", "0", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["text"]
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").generate(
        **theirs("The", return_tensors="pt"), do_sample=False, max_new_tokens=4
    )
    assert theirs.decode(expected[0], skip_special_tokens=True) == "The" + said


@pytest.mark.parametrize("ids", [{"bos_token_id": None, "eos_token_id": 2}, {"eos_token_id": None}, {}])
def test_ids_are_kept_where_there_is_no_tokenizer(model: Path, tmp_path: Path, ids: dict[str, Any]) -> None:
    source = tmp_path / "hf"
    source.mkdir()
    shutil.copyfile(model / "model.safetensors", source / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    config = {key: value for key, value in config.items() if not key.endswith("_token_id")} | ids
    (source / "config.json").write_text(json.dumps(config))
    import_checkpoint(source, tmp_path / "base")
    run = trained(tmp_path, tmp_path / "base" / "config.toml", "train.evaluate_every=0")
    for name, path in (("same", tmp_path / "base"), ("tuned", run)):
        export_checkpoint(path, tmp_path / name)
        assert special(tmp_path / name) == ids


def test_a_run_of_its_own_exports_its_tokenizers_ids(model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copyfile(model / "tokenizer.json", bare / "mine.json")
    for value, ids in (("bytes", (None, 256)), (str(bare / "mine.json"), (1, 2))):
        run = tiny_models.trained(tmp_path, f"text.tokenizer={value}", "train.steps=1")
        export_checkpoint(run, tmp_path / "out")
        assert special(tmp_path / "out") == {"bos_token_id": ids[0], "eos_token_id": ids[1], "pad_token_id": None}
        shutil.rmtree(tmp_path / "out")
    assert 'path = "tokenizer/mine.json"' in (run / "config.toml").read_text()


def test_an_import_says_why_a_tokenizer_cannot_be_used(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(model, tmp_path / "hf")
    config = transformers.LlamaConfig.from_pretrained(model, vocab_size=200)
    transformers.LlamaForCausalLM(config).save_pretrained(source)
    assert forge(["checkpoint", "import", str(source), str(tmp_path / "base")]) == 0
    sizes = "decoder.vocabulary: expected at least the tokenizer's 260, found 200"
    told = f"tokenizer.json can't be used with this model ({sizes}); name another before training on text."
    assert told in capsys.readouterr().err


def test_a_checkpoints_tokenizer_is_sealed(model: Path, tmp_path: Path) -> None:
    import_checkpoint(model, tmp_path / "base")
    assert check(tmp_path / "base", contents=True) == ""
    file = tmp_path / "base" / "tokenizer" / "tokenizer.json"
    (file.parent / ".DS_Store").touch()
    added = file.with_name("added.json")
    added.write_text('{"eos_token": "<|im_start|>"}', encoding="utf-8")
    assert check(tmp_path / "base") == "tokenizer/added.json was added to it"
    added.unlink()
    file.write_bytes(file.read_bytes().replace(b"im_end", b"im_eND"))
    assert check(tmp_path / "base", contents=True) == "tokenizer/tokenizer.json has other contents than were saved"


def test_a_resumed_run_has_the_same_tokenizer(model: Path, tmp_path: Path) -> None:
    source = shutil.copytree(model, tmp_path / "hf")
    config = tmp_path / "mine.toml"
    config.write_text('[decoder]\ndim = 32\nlayers = 1\nmax_sequence = 64\n[text]\ntokenizer = "hf"\nheld_out = 0.2\n')
    run = trained(tmp_path, config)
    assert contents(run / "tokenizer") == contents(source)
    before = (run / "config.toml").read_text()
    assert '[tokenizer]\npath = "tokenizer"' in before
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "</s>"}))
    with pytest.raises(ConfigError, match="tokenizer: another one, or its files have changed"):
        trained(tmp_path, config, "train.steps=5")
    assert (run / "config.toml").read_text() == before
    assert contents(run / "tokenizer") == contents(model)
    shutil.rmtree(source)
    trained(tmp_path, run / "config.toml", "train.steps=5")  # which has its own copy


# -- tokenizer and data are two plugins ------------------------------------------------------------------------------


class Reversed(Plugin):
    """Bytes, the other way round."""

    api = (1, 0)
    vocabulary, begin, end, stops, digest = 256, (), None, (), "reversed"

    @hookimpl
    def tokenizer(self, job: Any) -> Any:
        return self

    def encode(self, text: str) -> list[int]:
        return [255 - byte for byte in text.encode()]

    def decode(self, ids: Any) -> str:
        return bytes(255 - id for id in ids).decode(errors="replace")


def test_a_data_plugin_leaves_the_tokenizer_alone(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for value, vocabulary in (("bytes", 257), (str(model), 260)):
        sets = (*tiny_models.DECODER, *tiny_models.TRAIN, f"text.tokenizer={value}")
        setup = resolve(Request(plugins=("toys:ToyData",), set=sets, without=("console", "tensorboard")))
        assert setup.hooks.provider("build_data") == "toy_data"
        assert "text" not in setup.config.enabled()
        run = train(setup, run_dir=tmp_path / "runs").run
        assert forge(["generate", str(run), "--prompt", "a", "--tokens", "3", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tokens"] <= 3
        export_checkpoint(run, tmp_path / value.strip("/").replace("/", "-"))
        written = tmp_path / value.strip("/").replace("/", "-") / "config.json"
        assert json.loads(written.read_text())["vocab_size"] == vocabulary


def test_a_tokenizer_plugin_leaves_the_data_alone(tmp_path: Path) -> None:
    run = tiny_models.trained(tmp_path, plugins=("test_model_files:Reversed",))
    opened = open_model(run)
    assert opened.job.hooks.provider("build_data") == "text"
    assert "tokenizer" not in opened.job.config.enabled()
    assert opened.model.state_dict()["embedding.weight"].shape[0] == 256


def test_one_place_says_which_tokenizer(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def path(text: str = "", *sets: str, plugins: tuple[str, ...] = ()) -> Any:
        file = tmp_path / "sub" / "mine.toml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"[train]\nsteps = 1\n{text}")
        return resolve(Request(config=str(file), set=sets, plugins=plugins)).config.sections["tokenizer"].path

    shutil.copytree(model, tmp_path / "sub" / "tok")
    shutil.copytree(model, tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    assert path() == path("[text]\ntokenizer = 'bytes'") == "bytes"
    beside = str(tmp_path / "sub" / "tok")
    for text in ("[text]\ntokenizer = 'tok'", "[tokenizer]\npath = 'tok'"):
        assert path(text) == beside, "a relative path starts at the file that says it"
        assert path(text, plugins=("toys:ToyData",)) == beside
        for key in ("text.tokenizer", "tokenizer.path"):
            assert path(text, f"{key}=here") == str(tmp_path / "here"), "and on the command line, where it is typed"
    with pytest.raises(ConfigError, match=r"mine\.toml:6: text\.tokenizer and tokenizer\.path are two names of one"):
        path("[text]\ntokenizer = 'tok'\n[tokenizer]\npath = 'bytes'")
    with pytest.raises(ConfigError, match=r"mine\.toml:4: tokenizer\.path: no file '.*/sub/gone'"):
        path("[text]\ntokenizer = 'gone'")
    with pytest.raises(
        ConfigError,
        match=r"text\.tokenizer=here: section \[tokenizer\] has no effect, because 'reversed' takes the place of ",
    ):
        path("", "text.tokenizer=here", plugins=("test_model_files:Reversed",))


def test_without_any_tokenizer_text_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"Plugin 'text' .* requires 'tokenizer'; enable a plugin that fills it, like"
    ):
        resolve(Request(set=("train.steps=1",), without=("tokenizer",)))
    made = toys.setup(folder=tmp_path, config={"train.steps": 1}, without=("tokenizer",))
    assert made.hooks.provider("tokenizer") is None


# -- defaults for fine-tuning ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_imported_configuration_fine_tunes(model: Path, tmp_path: Path) -> None:
    import_checkpoint(model, tmp_path / "base")
    written = (tmp_path / "base" / "config.toml").read_text()
    for line in ("lr = 1e-05 # ", "warmup = 0.05 # ", "evaluate_every = 50 # ", "steps = 500 # ", "held_out = 0.05 # "):
        assert line in written
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The number {n} follows {n - 1}. " * 4 for n in range(300)))
    sets = (f"text.path={text}", f"text.cache={tmp_path / 'cache'}", "run.device=cpu", "train.steps=60", "log.every=1")
    request = Request(config=str(tmp_path / "base" / "config.toml"), set=sets, without=("console", "tensorboard"))
    done = train(resolve(request), run_dir=tmp_path / "runs")
    lines = [json.loads(line) for line in (done.run / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (done.run / "events.jsonl").read_text().splitlines()]
    assert lines[0]["lr"] < lines[3]["lr"] == max(line["lr"] for line in lines) == 1e-5
    looks = [event for event in events if event["event"] == "evaluation"]
    assert [look["step"] for look in looks] == [50, 60]
    assert looks[-1]["loss"] < looks[0]["loss"] < lines[0]["loss"]
