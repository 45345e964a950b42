"""Folders and files that are no model that Forge reads: the same sentence at every door, and nothing is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_command import Forge

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

MODEL = "model.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1000\n"
RUN = ("train.steps=1", "train.global_batch=2", "train.sequence=16", "run.device=cpu", "train.evaluate_every=0")
TEXT = [word for one in (*RUN, "text.path=corpus.txt") for word in ("-s", one)]
DOORS: dict[str, tuple[str, ...]] = {
    "--from": ("train", "--from", "odd", *TEXT),
    "init_from": ("train", "--from", "whole", *TEXT, "-s", "train.init_from=odd"),
    "import": ("checkpoint", "import", "odd", "new"),
    "generate": ("generate", "odd", "--tokens", "2"),
    "eval": ("eval", "odd", "-s", "text.path=corpus.txt"),
    "folder": ("train", "odd", *TEXT),
    "--from -p hf": ("train", "--from", "odd", "-p", "hf", *TEXT),
    "hf.weights": ("train", "-p", "hf,text", *TEXT, "-s", "hf.weights=odd"),
    "import -p hf": ("checkpoint", "import", "odd", "new", "-p", "hf"),
}


def config(**more: object) -> Callable[[Path], None]:
    def change(odd: Path) -> None:
        file = odd / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | more), encoding="utf-8")

    return change


def text(name: str, content: str, *, only: bool = False, without: str = "") -> Callable[[Path], None]:
    def change(odd: Path) -> None:
        for file in list(odd.iterdir()):
            if only or file.name == without:
                file.unlink()
        (odd / name).parent.mkdir(exist_ok=True)
        (odd / name).write_text(content, encoding="utf-8")

    return change


def quantised(odd: Path) -> None:
    names = ("qweight", "qzeros", "scales", "g_idx")
    tensors = {f"model.layers.0.mlp.up_proj.{name}": torch.zeros(2, dtype=torch.int32) for name in names}
    save_file(tensors, odd / "model.safetensors", {"format": "pt"})


def renamed(name: str) -> Callable[[Path], None]:
    """A file instead of the folder."""

    def change(odd: Path) -> None:
        content = (odd / "model.safetensors").read_bytes()
        shutil.rmtree(odd)
        odd.with_name(name).write_bytes(content)

    return change


def link(odd: Path) -> None:
    (odd / MODEL).unlink()
    (odd / MODEL).symlink_to(odd / "blobs" / "0")


DEQUANTISE = "Take the model that these weights were made from, or dequantise them."
PICKLED = "Pickled weights are never read; save the model with transformers"
LFS = "is a pointer of Git LFS, not the file itself; run git lfs pull in its repository."
CASES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "gptq": (
        config(quantization_config={"bits": 4, "group_size": 128, "damp_percent": 0.1, "quant_method": "gptq"}),
        ("quant_method: gptq", DEQUANTISE),
    ),
    "awq": (config(quantization_config={"zero_point": True, "quant_method": "awq"}), ("quant_method: awq", DEQUANTISE)),
    "bitsandbytes": (config(quantization_config={"load_in_8bit": True}), ("quant_method", DEQUANTISE)),
    "gptq, not named": (quantised, ("take the model that they were made from, or dequantise it",)),
    **{
        f"pointer {name}": (text(name, POINTER), (name, LFS))
        for name in (
            *("config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json", MODEL),
            *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "model.safetensors.index.json"),
        )
    },
    "adapter": (
        text("adapter_config.json", "{}", only=True),
        ("adapter_config.json. It holds an adapter of PEFT, not a model; name the folder of its model",),
    ),
    "adapter with config.json": (text("adapter_config.json", "{}", without=MODEL), ("It holds an adapter of PEFT",)),
    "gguf": (text("model-Q4_K_M.gguf", "GGUF", only=True), ("model-Q4_K_M.gguf. GGUF files are not read",)),
    "bin": (text("pytorch_model.bin", "PK", without=MODEL), (f"pytorch_model.bin. {PICKLED}",)),
    "pth": (text("consolidated.00.pth", "PK", only=True), (f"consolidated.00.pth. {PICKLED}",)),
    "npy": (text("model/w.npy", "", only=True), ("model/w.npy. Raw arrays are not read",)),
    "onnx": (text("onnx/model.onnx", "", without=MODEL), ("model.onnx. Weights in this format are not read",)),
    "no weights": (text("README.md", "", without=MODEL), ("found neither model.safetensors nor", "Download")),
    "an error page": (text(MODEL, "<html>" * 99), ("not a whole safetensors file", "Download it again.")),
    "an empty file": (text(MODEL, ""), ("not a whole safetensors file", "Download it again.")),
    "a link to nothing": (link, (f"{MODEL}: it is a link to a file that is not there; download it again.",)),
    "architectures": (config(architectures="LlamaForCausalLM"), ("architectures: expected a list of names, found",)),
    "cache": (text("snapshots/config.json", "{}", only=True), ("snapshots/config.json. Name the folder of this file",)),
    "a gguf file": (renamed("odd.gguf"), ("GGUF files are not read",)),
    "a bin file": (renamed("odd.bin"), (PICKLED,)),
    "a file of weights": (renamed("odd.safetensors"), ("It is a file of weights; name its folder",)),
}


def doors() -> list[Any]:
    """Every case with three of the doors, which all occur, and with every door."""
    names = [*DOORS] * 2
    some = [pytest.param(case, names[n % 9 : n % 9 + 3], id=case) for n, case in enumerate(CASES)]
    every = [pytest.param(case, [*DOORS], id=f"{case}, every door", marks=pytest.mark.extended) for case in CASES]
    return [*some, *every]


@pytest.mark.parametrize(("case", "doors"), doors())
def test_it_is_told_at_every_door(forge: Forge, folder: Path, case: str, doors: list[str]) -> None:
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_attention_heads=4))
    for name in ("odd", "whole"):
        model.save_pretrained(folder / name)
    change, says = CASES[case]
    change(folder / "odd")
    (path,) = (one.name for one in folder.glob("odd*"))
    for door in doors:
        said = forge(*(word.replace("odd", path) for word in DOORS[door]), fails=2).err
        assert all(one in said for one in says), (door, said)
        assert "JSONDecodeError" not in said
    assert not (folder / "new").exists()


@pytest.mark.slow
@pytest.mark.parametrize("plugins", [(), ("-p", "hf")], ids=["decoder", "hf"])
@pytest.mark.parametrize(
    ("tied", "change", "says"),
    [
        (True, {"lm_head.weight": torch.ones(300, 32)}, "lm_head.weight"),
        (False, {"model.norm.weight": torch.ones(32, dtype=torch.int64)}, "model.norm.weight: stored as I64; expected"),
        (False, {"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}, "model.norm.weight: stored as F8_E4M3"),
        (False, {"lora_A.weight": torch.ones(2)}, "lora_A.weight: no parameter takes it"),
    ],
)
def test_a_tensor_that_is_read_otherwise_elsewhere_is_refused(
    forge: Forge, folder: Path, tied: bool, plugins: tuple[str, ...], change: dict[str, torch.Tensor], says: str
) -> None:
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    own = transformers.LlamaConfig(**shape, num_attention_heads=4, tie_word_embeddings=tied)
    transformers.LlamaForCausalLM(own).save_pretrained(folder / "odd")
    tensors = load_file(folder / "odd" / MODEL)
    save_file({**tensors, **change}, folder / "odd" / MODEL, {"format": "pt"})
    for door in ("--from -p hf", "hf.weights") if plugins else ("--from", "import", "generate", "eval"):
        assert says in forge(*DOORS[door], fails=2).err, door


def test_a_class_that_can_not_be_built_is_a_mistake_in_the_folder(forge: Forge, folder: Path) -> None:
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    own = transformers.LlamaConfig(**shape, num_attention_heads=4)
    transformers.LlamaForCausalLM(own).save_pretrained(folder / "odd")
    config(num_attention_heads=-4)(folder / "odd")
    assert "odd/config.json: a value has the wrong type" in forge(*DOORS["import -p hf"], fails=2).err
    config(architectures=[], num_attention_heads=4)(folder / "odd")
    assert "architectures, which is missing (model_type is 'llama')" in forge(*DOORS["import"], fails=2).err


def test_a_preset_is_meant_where_a_folder_has_its_name(forge: Forge, folder: Path) -> None:
    (folder / "gpt2").mkdir()
    (folder / "mine").mkdir()
    assert "GPT2LMHeadModel" in forge("config", "show", "gpt2", "--json").out
    assert "there is no config.json" in forge("config", "show", "mine", fails=2).err
