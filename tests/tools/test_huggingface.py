"""Weights to and from Hugging Face layout: the same numbers there and back, and every difference spelled out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny_models
from crossed import marked
from doubles import BOUND, in_double
from forge_train import ConfigError, Plugin, PluginError, hookimpl
from forge_train.checkpoint.checkpoint import check, shapes
from forge_train.engine import train
from forge_train_cli.app import run as forge
from forge_train_kit.hf import HFModel
from forge_train_kit.state_map import Rename
from forge_train_plugins.models.decoder import Decoder
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.offline.opening import open_model

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, {}),
    "llama tied, llama3, in several files": (
        "Llama",
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
        {"max_shard_size": "20KB"},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}, {}),
    "qwen3 tied, in several files": (
        "Qwen3",
        {"head_dim": 16, "tie_word_embeddings": True},
        {"max_shard_size": "20KB"},
    ),
}
"""Family, configuration, how it is saved."""
WINDOW = {"sliding_window": 8}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 20, **WINDOW}
MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "mistral": ("Mistral", WINDOW, {}, "sdpa"),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}, {}, "sdpa"),
    "olmo2": ("Olmo2", {"tie_word_embeddings": True}, {}, "sdpa"),
    "olmo3": ("Olmo3", {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}, {}, "sdpa"),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}, {}, "sdpa"),
    "granite": ("Granite", {"logits_scaling": 4.0, **MULTIPLIERS}, {}, "sdpa"),
    "gemma2, in several files": ("Gemma2", GEMMA, {"max_shard_size": "20KB"}, "flex"),
    "gemma3": ("Gemma3", {"sliding_window_pattern": 2, **GEMMA}, {}, "eager"),
}
"""The same of families with more options, and a kernel that can do what they need."""


def random_model(family: str, **values: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{'Gemma3Text' if family == 'Gemma3' else family}Config")(**(SHAPE | values))
    config._attn_implementation = "eager"
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def load(folder: Path) -> Any:
    """As a user of transformers would."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype="float32"
    ).eval()


def logits(path: Path, tokens: Tensor) -> tuple[Any, Tensor]:
    """Forge's model of a checkpoint, and what it gives."""
    part = open_model(path, text=False).model.parts[0]
    return part, part.get_submodule("head")(part(tokens))


