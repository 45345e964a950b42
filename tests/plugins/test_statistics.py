"""`statistics`: what is logged is what one finds by hand, at logged steps alone, and no number of the run changes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_train import ConfigError, Plugin, hookimpl
from forge_train_kit.layers import AttentionOptions
from forge_train_kit.model import LargestLogit
from forge_train_tools.testing import RunForge
from hot_path import Watch, counting, waits


class ByHand(Plugin):
    """Keeps what the last step was made of."""

    api = (1, 0)
    gradients: dict[str, torch.Tensor] = {}
    weights: list[dict[str, torch.Tensor]] = []
    outputs: list[torch.Tensor] = []

    @hookimpl
    def on_start(self, job: Any, model: Any) -> None:
        ByHand.weights, self.model = [], model
        module = dict(model.named_modules())["layers.1.feed_forward"]
        module.register_forward_hook(lambda _, __, output: ByHand.outputs.append(output.detach()))

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        ByHand.gradients = {name: one.grad.clone() for name, one in self.model.named_parameters()}
        ByHand.weights = [{name: one.detach().clone() for name, one in self.model.named_parameters()}]

    @hookimpl
    def on_step(self, step: Any) -> None:
        ByHand.weights += [{name: one.detach().clone() for name, one in self.model.named_parameters()}]
        ByHand.step_outputs, ByHand.outputs = ByHand.outputs, []


def norm(tensors: dict[str, torch.Tensor], start: str = "") -> float:
    return math.sqrt(sum(float(one.double().square().sum()) for name, one in tensors.items() if name.startswith(start)))


@pytest.mark.slow
def test_what_one_finds_by_hand(run_forge: RunForge) -> None:
    config = {"log.every": 3, "statistics.activations": ["*.feed_forward"], "statistics.layers": True}
    run = run_forge([ByHand, "statistics"], config, steps=3)
    (line,) = [{key.removeprefix("statistics."): value for key, value in one.items()} for one in run.metrics]
    before, after = ByHand.weights
    moved = {name: after[name] - before[name] for name in after}
    for group in ("layers.0.attention.", "layers.1.feed_forward.", "embedding."):
        assert line[f"parameters.{group[:-1]}"] == pytest.approx(norm(after, group), rel=1e-12)
        assert line[f"gradients.{group[:-1]}"] == pytest.approx(norm(ByHand.gradients, group), rel=1e-12)
        assert line[f"updates.{group[:-1]}"] == pytest.approx(norm(moved, group), rel=1e-12)
    whole = math.hypot(*(value for key, value in line.items() if key.startswith("gradients.")))
    assert whole == pytest.approx(line["grad_norm"], rel=1e-5)
    outputs = torch.cat([one.double().flatten() for one in ByHand.step_outputs])
    assert line["activations.layers.1.feed_forward.rms"] == pytest.approx(float(outputs.square().mean().sqrt()))
    assert line["activations.layers.1.feed_forward.max"] == float(outputs.abs().max())
    assert line["activations.layers.1.feed_forward.zeros"] == 0


def test_users_patterns_and_what_is_asked_for(run_forge: RunForge) -> None:
    config = {"statistics.groups": ["layers.*.attention.*", "layers.0.*"], "statistics.norms": ["gradients"]}
    run = run_forge(["statistics"], config, steps=1)
    found = {key for key in run.metrics[0] if key.startswith("statistics.")}
    assert found == {"statistics.gradients.layers.attention", "statistics.gradients.layers.0"}


@pytest.mark.parametrize("others", [[], ["ac"], pytest.param(["compile"], marks=pytest.mark.extended)])
def test_no_number_changes_and_nothing_is_observed_twice(others: list[str], run_forge: RunForge) -> None:
    """Recomputed layers call their modules a second time."""
    settings: dict[str, Any] = {"log.every": 2, "statistics.activations": ["layers.0*", "*.k"]}
    settings |= {"statistics.attention_logits": True, "compile.backend": "eager"}
    config = {key: value for key, value in settings.items() if "compile" in others or "compile" not in key}
    plain = run_forge(["statistics"], {k: v for k, v in config.items() if "compile" not in k}, steps=4, name="plain")
    run = run_forge(["statistics", *others], config, steps=4)
    kept = {key: value for key, value in config.items() if not key.startswith("statistics")}
    without = run_forge(others, kept, steps=4, name="without")
    for line, plain_line, right in zip(run.numbers, plain.numbers, without.numbers, strict=True):
        assert {key: value for key, value in line.items() if not key.startswith("statistics")} == right
        assert line == pytest.approx(plain_line, rel=1e-5)
    assert "statistics.attention_logits.layers.0.attention" in run.metrics[0]


def test_it_waits_for_nothing_between_logged_steps(run_forge: RunForge) -> None:
    config = {"log.every": 4, "statistics.activations": ["layers.*"], "statistics.attention_logits": True}
    with counting(4) as found:
        run_forge(["statistics", Watch], config, steps=12)
    assert waits(found) == {}


def test_a_resumed_run_knows_its_step(run_forge: RunForge, tmp_path: Path) -> None:
    config = {"log.every": 2, "checkpoint.every": 1, "statistics.activations": ["layers.*.attention"]}
    whole = run_forge(["statistics"], config, steps=4, name="whole", folder=tmp_path)
    run_forge(["statistics"], config, steps=4, stop_at=3, name="parts", folder=tmp_path)
    assert run_forge(["statistics"], config, steps=4, name="parts", folder=tmp_path).numbers == whole.numbers


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"groups": ["layers.7.*"]}, r"statistics\.groups: 'layers\.7\.\*' matches nothing"),
        ({"activations": ["attn"]}, r"statistics\.activations: 'attn' matches nothing"),
        ({"groups": ["norm.*", "*norm.*"]}, r"'norm\.\*' and '\*norm\.\*' would both be logged as 'norm'"),
        ({"norms": []}, r"statistics\.norms: is empty, and nothing else"),
        ({"norms": [], "groups": ["*"], "attention_logits": True}, r"statistics\.groups: has no effect"),
    ],
)
def test_bad_input(config: dict[str, Any], says: str, run_forge: RunForge) -> None:
    with pytest.raises(ConfigError, match=says):
        run_forge(["statistics"], {"statistics": config})


def test_one_graph_of_a_unit_that_is_watched_is_refused(run_forge: RunForge) -> None:
    config = {"compile.backend": "eager", "compile.fullgraph": True, "statistics.attention_logits": True}
    with pytest.raises(ConfigError, match=r"compile\.fullgraph: can't hold where statistics observes"):
        run_forge(["statistics", "compile"], config)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_the_largest_logit_is_that_of_a_dense_matrix(documents: bool, window: int | None) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 150, 4, 8), torch.randn(2, 150, 2, 8)
    ids = (torch.arange(150) // 37).expand(2, -1) if documents else None
    logits = torch.einsum("bqhd,bkhd->bhqk", query, key.repeat_interleave(2, 2)) * 0.3
    rows, columns = torch.arange(150)[:, None], torch.arange(150)
    hidden = (columns > rows) | (rows - columns >= (window or 999))
    hidden = hidden | (ids[:, :, None] != ids[:, None, :])[:, None] if ids is not None else hidden
    right = logits.masked_fill(hidden, 0).abs().max()
    assert right < logits.abs().max()
    found = LargestLogit()(query, key, AttentionOptions(document_ids=ids, window=window, scale=0.3))
    torch.testing.assert_close(found, right)
