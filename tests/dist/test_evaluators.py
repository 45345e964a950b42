"""Evaluations that a plugin names, with data and metrics of its own: in a run, by `forge eval`, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import accuracy
import compositions
from accuracy import Accuracy, Seldom, Silent, Unmeasured
from forge_cli import forge
from forge_train import ConfigError, PluginError
from forge_train_tools.testing import Pool, RunForge, Verifier

pytestmark = [pytest.mark.dist]

EVALUATED: dict[str, Any] = {
    "train.evaluate_every": 2,
    "train.evaluate_batches": 2,
    "train.global_batch": 4,
    "train.micro_batch": 2,
    "adamw.lr": 1e-2,
    "checkpoint.every": 2,
}
LAYOUTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "dp2": (["fsdp2"], {"parallel.dp_shard": 2}),
    "tp2": (["tp"], {"parallel.tp": 2}),
}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    exact = all(one[key] == other[key] for key in ("tokens",))
    near = {"loss": one["loss"], **one["metrics"]}, {"loss": other["loss"], **other["metrics"]}
    return exact and near[0].keys() == near[1].keys() and near[0] == pytest.approx(near[1], rel=1e-5)


def test_the_same_numbers_in_a_run_and_by_forge_eval_on_one_process_and_on_two(ranks: Pool, tmp_path: Path) -> None:
    plugins = ["accuracy:Accuracy"]
    (alone,) = ranks.run(accuracy.train, 1, folder=str(tmp_path / "one"), plugins=plugins, config=EVALUATED)
    assert len(alone["found"]) == 2
    assert {*alone["found"][0]["metrics"]} == {"counting.accuracy", "counting.confidence", "text.bits_per_byte"}
    assert alone["found"][0]["metrics"] != alone["found"][1]["metrics"]
    assert all(0 < found["metrics"]["counting.accuracy"] < 1 for found in alone["found"])
    for name, (more, config) in LAYOUTS.items():
        arguments = {"folder": str(tmp_path / name), "plugins": [*plugins, *more], "config": {**EVALUATED, **config}}
        for reply in ranks.run(accuracy.train, 2, **arguments):
            assert all(same(*pair) for pair in zip(reply["found"], alone["found"], strict=True)), (name, reply)
    first = str(Path(alone["run"]) / "checkpoints" / "step-00000002")
    for world in (1, 2):
        for path, expected in ((first, alone["found"][0]), (alone["run"], alone["found"][1])):
            for reply in ranks.run(accuracy.evaluate, world, path=path):
                assert reply["world"] == world
                assert same(reply, expected), (world, reply, expected)


def test_forge_eval_prints_a_table_and_json_and_leaves_no_trace(run_forge: RunForge, tmp_path: Path) -> None:
    run = run_forge(["accuracy:Accuracy"], EVALUATED, steps=2, folder=tmp_path)
    (event,) = [event for event in run.events if event["event"] == "evaluation"]
    before = sorted(tmp_path.rglob("*"))
    found = forge("eval", run.run, "--json").json
    assert same(found, event)
    assert (found["step"], found["world"], Path(found["checkpoint"]).name) == (2, 1, "step-00000002")
    assert sorted(tmp_path.rglob("*")) == before
    shown = [line.split() for line in forge("eval", run.run).out.splitlines()]
    assert ["evaluation", "metric", "value"] in shown
    assert ["tokens", "256"] in [line[-2:] for line in shown]
    assert any(line[:2] == ["counting", "accuracy"] for line in shown)
    more = forge("eval", run.run, "-s", "train.evaluate_batches=1", "--json").json
    assert more["tokens"] * 2 == found["tokens"]
    few = {"FORGE_SET": "train.evaluate_batches=1"}
    assert forge("eval", run.run, "--json", environment=few).json == more
    stronger = forge("eval", run.run, "-s", "train.evaluate_batches=2", "--json", environment=few)
    assert stronger.json["tokens"] == found["tokens"]
    assert more["metrics"]["counting.accuracy"] == found["metrics"]["counting.accuracy"]  # it has batches of its own


@pytest.mark.e2e
def test_forge_eval_starts_processes_and_takes_an_evaluator_along(run_forge: RunForge, tmp_path: Path) -> None:
    run = run_forge(config=EVALUATED, steps=2, folder=tmp_path)
    alone = forge("eval", run.run, "-p", "accuracy:Accuracy", "--json")
    two = forge("eval", run.run, "-p", "accuracy:Accuracy", "--nproc", 2, "--json")
    assert (alone.code, two.code) == (0, 0), alone.err + two.err
    assert "counting.accuracy" in two.json["metrics"]
    assert (two.json["world"], alone.json["world"]) == (2, 1)
    assert same(two.json, alone.json)


def test_what_can_not_be_evaluated_is_refused(run_forge: RunForge, tmp_path: Path) -> None:
    for arguments, says in (
        ([tmp_path / "nothing"], "nothing"),
        ([tmp_path / "nothing", "--nproc", 2], "nothing"),
        ([tmp_path / "nothing", "--nproc", 0], "--nproc"),
    ):
        ended = forge("eval", *arguments)
        assert ended.code == 2
        assert says in ended.err
    with pytest.raises(PluginError, match=r"`metrics` is not a dictionary of Metric"):
        run_forge([Unmeasured], EVALUATED)
    with pytest.raises(ConfigError, match=r"Two evaluations are named 'counting': Plugin 'accuracy' .* 'silent'"):
        run_forge([Accuracy, Silent], EVALUATED)


def test_an_evaluator_says_when_it_is_due_and_needs_no_batch(run_forge: RunForge, tmp_path: Path) -> None:
    run = run_forge([Seldom], {**EVALUATED, "train.evaluate_every": 1}, steps=4, folder=tmp_path)
    found = [event["metrics"] for event in run.events if event["event"] == "evaluation"]
    assert ["seldom.parameters" in one for one in found] == [False, False, True, False]
    assert found[2]["seldom.parameters"] > 0


def test_forge_verify_takes_no_batch_for_it_either(verify: Verifier, composition_file: Path) -> None:
    request = compositions._request(composition_file, ("fsdp2", "accuracy:Seldom"), {"train.evaluate_every": 1})
    verdict = verify(request, 2, steps=3)
    assert verdict.agree, verdict


def test_without_an_evaluator_an_evaluation_is_what_it_was(run_forge: RunForge) -> None:
    run = run_forge(config=EVALUATED, steps=2)
    (event,) = [event for event in run.events if event["event"] == "evaluation"]
    assert {"event", "time", "step", "loss", "tokens", "metrics"} <= {*event}
    assert {*event["metrics"]} == {"text.bits_per_byte"}