TOKENS = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A random model of 61 token ids, saved."""
    random_model("Llama", vocab_size=61).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


# -- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.e2e
@pytest.mark.parametrize("case", marked(CASES, ["llama", "qwen3"]))
def test_import_train_export_keep_to_transformers(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported_trained_and_exported(*CASES[case], "sdpa", tmp_path)


@pytest.mark.e2e
@pytest.mark.parametrize("case", marked(FAMILIES, ["mistral", "olmo2", "granite", "qwen2"]))
def test_families_keep_to_transformers(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    imported_trained_and_exported(*FAMILIES[case], tmp_path)


@pytest.mark.unit
@pytest.mark.parametrize("flags", [("-p", "sdpa"), ("--without", "auto")])
def test_a_family_that_the_kernel_cannot_compute_is_told_with_the_kernels_that_can(
    flags: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random_model("Gemma2", **GEMMA).save_pretrained(tmp_path / "hf")
    assert forge(["checkpoint", "import", str(tmp_path / "hf"), str(tmp_path / "start"), *flags]) == 2
    told = capsys.readouterr().err
    assert "without soft caps" in told
    assert "Installed kernels that have it: auto, eager, flex" in told


def imported_trained_and_exported(
    family: str, values: dict[str, Any], saving: dict[str, Any], kernel: str, tmp_path: Path
) -> None:
    reference = random_model(family, **values)
    reference.save_pretrained(tmp_path / "hf", **saving)
    assert (tmp_path / "hf" / "model.safetensors.index.json").is_file() == bool(saving)
    start = tmp_path / "start"
    assert forge(["checkpoint", "import", str(tmp_path / "hf"), str(start), "--plugins", kernel]) == 0

    part, ours = logits(start, TOKENS)
    theirs = reference(TOKENS).logits
    assert (ours - theirs).abs().max() <= 1e-5
    for output in (ours, theirs):
        F.cross_entropy(output[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    imported = dict(part.named_parameters())
    pairs = [(imported[own], gradient) for own, gradient in named_gradients(reference, part)]
    assert len(pairs) == len(imported)
    for parameter, gradient in pairs:
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-5)

    trained_and_exported(start, ours)


def trained_and_exported(start: Path, ours: Tensor) -> None:
    """What three steps make of an imported model, whose logits those are, transformers computes too."""
    text, runs, out = tiny_models.text_file(start.parent), start.parent / "runs", start.parent / "out"
    sets = [f"text.path={text}", "text.held_out=0", "train.steps=3", "train.global_batch=2", "train.micro_batch=2"]
    sets += ["train.evaluate_every=0", "adamw.lr=1e-3", f"text.cache={start.parent / 'cache'}", "run.device=cpu"]
    flags = [flag for one in sets for flag in ("-s", one)]
    assert forge(["train", str(start / "config.toml"), *flags, "--run-dir", str(runs), "--name", "r", "--quiet"]) == 0
    assert forge(["checkpoint", "export", str(runs / "r"), str(out)]) == 0
    part, tuned = logits(runs / "r", TOKENS)
    assert (tuned - ours).abs().max() > 1e-3, "three steps must have changed something"
    assert (in_double(load(out), TOKENS) - in_double(part, TOKENS)).abs().max() <= BOUND


def named_gradients(reference: Any, part: Any) -> list[tuple[str, Tensor]]:
    """Forge's name and the gradient of every parameter of transformers' model."""
    config = json.loads(reference.config.to_json_string()) | {"architectures": [type(reference).__name__]}
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    layout = Decoder(Decoder.Config()).import_hf(config).map
    plan = layout.plan({name: (tuple(one.shape), one.dtype) for name, one in gradients.items()})
    return [*plan.stream(lambda name, box: gradients[name][tuple(slice(*bounds) for bounds in box)])]


@pytest.mark.unit
def test_narrow_weights_are_kept_and_computed_in_fp32(tmp_path: Path) -> None:
    model = random_model("Qwen3", head_dim=16, vocab_size=61).bfloat16()
    model.save_pretrained(tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "start")
    assert {dtype for _, dtype in shapes(tmp_path / "start").values()} == {torch.bfloat16}
    _, ours = logits(tmp_path / "start", TOKENS)
    assert (ours - load(tmp_path / "hf")(TOKENS).logits).abs().max() <= 1e-5
    export_checkpoint(tmp_path / "start", tmp_path / "back")
    first, second = (load_file(tmp_path / one / "model.safetensors") for one in ("hf", "back"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.unit
def test_an_export_in_several_files_is_imported_again(llama: Path, tmp_path: Path) -> None:
    import_checkpoint(llama, tmp_path / "start")
    done = export_checkpoint(tmp_path / "start", tmp_path / "out", shard_bytes=20_000)
    assert len(done.files) > 3
    assert done.files[0] == f"model-00001-of-{len(done.files):05d}.safetensors"
    assert max((tmp_path / "out" / file).stat().st_size for file in done.files) < 25_000
    import_checkpoint(tmp_path / "out", tmp_path / "again")
    for left, right in zip(logits(tmp_path / "start", TOKENS), logits(tmp_path / "again", TOKENS), strict=True):
        assert not isinstance(left, Tensor) or torch.equal(left, right)
    reference = load(llama)(TOKENS).logits
    assert torch.equal(load(tmp_path / "out")(TOKENS).logits, reference)


# -- what lies beside the tensors ------------------------------------------------------------------------------------


def tokenizer(folder: Path, size: int = 61) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = ["<|endoftext|>", *(chr(33 + n) for n in range(size - 2)), "Ġ"]
    made = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))


@pytest.mark.unit
def test_the_tokenizer_goes_with_the_weights(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer(llama)
    done = import_checkpoint(llama, tmp_path / "start")
    assert not done.notes
    assert '[tokenizer]\npath = "tokenizer"' in (tmp_path / "start" / "config.toml").read_text()
    moved = (tmp_path / "start").rename(tmp_path / "moved")
    assert forge(["generate", str(moved), "--prompt", "AB C", "--tokens", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] <= 5
    export_checkpoint(moved, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (llama / "tokenizer.json").read_bytes()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").encode("AB") == [33, 34]


@pytest.mark.unit
def test_an_imported_checkpoint_can_be_edited_moved_and_trained(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer(llama)
    import_checkpoint(llama, tmp_path / "start")
    shutil.rmtree(llama)
    moved = (tmp_path / "start").rename(tmp_path / "moved")
    config = moved / "config.toml"
    config.write_text(config.read_text().replace("steps = 500", "steps = 2").replace("sequence = 64", "sequence = 8"))
    assert str(tmp_path) not in config.read_text()
    assert check(moved, contents=True) == ""
    (tmp_path / "text.txt").write_text("ABC DEF " * 200)
    monkeypatch.chdir(
        tmp_path
    )  # what a configuration names beside itself does not depend on where the command is typed
    values = (f"text.path={tmp_path / 'text.txt'}", f"text.cache={tmp_path / 'cache'}", "run.device=cpu")
    request = Request(config="moved/config.toml", without=("console", "tensorboard"), set=values)
    done = train(resolve(request), run_dir=tmp_path / "runs")
    assert done.outcome == "done"
    written = (done.run / "config.toml").read_text()  # which has another place, and repeats the run from anywhere
    assert f'init_from = "{moved}"' in written
    assert '[tokenizer]\npath = "tokenizer"' in written
    assert (done.run / "tokenizer" / "tokenizer.json").is_file()


@pytest.mark.unit
def test_what_is_not_meant_to_be_edited_is_named_with_the_way_out(llama: Path, tmp_path: Path) -> None:
    tokenizer(llama)
    path = import_checkpoint(llama, tmp_path / "start").path
    file = path / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text().replace('"A"', '"ä"'))
    with pytest.raises(ConfigError) as caught:
        open_model(path)
    assert str(caught.value) == (
        f"{path}: not a whole checkpoint: tokenizer/tokenizer.json has {file.stat().st_size} bytes, not "
        f"{json.loads((path / 'manifest.json').read_text())['files']['tokenizer/tokenizer.json']['bytes']}. "
        "Put the file back as it was (only config.toml may be edited), or make the checkpoint again."
    )
    (path / "config.toml").unlink()
    with pytest.raises(ConfigError, match=r"config\.toml is missing"):
        open_model(path)


@pytest.mark.unit
def test_a_model_without_its_tokenizer_is_imported_with_a_note(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = import_checkpoint(llama, tmp_path / "start")
    assert "has no tokenizer: " in done.notes[0]
    assert forge(["generate", str(tmp_path / "start")]) == 2
    assert "decoder.vocabulary: expected at least the tokenizer's 257, found 61" in capsys.readouterr().err


@pytest.mark.unit
def test_an_imported_checkpoint_is_like_any_other(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "start")
    assert forge(["checkpoint", "import", str(llama), path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == load(llama).num_parameters()
    assert check(Path(path), contents=True) == ""
    assert forge(["checkpoint", "verify", path]) == 0
    assert forge(["train", "--resume", path, "--quiet", "-s", f"text.path={tiny_models.text_file(tmp_path)}"]) == 2
    assert "holds weights only" in capsys.readouterr().err
    assert forge(["checkpoint", "inspect", path, "--json"]) == 0
    held = json.loads(capsys.readouterr().out)
    assert held["step"] == held["tokens"] == 0
    assert {entry["name"] for entry in held["plugins"]} >= {"decoder", "adamw", "text"}
    assert held["config"]["decoder.dim"] == 32
    embedding = next(tensor for tensor in held["tensors"] if tensor["name"] == "model.embedding.weight")
    assert (embedding["shape"], embedding["dtype"], embedding["bytes"]) == ([61, 32], "float32", 61 * 32 * 4)


class Exchange(Plugin):
    """What a model of somebody else's does to be exchanged."""

    api = (1, 0)

    @hookimpl
    def import_hf(self, config: Any) -> HFModel | None:
        if config["architectures"] != ["ToyForCausalLM"]:
            return None
        return HFModel(
            Rename(self.names(config["depth"])).inverse(), sections={"toy_model": {"layers": config["depth"]}}
        )

    @hookimpl
    def export_hf(self, job: Any) -> HFModel:
        layers = job.config.sections["toy_model"].layers
        return HFModel(Rename(self.names(layers)).inverse(), {"architectures": ["ToyForCausalLM"], "depth": layers})

    def names(self, layers: int) -> dict[str, str]:
        inner = [f"layers.{n}.{name}.weight" for n in range(layers) for name in ("norm", "up", "down")]
        return {name: f"toy.{name}" for name in ("embedding.weight", *inner, "head.weight")}


