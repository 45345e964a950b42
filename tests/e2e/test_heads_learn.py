"""Each head learns from this machine's own text, beats the majority or chance, and is what transformers loads."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import heads_data
from forge_train import ConfigError
from forge_train_tools.generation.completion import Completion
from forge_train_tools.generation.sampling import Sampling
from forge_train_tools.offline.evaluate import evaluate
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.offline.opening import open_model
from forge_train_tools.testing import run_forge

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.unit]

NAMES = ("email", "encodings", "pydoc_data")
MODEL = {
    "run.seed": 0,
    "run.device": "cpu",
    "decoder.dim": 64,
    "decoder.layers": 2,
    "decoder.heads": 4,
    "train.sequence": 128,
    "train.global_batch": 16,
    "train.evaluate_batches": 8,
    "log.every": 50,
    "adamw.lr": 3e-3,
    "cosine.warmup": 10,
    "checkpoint.every": 0,
}


def learned(folder: Path, plugins: tuple[str, ...], steps: int, **settings: Any) -> tuple[Path, dict[str, float]]:
    """A run that ended, and what `forge eval` finds."""
    section = plugins[1]
    own = {f"{section}.held_out": 0.15, f"{section}.cache": str(folder / "cache")}
    run = run_forge(plugins, {**MODEL, **own, **settings}, steps=steps, preset="", folder=folder / "runs").run
    return run, evaluate(run).metrics


def majority(file: Path) -> float:
    """The share of the label that is there most often."""
    labels: Counter[str] = Counter()
    for line in file.read_text().splitlines():
        record = json.loads(line)
        labels.update([record["label"]] if "label" in record else record["labels"])
    return labels.most_common(1)[0][1] / labels.total()


def compared(run: Path, folder: Path, loader: Any) -> Any:
    """An export, loaded by transformers, with the outputs of the run."""
    export_checkpoint(run, folder / "hf")
    theirs = loader.from_pretrained(folder / "hf").eval()
    (part,) = open_model(run, device="cpu").model.parts
    ids = torch.randint(0, 256, (1, 50))
    with torch.no_grad():
        ours, found = part.head(part(ids)), theirs(ids)
        expected = found.logits if hasattr(found, "logits") else found.last_hidden_state
        torch.testing.assert_close(
            ours[:, -1:] if expected.dim() == 2 else ours,
            expected.view(1, -1, expected.shape[-1]),
            rtol=1e-5,
            atol=1e-5,
        )
    opened = open_model(run, device="cpu")
    with pytest.raises(ConfigError, match="Generating text needs token logits; the head of this model gives"):
        Completion(opened.job, opened.model, "a", Sampling())
    return theirs


def test_the_package_of_a_text(tmp_path: Path) -> None:
    file = heads_data.packages(tmp_path / "packages.jsonl", NAMES)
    run, found = learned(
        tmp_path,
        ("classify", "text_labels"),
        80,
        **{"classify.classes": NAMES, "text_labels.path": str(file)},
    )
    assert found["classify.accuracy"] > majority(file) + 0.4, found
    assert found["classify.macro_f1"] > 0.75
    theirs = compared(run, tmp_path, transformers.AutoModelForSequenceClassification)
    assert theirs.config.id2label == dict(enumerate(NAMES))


def test_the_kind_of_a_word(tmp_path: Path) -> None:
    file = heads_data.kinds(tmp_path / "kinds.jsonl", 300)
    run, found = learned(
        tmp_path,
        ("token_classify", "text_labels"),
        60,
        **{"token_classify.classes": heads_data.KINDS, "text_labels.path": str(file)},
    )
    assert found["token_classify.accuracy"] > majority(file) + 0.3, found
    assert found["token_classify.macro_f1"] > 0.6
    compared(run, tmp_path, transformers.AutoModelForTokenClassification)


def test_two_halves_of_a_passage(tmp_path: Path) -> None:
    file = heads_data.neighbours(tmp_path / "pairs.jsonl")
    run, found = learned(
        tmp_path,
        ("embed", "text_pairs"),
        60,
        **{
            "text_pairs.kind": "embedding",
            "text_pairs.path": str(file),
            "train.sequence": 64,
            "train.global_batch": 64,
            "decoder.layers": 1,
        },
    )
    chance = 1 / 32
    assert found["embed.recall_at_1"] > 4 * chance, found
    assert found["embed.mrr"] > 2 * sum(1 / rank for rank in range(1, 33)) / 32
    compared(run, tmp_path, transformers.AutoModel)


def test_words_as_they_are_spelled(tmp_path: Path) -> None:
    file = heads_data.preferences(tmp_path / "preferences.jsonl")
    run, found = learned(
        tmp_path,
        ("reward", "text_pairs"),
        80,
        **{"text_pairs.template": "plain", "text_pairs.path": str(file)},
    )
    assert found["reward.accuracy"] > 0.8, found
    assert found["reward.margin"] > 0.5
    assert compared(run, tmp_path, transformers.AutoModelForSequenceClassification).num_labels == 1
