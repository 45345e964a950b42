"""The plugin `freeze`: what it freezes, what a checkpoint holds of it, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import chat_model
from forge_cli import forge
from forge_train import ConfigError
from forge_train.checkpoint.checkpoint import shapes
from forge_train_tools.offline.opening import open_model
from forge_train_tools.testing import TinyRun, run_forge

pytestmark = pytest.mark.unit


def frozen(folder: Path, *parameters: str, but: tuple[str, ...] = (), config: dict[str, Any] | None = None) -> TinyRun:
    values = {"freeze.parameters": list(parameters), "freeze.but": list(but), **(config or {})}
    return run_forge(("freeze",), values, folder=folder)


def trained(run: TinyRun) -> set[str]:
    return {name for name, one in run.model.named_parameters() if one.requires_grad}


def test_what_matches_has_no_gradient_no_state_and_its_first_values(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "*", but=("head.*", "layers.1.*.q.weight"))
    assert trained(run) == {"head.weight", "layers.1.attention.q.weight"}
    assert all(one.grad is None for one in run.model.parameters() if not one.requires_grad)
    assert {id(one) for one in run.optimizer.state} == {id(one) for one in run.model.parameters() if one.requires_grad}
    path = run.run / "checkpoints" / "step-00000003"
    names = {name.removeprefix("model.") for name in shapes(path) if name.startswith("model.")}
    assert names == {name for name, _ in run.model.named_parameters()}
    begun = run_forge(steps=1, folder=tmp_path / "begun", config={"adamw.lr": 1e-30, "adamw.weight_decay": 0.0}).run
    before, after = (open_model(one, text=False).model.state_dict() for one in (begun, run.run))
    moved = {name for name, one in before.items() if not torch.allclose(one, after[name], rtol=0, atol=1e-8)}
    assert moved == trained(run)


def test_its_gradients_are_those_of_the_whole_model(tmp_path: Path) -> None:
    whole = run_forge(steps=1, folder=tmp_path / "whole")
    part = run_forge(("freeze",), {"freeze.parameters": ["layers.0.*"]}, steps=1, folder=tmp_path / "part")
    assert part.losses == whole.losses
    assert 0 < part.numbers[0]["grad_norm"] < whole.numbers[0]["grad_norm"]


def test_a_tied_weight_goes_by_any_of_its_names(tmp_path: Path) -> None:
    tied = {"decoder.tied": True}
    names = {name for name, _ in frozen(tmp_path / "one", "head.*", config=tied).model.named_parameters()}
    assert trained(frozen(tmp_path / "two", "embedding.*", config=tied)) == names - {"embedding.weight"}
    assert trained(frozen(tmp_path / "all", "*", but=("head.*",), config=tied)) == {"embedding.weight"}


@pytest.mark.parametrize(
    ("parameters", "but", "says"),
    [
        ((), (), r"freeze\.parameters: names nothing; set it"),
        (("embeding.*",), (), r"'embeding\.\*' matches no parameter\. Did you mean 'embedding\.\*'\?"),
        (("layer.*",), (), r"freeze\.parameters: 'layer\.\*' matches no parameter\. Did you mean 'layers\.\*'\?"),
        (("lm_head.*",), (), r"matches no parameter\. Did you mean 'head\.\*'\?"),
        (("head",), (), r"matches no parameter\. Did you mean 'head\.\*'\?"),
        (("model.layers.*",), (), r"matches no parameter\. Did you mean 'layers\.\*'\?"),
        (("*.atention.*",), (), r"matches no parameter\. Did you mean '\*\.attention\.\*'\?"),
        (("wte",), (), r"matches no parameter\. There are embedding\.\*, head\.\*, layers\.\*, norm\.\*\."),
        (("head.*",), ("layers.0.*",), r"freeze\.but: 'layers\.0\.\*' matches no parameter that freeze\.parameters"),
        (("*",), (), r"freeze\.parameters: nothing is left to train; name what is trained in freeze\.but"),
    ],
)
def test_bad_input(tmp_path: Path, parameters: tuple[str, ...], but: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        frozen(tmp_path, *parameters, but=but)


def test_a_published_model_is_imported_without_it(tmp_path: Path) -> None:
    chat_model.write_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text("say one two three\n" * 200)
    short = ("train.steps=2", "train.global_batch=2", "train.sequence=16", "train.evaluate_every=0", "run.device=cpu")
    words = [word for one in (*short, f"text.path={tmp_path / 'text.txt'}") for word in ("-s", one)]
    chosen = ("-s", "freeze.parameters=['*']", "-s", "freeze.but=['head.*']")
    done = forge("train", tmp_path / "model", "-p", "freeze", *words, *chosen, "--run-dir", tmp_path / "runs")
    assert done.code == 0, done.err
    (path,) = (tmp_path / "runs").glob("*/checkpoints/step-00000002")
    before, after = (open_model(one, text=False).model.state_dict() for one in (tmp_path / "model", path))
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["head.weight"]


def test_a_run_that_starts_from_one_with_it_says_itself_what_is_frozen(tmp_path: Path) -> None:
    first = frozen(tmp_path / "first", "layers.*").run
    words = ("freeze.parameters=['embedding.*']", "train.steps=1", "train.global_batch=2", "train.evaluate_every=0")
    settings = [word for one in (*words, "run.device=cpu") for word in ("-s", one)]
    done = forge("train", "--from", first, "-p", "synthetic,freeze", *settings, "--run-dir", tmp_path / "runs")
    assert done.code == 0, done.err
    (path,) = (tmp_path / "runs").glob("*/checkpoints/step-00000001")
    before, after = (open_model(one, text=False).model.state_dict() for one in (first, path))
    assert [name for name in before if torch.equal(before[name], after[name])] == ["embedding.weight"]