TOYS = ("toys:ToyModel", "toys:ToyData", "test_huggingface:Exchange")


def toy_run(folder: Path, *values: str) -> Path:
    asked = Request(plugins=TOYS, without=("console", "tensorboard"), set=(*tiny_models.TRAIN, *values))
    return train(resolve(asked), run_dir=folder).run


@pytest.mark.unit
def test_a_model_of_an_outside_plugin_is_exchanged(tmp_path: Path) -> None:
    run = toy_run(tmp_path, "toy_model.layers=3")
    files = export_checkpoint(run, tmp_path / "hf", shard_bytes=1000).files
    assert load_file(tmp_path / "hf" / files[0]).keys() == {"toy.embedding.weight", "toy.layers.0.norm.weight"}
    import_checkpoint(tmp_path / "hf", tmp_path / "start", plugins=TOYS)
    first, second = (open_model(path).model.state_dict() for path in (run, tmp_path / "start"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(ConfigError, match=r"knows the architecture \['ToyForCausalLM'\] \(asked: decoder\)") as caught:
        import_checkpoint(tmp_path / "hf", tmp_path / "other")
    assert ", Gemma2ForCausalLM, Gemma3ForCausalLM, " in str(caught.value)


@pytest.mark.unit
def test_a_plugin_that_names_other_parameters_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = toy_run(tmp_path)
    export_checkpoint(run, tmp_path / "hf")
    monkeypatch.setattr(
        Exchange, "names", lambda self, layers: {"embedding.weight": "toy.embedding.weight", "ghost": "g"}
    )
    with pytest.raises(PluginError, match=r"head.weight: not named[\s\S]*ghost: missing"):
        import_checkpoint(tmp_path / "hf", tmp_path / "start", plugins=TOYS)
    with pytest.raises(ConfigError, match=r"the Hugging Face layout has no place for\s+head.weight"):
        export_checkpoint(run, tmp_path / "out")


# -- what can't be imported ------------------------------------------------------------------------------------------


def change_tensors(folder: Path, **changes: Tensor | None) -> None:
    tensors: dict[str, Any] = load_file(folder / "model.safetensors") | {
        k.replace("__", "."): v for k, v in changes.items()
    }
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def truncate(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def repeat(file: Path, key: str, value: Any) -> None:
    """Put a key in front of what a JSON file has, which may be the same key."""
    file.write_text(f"{{{json.dumps(key)}: {json.dumps(value)}, {file.read_text().lstrip()[1:]}")


def spoil(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(20)
        opened.write(b"}}}}")


MISTAKES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "no folder": (shutil.rmtree, ("hf: there is no such folder",)),
    "no config": (lambda hf: (hf / "config.json").unlink(), ("not a model in Hugging Face layout",)),
    "config is no JSON": (lambda hf: (hf / "config.json").write_text("{"), ("config.json: can't be read",)),
    "a key twice": (
        lambda hf: repeat(hf / "config.json", "rms_norm_eps", 0.5),
        ("config.json: can't be read: ", "the key 'rms_norm_eps' is there 2 times"),
    ),
    "config is a list": (lambda hf: (hf / "config.json").write_text("[]"), ("expected a JSON object",)),
    "no tensors": (
        lambda hf: (hf / "model.safetensors").rename(hf / "pytorch_model.bin"),
        ("neither model.safetensors nor", "There is pytorch_model.bin"),
    ),
    "unknown architecture": (
        lambda hf: change_config(hf, architectures=["MambaForCausalLM"]),
        (
            "no enabled plugin knows the architecture ['MambaForCausalLM']",
            "asked: decoder). Known: ",
            "Plugin hf may read it; enable it with --plugins",
        ),
    ),
    "an architecture of a plugin that is not enabled": (
        lambda hf: change_config(hf, architectures=["LlavaForConditionalGeneration"]),
        ("the architecture ['LlavaForConditionalGeneration']; enable image with --plugins.",),
    ),
    "a misspelt architecture": (
        lambda hf: change_config(hf, architectures=["LLamaForCausalLM"]),
        ("Did you mean 'LlamaForCausalLM'?",),
    ),
    "a value it has no counterpart for": (
        lambda hf: change_config(hf, pretraining_tp=2),
        ("pretraining_tp = 2 can't be imported",),
    ),
    "a value of another type": (lambda hf: change_config(hf, num_attention_heads="four"), ("config.json: ",)),
    "a value out of range": (
        lambda hf: change_config(hf, num_hidden_layers=0),
        ("config.json: decoder.layers: expected a number greater than 0, found 0",),
    ),
    "a missing tensor": (
        lambda hf: change_tensors(hf, model__norm__weight=None),
        ("the tensors are not those of the model", "model.norm.weight: missing (32)"),
    ),
    "a tensor too many": (
        lambda hf: change_tensors(hf, model__extra=torch.zeros(3)),
        ("model.extra: no parameter takes it",),
    ),
    "another shape": (
        lambda hf: change_tensors(hf, model__norm__weight=torch.zeros(31), lm_head__weight=torch.zeros(61, 30)),
        ("model.norm.weight: 31 in model.safetensors, 32 in config.json", "lm_head.weight: 61 × 30"),
    ),
    "quantised": (
        lambda hf: change_tensors(hf, model__norm__weight=torch.zeros(32, dtype=torch.int8)),
        ("model.norm.weight: stored as I8",),
    ),
    "a truncated file": (
        lambda hf: truncate(hf / "model.safetensors"),
        ("not a whole safetensors file: it has ", "model.layers.0.self_attn.q_proj.weight", " are cut off."),
    ),
    "a header that is spoiled": (
        lambda hf: spoil(hf / "model.safetensors"),
        ("model.safetensors: not a whole safetensors file: SafetensorError",),
    ),
    "a file of something else": (
        lambda hf: (hf / "model.safetensors").write_bytes(b"version https://git-lfs" * 20),
        ("is a pointer of Git LFS, not the file itself",),
    ),
}


@pytest.mark.unit
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_folder_that_is_wrong_is_told_how(
    mistake: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, messages = MISTAKES[mistake]
    spoil(llama)
    assert forge(["checkpoint", "import", str(llama), str(tmp_path / "start")]) == 2
    told = capsys.readouterr().err
    for message in messages:
        assert message in told
    assert "Traceback" not in told
    assert [file.name for file in tmp_path.iterdir() if file.name != "hf"] == []


@pytest.mark.unit
def test_an_index_that_does_not_fit_its_files_is_told_how(tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    random_model("Llama", vocab_size=61).save_pretrained(hf, max_shard_size="20KB")
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    gone = index["weight_map"].pop("model.norm.weight")
    index["weight_map"]["model.ghost"] = gone
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError) as error:
        import_checkpoint(hf, tmp_path / "start")
    assert f"{gone}: model.ghost is not in it" in str(error.value)
    assert f"{gone}: model.norm.weight is in it, but not in the index" in str(error.value)
    (hf / gone).unlink()
    with pytest.raises(ConfigError, match=f"{gone}: no such file"):
        import_checkpoint(hf, tmp_path / "start")
    text = json.dumps(index)
    (hf / "model.safetensors.index.json").write_text(
        text.replace('"weight_map": {', '"weight_map": {"model.ghost": "",')
    )
    with pytest.raises(ConfigError, match=r"index.json: can't be read: .*the key 'model.ghost' is there 2 times"):
        import_checkpoint(hf, tmp_path / "start")


@pytest.mark.unit
def test_leftovers_and_copies_are_known(tmp_path: Path) -> None:
    """Older files hold the rotation's frequencies, and a tied head's weights a second time."""
    hf = tmp_path / "hf"
    random_model("Llama", vocab_size=61, tie_word_embeddings=True).save_pretrained(hf)
    copy = load_file(hf / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(hf, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4), lm_head__weight=copy)
    import_checkpoint(hf, tmp_path / "start")
    change_tensors(hf, lm_head__weight=copy + 1)
    with pytest.raises(ConfigError, match=r"lm_head.weight: .* it is not a copy of model.embed_tokens.weight"):
        import_checkpoint(hf, tmp_path / "other")


@pytest.mark.unit
def test_a_target_in_use_is_left_alone(llama: Path, tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "thesis.tex").write_text("…")
    with pytest.raises(ConfigError, match="used exists"):
        import_checkpoint(llama, used)
    import_checkpoint(llama, tmp_path / "start")
    with pytest.raises(ConfigError, match="used exists"):
        export_checkpoint(tmp_path / "start", used)
    assert [file.name for file in used.iterdir()] == ["thesis.tex"]


@pytest.mark.unit
def test_a_damaged_checkpoint_is_not_exported(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "start"
    import_checkpoint(llama, path)
    file = max(path.glob("*.safetensors"), key=lambda one: one.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert forge(["checkpoint", "export", str(path), str(tmp_path / "out")]) == 2
    assert f"{file.name} has other contents than were saved" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert forge(["checkpoint", "verify", str(path), "--json"]) == 1
    ((found),) = json.loads(capsys.readouterr().out)
    assert file.name in found["problem"]


@pytest.mark.unit
def test_training_another_model_from_a_folder_of_transformers_says_what_to_do(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    sets = ["-s", f"train.init_from={llama}", "-s", f"text.path={tiny_models.text_file(tmp_path)}"]
    sets += ["-s", "train.evaluate_every=0"]
    assert forge(["train", *sets, "--run-dir", str(runs), "--quiet"]) == 2
    told = capsys.readouterr().err
    assert f"{llama}: the tensors are not those of the model in this run's configuration:\n" in told
    assert f"Use --from {llama} to train that model." in told
    assert not any(runs.iterdir())
    assert forge(["checkpoint", "export", str(llama), str(tmp_path / "out")]) == 2
    assert f"forge checkpoint import {llama} NEW" in capsys.readouterr().err


# -- the list of a run's checkpoints ---------------------------------------------------------------------------------


@pytest.mark.unit
def test_checkpoints_of_a_run_are_listed_with_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny_models.trained(tmp_path, "checkpoint.every=1", "checkpoint.keep=5")
    truncate(next((run / "checkpoints" / "step-00000002").glob("rank-*.safetensors")))
    assert forge(["checkpoint", "list", str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["latest"], bool(row["problem"])) for row in rows] == [
        (3, True, False),
        (2, False, True),
        (1, False, False),
    ]
    assert all(row["bytes"] > 10_000 for row in rows)
    assert forge(["checkpoint", "list", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "step-00000003" in shown
    assert "bytes, not" in shown
    assert forge(["checkpoint", "verify", str(run)]) == 1
    assert capsys.readouterr().out.count("whole") == 2
    assert forge(["checkpoint", "list", str(tmp_path)]) == 2
    assert forge(["checkpoint", "inspect", str(run)]) == 0
    assert "layers.0.attention.q.weight" in capsys.readouterr().out
