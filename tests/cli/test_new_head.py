"""Tied models of transformers under a new head, and back: what is said, and what an export holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_command import Forge
from hf_models import GROUPED

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

SHAPE = {**GROUPED, "vocab_size": 300, "head_dim": 8, "pad_token_id": None}
RUN = ("train.steps=1", "train.global_batch=2", "train.sequence=16", "run.device=cpu", "train.evaluate_every=0")
LABELS = (
    *("-p", "classify,text_labels", "-s", 'classify.classes=["even","odd"]', "-s", "text_labels.path=labels.jsonl"),
    *("-s", "adamw.lr=1e-30"),
)


def sets(*values: str) -> list[str]:
    return [word for one in (*RUN, *values) for word in ("-s", one)]


def written(folder: Path, family: str, kind: str = "ForCausalLM", **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE, **more)
    model = getattr(transformers, family + kind)(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture
def labels(folder: Path) -> None:
    records = [{"text": f"line {n}", "label": ("even", "odd")[n % 2]} for n in range(40)]
    (folder / "labels.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")


def tie(folder: Path) -> bool:
    return bool(json.loads((folder / "config.json").read_text(encoding="utf-8"))["tie_word_embeddings"])


def hidden(path: Path, ids: torch.Tensor) -> torch.Tensor:
    found, info = transformers.AutoModelForSequenceClassification.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    out: torch.Tensor = found.eval()(ids, output_hidden_states=True).hidden_states[-1]
    return out


@pytest.mark.usefixtures("labels")
@pytest.mark.parametrize(
    ("family", "plugins", "more"),
    [
        ("Qwen3", (), {}),
        ("Gemma2", ("-p", "eager"), {"query_pre_attn_scalar": 8, "sliding_window": 16}),
        ("Qwen3", ("-p", "hf"), {}),
    ],
)
def test_a_new_head_unties_by_itself(
    forge: Forge, folder: Path, family: str, plugins: tuple[str, ...], more: dict[str, Any]
) -> None:
    theirs = written(folder / "hf", family, tie_word_embeddings=True, **more)
    said = forge("train", "--from", "hf", *LABELS, *plugins, *sets(), "--name", "run")
    assert said.out.count("decoder.tied: untied, because the head of plugin 'classify'") == ("hf" not in plugins)
    assert said.out.count("decoder.logit_soft_cap: left out") == (family == "Gemma2")
    assert "in this run" not in said.err
    forge("checkpoint", "export", "runs/run", "out")
    assert not tie(folder / "out")
    ids = torch.randint(0, 300, (2, 9))
    torch.testing.assert_close(hidden(folder / "out", ids), theirs.model(ids).last_hidden_state, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("labels")
def test_a_language_model_of_such_a_run_is_tied_again(forge: Forge, folder: Path) -> None:
    theirs = written(folder / "hf", "Qwen3", tie_word_embeddings=True)
    forge("train", "--from", "hf", *LABELS, *sets(), "--name", "run")
    start = ("adamw.lr=1e-30", "train.init_from=runs/run", 'train.init_unexpected=["head.*"]', "text.path=corpus.txt")
    back = ("train", "runs/run/config.toml", "--without", "classify,text_labels", "--name", "back")
    forge(*back, *sets(*start))
    forge("checkpoint", "export", "runs/back", "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "out").eval()
    ids = torch.randint(0, 300, (2, 9))
    assert tie(folder / "out")
    torch.testing.assert_close(again(ids).logits, theirs(ids).logits, rtol=1e-6, atol=1e-6)


def test_a_model_without_a_head_stays_tied(forge: Forge, folder: Path) -> None:
    """It gives no weights for a head, and a causal model of its folder has the embedding's."""
    written(folder / "hf", "Llama", "Model", tie_word_embeddings=True, architectures=["LlamaModel"])
    forge("checkpoint", "import", "hf", "start", "-p", "embed,text_pairs")
    forge("checkpoint", "export", "start", "out")
    assert tie(folder / "out")
    forge("train", "--from", "out", *sets("text.path=corpus.txt"), "--name", "run")


@pytest.mark.slow
@pytest.mark.usefixtures("labels")
@pytest.mark.parametrize("kind", ["Model", "cut", "ForSequenceClassification"])
@pytest.mark.parametrize("plugins", [(), ("-p", "hf")])
def test_a_folder_without_the_head_is_told_at_every_door(
    forge: Forge, folder: Path, kind: str, plugins: tuple[str, ...]
) -> None:
    from safetensors.torch import load_file, save_file

    written(folder / "hf", "Llama", "ForCausalLM" if kind == "cut" else kind)
    written(folder / "whole", "Llama")
    if kind == "cut":
        tensors = load_file(folder / "hf" / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, folder / "hf" / "model.safetensors", {"format": "pt"})
    own = ("--without", "classify") if kind == "ForSequenceClassification" else ()
    text = sets("text.path=corpus.txt")
    doors = {
        "from": ("train", "--from", "hf", *own, *plugins, *text),
        "init_from": ("train", "--from", "whole", *plugins, *text, "-s", "train.init_from=hf"),
        "import": ("checkpoint", "import", "hf", "start", *own, *plugins),
        "generate": ("generate", "hf", "--tokens", "2"),
        "eval": ("eval", "hf", "-s", "text.path=corpus.txt"),
    }
    says = r"hf has no weights for the head (head."
    for door, words in doors.items():
        if (own and door in ("generate", "eval")) or (plugins and door == "init_from"):
            continue  # these open the folder's own head, and a class of transformers is described by the folder
        said = forge(*words, fails=2).err
        assert says in said, (door, said)
        assert ("--allow-missing 'head." if door == "import" else "-s 'train.init_missing=[") in said, (door, said)


def test_a_head_that_may_be_missing_is_allowed_by_either_name(forge: Forge, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    written(folder / "hf", "Llama")
    tensors = load_file(folder / "hf" / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "hf" / "model.safetensors", {"format": "pt"})
    for name in ("lm_head.*", "head.weight"):
        shutil.rmtree(folder / "start", ignore_errors=True)
        said = forge("checkpoint", "import", "hf", "start", "--allow-missing", name)
        assert "head.weight starts as in a new model" in said.err


@pytest.mark.usefixtures("labels")
def test_a_new_head_of_a_language_model_starts_where_it_is_asked_for(forge: Forge, folder: Path) -> None:
    written(folder / "hf", "Llama", "ForSequenceClassification")
    words = ("checkpoint", "import", "hf", "start", "--without", "classify", "--allow-missing", "head.weight")
    said = forge(*words, fails=2).err
    assert "hf holds score.weight, which no parameter of this model takes" in said
    assert "leave out what does not fit with --allow-extra 'score.weight'" in said
    assert "score.weight: left out" in forge(*words, "--allow-extra", "score.weight").err
