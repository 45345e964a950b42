"""`forge train --from RUN`: the model, weights and tokenizer of a run, under another configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from forge_command import Forge
from forge_train_tools import open_model

pytestmark = pytest.mark.unit

HERE = ("-s", "text.path=corpus.txt", "-s", "train.steps=2", "-s", "train.global_batch=2", "-s", "run.device=cpu")
STILL = ("-s", "adamw.lr=1e-30", "-s", "adamw.weight_decay=0", "-s", "train.evaluate_every=0")


@pytest.fixture
def base(forge: Forge, folder: Path) -> Path:
    """A run of another model than the default's: with experts, and one layer."""
    forge("train", "tiny.toml", "-p", "moe", "-s", "moe.experts=3", "--name", "base", "--quiet")
    return folder / "runs" / "base"


def weights(run: Path) -> dict[str, torch.Tensor]:
    return dict(open_model(run, device="cpu").module.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("path", ["runs/base", "runs/base/checkpoints/step-00000006"])
def test_starts_where_the_run_ended(forge: Forge, folder: Path, base: Path, path: str) -> None:
    forge("train", "--from", path, *HERE, *STILL, "--name", "tuned", "--quiet")
    found, wanted = weights(folder / "runs" / "tuned"), weights(base)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(one, wanted[name]) for name, one in found.items())
    shown = json.loads(forge("config", "show", "runs/tuned/config.toml", "--json").out)
    values = {key: one["value"] for key, one in shown.items()}
    assert (values["train.sequence"], values["train.steps"], values["moe.experts"]) == (16, 2, 3)


@pytest.mark.slow
def test_an_adapter_keeps_its_updates_alone(forge: Forge, folder: Path, base: Path) -> None:
    """Without `checkpoint.only`, which a Hugging Face folder needs."""
    forge("train", "--from", "runs/base", "-p", "lora", *HERE, "--name", "tuned", "--quiet")
    kept = json.loads(forge("checkpoint", "inspect", "runs/tuned", "--json").out)
    assert json.dumps(kept).count("lora_A") > 3
    tuned = weights(folder / "runs" / "tuned")
    assert tuned.keys() > weights(base).keys()
    forge("train", "--from", "runs/tuned", "-p", "lora", *HERE, *STILL, "--name", "again", "--quiet")
    again = weights(folder / "runs" / "again")
    assert again.keys() == tuned.keys()
    assert all(torch.equal(one, tuned[name]) for name, one in again.items())
    said = forge("train", "--from", "runs/tuned", *HERE, "--quiet", fails=2).err
    assert "lora_A: 16 × 16 in the checkpoint, absent in this model" in said


def test_what_the_run_lacks_and_what_can_not_be_changed(forge: Forge, folder: Path, base: Path) -> None:
    said = forge("train", "--from", "runs/base", *HERE, "-s", "moe.experts=4", "--quiet", fails=2).err
    assert "router" in said
    (folder / "empty").mkdir()
    assert "empty" in forge("train", "--from", "empty", *HERE, fails=2).err
