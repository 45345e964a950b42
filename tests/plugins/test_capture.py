"""`capture` on one process: what it writes is what plain forward hooks see, and no number of the run changes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import capture_cases
from capture_cases import SHAPES, Hooks, by_hooks, captured, train
from forge_train import ConfigError
from forge_train_tools.testing import RunForge

pytest.importorskip("transformers")
EXPERTS = re.compile(r"\.experts(\.|$)")


@pytest.mark.parametrize("model", SHAPES)
def test_plain_hooks_see_the_same(model: str, tmp_path: Path) -> None:
    run = train(str(tmp_path), model, [], {}, classes=[Hooks])
    tensors, about = captured(run["run"])
    assert json.loads(about["left_out"]) == {}
    assert tensors["sample_ids"].tolist() == [*range(8, 16)]
    assert tensors["position_ids"].equal(torch.arange(16).expand(8, 16))
    words = {re.split(r"[\[#]", key)[0] for key in tensors}
    assert {name for name in Hooks.seen if not EXPERTS.search(name)} <= words
    assert not any(EXPERTS.search(name) for name in words)
    for key in tensors.keys() - {"sample_ids", "position_ids", "input_ids"}:
        assert tensors[key].equal(by_hooks(key, tensors[key])), key


@pytest.mark.parametrize("more", [[], ["ac"]])
def test_no_number_changes_and_nothing_is_recorded_twice(more: list[str], tmp_path: Path, run_forge: RunForge) -> None:
    run = train(str(tmp_path), "decoder", more, {"checkpoint.every": 2}, name="captured")
    config = {key: one for key, one in {**capture_cases.BASE, **capture_cases.HEADS}.items() if "capture" not in key}
    plain = run_forge(more, {**config, "checkpoint.every": 2}, steps=2)
    assert run["numbers"] == plain.numbers
    files = [next((one / "checkpoints/step-00000002").glob("rank-*")) for one in (Path(run["run"]), plain.run)]
    assert files[0].read_bytes() == files[1].read_bytes()
    ours = captured(run["run"])[0]
    theirs = captured(train(str(tmp_path), "decoder", [], {}, name="plain")["run"])[0]
    assert ours.keys() == theirs.keys()
    assert all(ours[key].equal(theirs[key]) for key in ours)


@pytest.mark.slow
def test_reductions(tmp_path: Path) -> None:
    def kept(reduce: str) -> dict[str, Tensor]:
        return captured(train(str(tmp_path), "decoder", [], {"capture.reduce": reduce}, name=reduce)["run"])[0]

    whole, mean, last, norm = map(kept, ("none", "mean", "last", "norm"))
    for name in ("layers.0", "head", "layers.1.attention.rope"):
        torch.testing.assert_close(mean[name], whole[name].mean(1))
        assert last[name].equal(whole[name][:, -1])
        torch.testing.assert_close(norm[name], whole[name].flatten(2).norm(dim=2))


def test_evaluations_and_every_so_many_steps(tmp_path: Path) -> None:
    config = {"capture.modules": ["layers.0"], "capture.steps": [1], "capture.every": 2, "capture.evaluation": True}
    more = {"train.evaluate_every": 2, "train.evaluate_batches": 2, "cross_entropy.chunk": 6}
    run = train(str(tmp_path), "decoder", [], {**config, **more})
    folder = Path(run["run"]) / "artifacts/capture"
    names = ["evaluation-00000002", "step-00000001", "step-00000002"]
    assert sorted(file.stem for file in folder.iterdir()) == names
    assert captured(run["run"], names[0])[0]["layers.0"].shape == (16, 16, 32)


def test_a_head_that_is_called_in_chunks(tmp_path: Path) -> None:
    whole, chunks = (
        captured(train(str(tmp_path), "decoder", [], {"cross_entropy.chunk": size}, name=f"c{size}")["run"])[0]
        for size in (0, 6)
    )
    torch.testing.assert_close(chunks["head"], whole["head"])
    assert chunks.keys() == whole.keys()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"modules": ["layers.*.atention"]},
            r"capture\.modules: 'layers\.\*\.atention' matches no module\. Did you mean",
        ),
        ({"modules": []}, r"capture\.modules: names no module"),
        ({"steps": []}, r"capture\.steps: names no step"),
        ({"steps": [3]}, r"capture\.steps: 3 is after the last step of the run, 2"),
        ({"every": 7}, r"capture\.every: 7 is more than the run's 2 steps"),
        ({"evaluation": True}, r"capture\.evaluation: needs evaluations"),
        ({"modules": ["*.experts"]}, r"capture\.modules: '\*\.experts' matches experts alone"),
    ],
)
def test_bad_input(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    model = "moe" if config.get("modules") == ["*.experts"] else "decoder"
    with pytest.raises(ConfigError, match=says):
        train(str(tmp_path), model, [], {f"capture.{key}": one for key, one in config.items()})


def test_what_is_compiled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"capture\.modules: .* is part of 'layers\.0', which torch\.compile has taken"
    ):
        train(str(tmp_path), "decoder", ["compile"], {"compile.backend": "eager"})
