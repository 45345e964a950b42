"""The weights that a run evaluates are those that `forge eval`, generation, exports and other runs take of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from forge_train import Plugin, PluginError, Span, SpanName, StepResult, hookimpl
from forge_train.plugin import hookspecs
from forge_train_contrib.ema import EMA
from forge_train_kit.contract import EvaluatedWeights
from forge_train_tools.offline.evaluate import evaluate
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.offline.opening import open_model
from forge_train_tools.testing import Pool, RunForge, TinyRun

pytestmark = [pytest.mark.dist]
EVALUATED: Mapping[str, Any] = {"train.evaluate_every": 1, "train.evaluate_batches": 2}
KINDS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "schedule_free": ("schedule_free", {"schedule_free.lr": 1e-2}),
    "ema": (EMA, {"adamw.lr": 1e-2}),
}


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest, run_forge: RunForge) -> TinyRun:
    plugin, settings = KINDS[request.param]
    return run_forge([plugin], {**EVALUATED, **settings}, steps=4)


def evaluated(run: TinyRun) -> dict[str, torch.Tensor]:
    with hookspecs.around("evaluate", run.job)():
        return {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}


def test_offline_it_is_evaluated_as_in_training(run: TinyRun, tmp_path: Path) -> None:
    (*_, last) = [event for event in run.events if event["event"] == "evaluation"]
    found = evaluate(run.run)
    assert found.loss == last["loss"], "to the bit"
    assert found.unlike_training == ()
    expected, training = evaluated(run), dict(run.model.named_parameters())
    opened = dict(open_model(run.run).model.named_parameters())
    assert all(torch.equal(weight, expected[name]) for name, weight in opened.items())
    assert any(not torch.equal(weight, training[name]) for name, weight in opened.items())
    export_checkpoint(run.run, tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "again")
    again = dict(open_model(tmp_path / "again", text=False).model.named_parameters())
    assert all(torch.equal(weight, expected[name]) for name, weight in again.items())


def test_a_run_that_starts_from_it_starts_from_these(
    run: TinyRun, run_forge: RunForge, ranks: Pool, tmp_path: Path
) -> None:
    config = {"train.init_from": str(run.run)}
    losses = {}
    for world, plugins in ((1, []), (2, ["fsdp2"])):
        (tmp_path / str(world)).mkdir()
        given = {"folder": str(tmp_path / str(world)), "plugins": plugins, "config": config, "steps": 2}
        losses[world] = ranks.run("muon_cases:train", world, timeout=200, **given)[0]["losses"]
    assert losses[2] == pytest.approx(losses[1], rel=1e-5)
    start = run_forge(["constant"], {**config, "adamw.lr": 1e-12, "adamw.weight_decay": 0.0}, steps=1)
    for name, weight in evaluated(run).items():
        torch.testing.assert_close(dict(start.model.named_parameters())[name], weight, rtol=1e-6, atol=1e-9)


class Nowhere(Plugin):
    """Names a state that there is not."""

    api = (1, 0)
    terms: Any = MappingProxyType({"optimizer.state.{name}.average": 1.0})

    @hookimpl
    def around(self, span: SpanName) -> Span | None:
        return EvaluatedWeights(nullcontext, self.terms) if span == "evaluate" else None


class Two(Nowhere):
    """Another one."""


def test_what_is_not_there_is_told_after_the_first_step(run_forge: RunForge) -> None:
    with pytest.raises(PluginError, match=r"hook around .*'optimizer.state.{name}.average' names no tensor"):
        run_forge([Nowhere], steps=2)


def test_terms_that_are_no_numbers_are_told_before_the_first_step(run_forge: RunForge) -> None:
    steps: list[int] = []

    class Counts(Plugin):
        @hookimpl
        def on_step(self, step: StepResult) -> None:
            steps.append(step.step)

    for terms, told in (({"model.{name}": "all"}, "'all'"), (["model.{name}"], "a list")):
        wrong = type("Wrong", (Nowhere,), {"terms": terms})
        with pytest.raises(
            PluginError, match=rf"'wrong'.*hook around .*`terms` must be a dictionary of number, .*{told}"
        ):
            run_forge([wrong, Counts], steps=1)
    assert not steps


def test_two_that_want_other_weights_are_refused(run_forge: RunForge) -> None:
    with pytest.raises(Exception, match="Plugins 'nowhere' and 'two' both evaluate other weights than those trained"):
        run_forge([Nowhere, Two], steps=2)
