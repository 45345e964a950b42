"""`steer` and the hook `intervene` on one process: equal to the same done by hand, in evaluations alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import steer_cases
from forge_cli import forge
from forge_train import ConfigError, Plugin, PluginError, hookimpl
from forge_train_tools import open_model
from steer_cases import evaluated


@pytest.mark.slow
@pytest.mark.parametrize("model", ["decoder", "mla", "delta_net"])
def test_a_zeroed_head_is_one_without_columns(model: str, tmp_path: Path) -> None:
    plain = evaluated(str(tmp_path / "plain"), model, [], {})
    by_hand = evaluated(str(tmp_path / "hand"), model, ["ByHand"], {})
    steered = evaluated(str(tmp_path / "steered"), model, ["steer"], steer_cases.HEADS)
    assert steered["losses"] == pytest.approx(by_hand["losses"], rel=1e-6)
    assert steered["losses"] != pytest.approx(plain["losses"], rel=1e-6)
    assert steered["numbers"] == plain["numbers"], "training computes without it"


def test_a_vector_is_a_forward_hook(tmp_path: Path) -> None:
    by_hand = evaluated(str(tmp_path / "hand"), "decoder", ["Hooked"], {})
    steered = evaluated(str(tmp_path / "steered"), "decoder", ["steer"], steer_cases.settings(tmp_path))
    assert steered["losses"] == by_hand["losses"]


def test_a_class_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    plain = evaluated(str(tmp_path / "plain"), "arcee", [], {"checkpoint.every": 2})
    steered = evaluated(str(tmp_path / "steered"), "arcee", ["steer"], {"steer.zero_heads": ["1.3"]})
    opened = open_model(plain["run"])
    assert opened.module.get_submodule("model.layers.1.self_attn.o_proj").weight.shape == (32, 32)
    assert steered["numbers"] == plain["numbers"]
    assert steered["losses"] != pytest.approx(plain["losses"], rel=1e-6)


def test_generation_and_inference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One text, several side by side, and records: all as if the heads had no columns."""
    monkeypatch.chdir(tmp_path)
    run = evaluated(str(tmp_path / "run"), "decoder", [], {"checkpoint.every": 2, "adamw.lr": 0.01})["run"]
    heads = {"steer.zero_heads": '["0.0", "0.1", "0.2", "0.3"]'}
    by_hand = open_model(run)
    with torch.no_grad():
        by_hand.module.get_submodule("layers.0.attention.o").weight.zero_()  # type: ignore[operator]
    greedy: Any = {"tokens": 12, "temperature": 0.0}
    right = [by_hand.generate(prompt, **greedy) for prompt in ("def ", "import os")]
    assert open_model(run, plugins=["steer"], set=heads).generate("def ", **greedy) == right[0]
    steered = ("-p", "steer", "-s", f"steer.zero_heads={heads['steer.zero_heads']}")
    asked = ("--prompt", "def ", "--prompt", "import os", "--tokens", 12, "--temperature", 0, "--json")
    many = forge("generate", run, *asked, *steered)
    assert many.code == 0, many.err
    assert [one["text"] for one in many.json["answers"]] == right
    (tmp_path / "texts.jsonl").write_text('{"text": "def main"}\n', encoding="utf-8")
    ended = forge("infer", run, "--data", "texts.jsonl", "--out", "scores.jsonl", *steered)
    assert ended.code == 0, ended.err
    ids = by_hand.tokenizer.encode("def main")
    scores = by_hand.logits(ids).log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    found = json.loads((tmp_path / "scores.jsonl").read_text(encoding="utf-8"))["log_likelihood"]
    assert found == pytest.approx(float(scores.sum()), rel=1e-5)


class Shorter(Plugin):
    """An edit that loses a token."""

    api = (1, 0)

    @hookimpl
    def intervene(self) -> Any:
        return {"layers.0": lambda values, positions: values[:, 1:]}


class Misspelt(Plugin):
    """A pattern that matches nothing."""

    api = (1, 0)

    @hookimpl
    def intervene(self) -> Any:
        return {"layer.0": lambda values, positions: values}


def test_wrong_edits(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"an edit of 'layers\.0' must give \[2, 16, 32\], found \[2, 15, 32\]"):
        evaluated(str(tmp_path / "a"), "decoder", [Shorter], {})
    with pytest.raises(ConfigError, match=r"'misspelt'.*'layer\.0' matches no module\. Did you mean 'layers\.0"):
        evaluated(str(tmp_path / "b"), "decoder", [Misspelt], {})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, r"steer\.add: is empty, and so is steer\.zero_heads"),
        ({"add": ["layers.1=honesty"], "path": ""}, r"steer\.path: is needed by steer\.add"),
        ({"add": ["layers.1"]}, r"steer\.add: expected MODULE=NAME, like layers\.3=honesty, found 'layers\.1'"),
        ({"add": ["layers.1=honest"]}, r"steer\.add: .*vectors\.safetensors has no 'honest'\. Did you mean 'honesty'"),
        ({"add": ["layer.1=honesty"]}, r"'layer\.1' matches no module\. Did you mean"),
        ({"add": ["layers.1.feed_forward.up=honesty"]}, r"up gives 48 features, and its vector has 32"),
        ({"zero_heads": ["0"]}, r"steer\.zero_heads: expected L\.H, like 3\.0, found '0'"),
        ({"zero_heads": ["7.0"]}, r"steer\.zero_heads: 7\.0: the model's layers are 0 to 1"),
        ({"zero_heads": ["1.4"]}, r"steer\.zero_heads: 1\.4: the heads of layer 1 are 0 to 3"),
    ],
)
def test_bad_input(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    given = {f"steer.{key}": one for key, one in config.items()}
    file = steer_cases.settings(tmp_path)["steer.path"]
    with pytest.raises(ConfigError, match=says):
        evaluated(
            str(tmp_path / "run"), "decoder", ["steer"], ({"steer.path": file} if "add" in config else {}) | given
        )
