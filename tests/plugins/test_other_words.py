"""A teacher, or a reference, whose vocabulary is as large as the model's, but has other words."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import chat_model
from forge_train import ConfigError
from forge_train_kit.data.tokenizers import open_tokenizer
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.testing import run_forge

pytest.importorskip("transformers")
pytestmark = pytest.mark.unit
SHAPE: dict[str, Any] = {
    "train.sequence": 32,
    "decoder.vocabulary": 320,
    "text.held_out": 0.0,
    "train.evaluate_every": 0,
}


def tokenizer(folder: Path, change: Callable[[dict[str, Any]], None] = lambda content: None) -> Path:
    """A tokenizer, changed."""
    folder.mkdir()
    chat_model.write_tokenizer(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return folder


def swap(content: dict[str, Any]) -> None:
    """Two words have each other's ids."""
    words = content["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]


def decorate(content: dict[str, Any]) -> None:
    """Another file with the same words."""
    content["version"] = content.pop("version")


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Any]:
    (tmp_path / "a.txt").write_text("say one and two\n" * 200)
    pairs = [{"prompt": f"say {at}", "chosen": "one two", "rejected": "two one"} for at in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs))

    def train(words: Path, plugins: list[str], **config: Any) -> Any:
        settings = {"tokenizer.path": str(words), **SHAPE, **{k.replace("__", "."): v for k, v in config.items()}}
        if "dpo" not in plugins:
            settings["text.path"] = str(tmp_path / "a.txt")
        else:
            settings.pop("text.held_out")
            settings |= {"text_pairs.path": str(tmp_path / "pairs.jsonl"), "text_pairs.template": "chatml"}
        without = ["text"] if "dpo" in plugins else []
        return run_forge(plugins, settings, steps=1, without=without, folder=tmp_path / "runs")

    return train


@pytest.mark.slow
@pytest.mark.parametrize("task", ["distill", "dpo"])
def test_it_is_refused(tmp_path: Path, trained: Callable[..., Any], task: str) -> None:
    other = trained(tokenizer(tmp_path / "other"), []).run
    plugins = ["distill"] if task == "distill" else ["dpo", "text_pairs"]
    with pytest.raises(ConfigError, match=rf"{task}\.weights: .* was trained with another tokenizer: the ids of this"):
        trained(tokenizer(tmp_path / "own", swap), plugins, **{f"{task}__weights": str(other)})
    trained(tokenizer(tmp_path / "same", decorate), plugins, **{f"{task}__weights": str(other)})
    if task == "dpo":
        stored = {"dpo__stored": str(tmp_path / "kept.json"), "dpo__weights": str(other)}
        trained(tmp_path / "same", plugins, **stored)
        with pytest.raises(ConfigError, match=r"dpo\.stored: .*kept\.json was computed with another tokenizer; nam"):
            trained(tmp_path / "own", plugins, **stored)


def test_so_is_a_published_model_that_was_imported(tmp_path: Path, trained: Callable[..., Any]) -> None:
    """Its checkpoint holds the tokenizer's files."""
    (tmp_path / "model").mkdir()
    chat_model.write_model(tmp_path / "model")
    imported = import_checkpoint(tmp_path / "model", tmp_path / "teacher").path
    values = tomllib.loads((imported / "config.toml").read_text())
    shape = {key: value for key, value in values["decoder"].items() if key != "vocabulary"}
    student = {"distill__weights": str(imported), "distill__teacher": {"decoder": values["decoder"]}}
    size = {"decoder__vocabulary": values["decoder"]["vocabulary"]}
    assert shape
    with pytest.raises(ConfigError, match=r"distill\.weights: .*teacher was trained with another tokenizer: the ids"):
        trained(tokenizer(tmp_path / "own", swap), ["distill"], **student, **size)
    trained(tokenizer(tmp_path / "same", decorate), ["distill"], **student, **size)


def test_one_without_a_tokenizer_is_taken(tmp_path: Path) -> None:
    """Both read bytes."""
    (tmp_path / "model").mkdir()
    chat_model.write_model(tmp_path / "model")
    for file in (tmp_path / "model").glob("*token*"):
        file.unlink()
    imported = import_checkpoint(tmp_path / "model", tmp_path / "teacher").path
    values = tomllib.loads((imported / "config.toml").read_text())["decoder"]
    (tmp_path / "a.txt").write_text("say one and two\n" * 200)
    config = {"distill.weights": str(imported), "distill.teacher": {"decoder": values}, "train.sequence": 32}
    config |= {"decoder.vocabulary": values["vocabulary"], "text.path": str(tmp_path / "a.txt"), "text.held_out": 0.0}
    run_forge(["distill"], {**config, "train.evaluate_every": 0}, steps=1, folder=tmp_path / "runs")


def test_pieces_that_begin_texts_otherwise_are_the_same_words(tmp_path: Path, trained: Callable[..., Any]) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    folders = [tmp_path / name for name in ("with", "without", "other")]
    for folder in folders:
        folder.mkdir()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["say one and two", "and then three"][:: -1 if folder.name == "other" else 1] * 40),
            model_prefix=str(folder / "tokenizer"),
            vocab_size=300 if folder.name == "other" else 290,
            hard_vocab_limit=False,
            byte_fallback=True,
            minloglevel=2,
        )
    shutil.copy(folders[0] / "tokenizer.model", folders[1])
    (folders[1] / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    assert len({open_tokenizer(str(folder)).digest for folder in folders}) == 3
    teacher = trained(folders[0], []).run
    trained(folders[1], ["distill"], distill__weights=str(teacher))
    with pytest.raises(ConfigError, match=r"distill\.weights: .* was trained with another tokenizer"):
        trained(folders[2], ["distill"], distill__weights=str(teacher))
