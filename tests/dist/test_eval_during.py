"""The plugin `lm_eval`: the numbers of `forge eval --task`, on every layout, and a run that is bit for bit the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import eval_tasks
import forge_cli
from forge_cli import forge, one_message

pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.dist, pytest.mark.e2e]

SETTINGS = (
    forge_cli.DECODER.replace("layers = 1", "layers = 2")
    .replace("sequence = 16", "sequence = 64")
    .replace("[checkpoint]", "evaluate_every = 2\n[checkpoint]")
    .replace("steps = 3", "steps = 4")
)
YAML = """\
task: chosen
dataset_path: json
dataset_kwargs: {data_files: {test: modules.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: '{{name}}:'
doc_to_choice: choices
doc_to_target: 0
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
TASKS = ("-p", "lm_eval", "-s", 'lm_eval.tasks=["scored.toml", "chosen.yaml"]')
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "fsdp2": ("-p", "fsdp2"),
    "tp2": ("-p", "tp", "-s", "parallel.tp=2"),
    "pp2": ("-p", "pp", "-s", "parallel.pp=2"),
    "cp2": ("-p", "cp", "-s", "parallel.cp=2"),
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that asks tasks, and one that does not."""
    folder = tmp_path_factory.mktemp("during")
    eval_tasks.write_desk(folder)
    (folder / "scored.toml").write_text(eval_tasks.TOML.partition("[words]")[0], encoding="utf-8")
    (folder / "chosen.yaml").write_text(YAML, encoding="utf-8")
    (folder / "mine.toml").write_text(SETTINGS + '[text]\npath = "long.txt"\n', encoding="utf-8")
    (folder / "long.txt").write_text("say one and then say two\n" * 400, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        for name, more in (("plain", ()), ("asked", TASKS)):
            ended = forge("train", "mine.toml", "--name", name, "--quiet", "-s", "checkpoint.every=2", *more)
            assert ended.code == 0, ended.err
    return folder


@pytest.fixture(autouse=True)
def here(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(desk / "cache"))


def evaluations(run: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in Path("runs", run, "events.jsonl").read_text().splitlines()]
    return [one for one in events if one["event"] == "evaluation"]


def test_its_numbers_are_those_of_forge_eval() -> None:
    found = {one["step"]: one["metrics"] for one in evaluations("asked")}
    assert [*found] == [2, 4]
    for step, metrics in found.items():
        words = ("--task", "scored.toml", "--task", "chosen.yaml", "--json")
        ended = forge("eval", f"runs/asked/checkpoints/step-0000000{step}", *words)
        assert ended.code == 0, ended.err
        expected = {
            f"lm_eval.{task}.{metric}": pytest.approx(one["value"], rel=1e-5)
            for task, result in ended.json["tasks"].items()
            for metric, one in result["metrics"].items()
        }
        assert {key: one for key, one in metrics.items() if key.startswith("lm_eval.")} == expected
        assert {"lm_eval.prose.bits_per_byte", "lm_eval.modules.accuracy", "lm_eval.chosen.acc_norm"} <= metrics.keys()
    assert found[2] != found[4]


def test_no_bit_of_the_run_is_another() -> None:
    def numbers(run: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in Path("runs", run, "metrics.jsonl").read_text().splitlines()]
        return [{key: line[key] for key in ("step", "loss", "grad_norm", "lr")} for line in lines]

    assert numbers("asked") == numbers("plain")
    assert [one["loss"] for one in evaluations("asked")] == [one["loss"] for one in evaluations("plain")]
    ended = forge("checkpoint", "diff", "runs/asked", "runs/plain", "--weights")
    assert ended.code == 0, ended.out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree(layout: str) -> None:
    words = ("--name", layout, "--quiet", "--nproc", "2", *TASKS, *LAYOUTS[layout])
    ended = forge("train", "mine.toml", *words)
    assert ended.code == 0, ended.err
    for mine, theirs in zip(evaluations(layout), evaluations("asked"), strict=True):
        assert mine["metrics"] == {key: pytest.approx(one, rel=1e-4) for key, one in theirs["metrics"].items()}


def test_it_costs_only_its_forward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_train.step.forward import Forward

    passes = []
    measure = Forward.measure
    monkeypatch.setattr(Forward, "measure", lambda self, *rest: (passes.append(rest[2]), measure(self, *rest))[1])
    assert not (ended := forge("eval", "runs/asked", *TASKS)).code, ended.err
    texts = [json.loads(line)["text"] for line in Path("prose.jsonl").read_text().splitlines()]
    windows = sum(-(-len(text.encode()) // 64) for text in texts)
    rows = 4 * 3 + 4 * 3 + windows  # choices of two tasks, and windows
    assert passes == [-(-rows // (2 * 2)) * 2], "micro-batches of two rows, in whole global batches of two"


BAD = {
    "lm_eval.tasks=[]": "lm_eval.tasks: name at least one task",
    'lm_eval.tasks=["gone.toml"]': "there is no file gone.toml",
    'lm_eval.tasks=["tasks.toml"]': "lm_eval.tasks: a task has the model write",
}


@pytest.mark.parametrize("setting", BAD)
def test_mistakes(setting: str) -> None:
    said = one_message(forge("train", "mine.toml", "--name", "bad", "-p", "lm_eval", "-s", setting), 2)
    assert BAD[setting] in said
    assert not Path("runs/bad").exists()


def test_a_run_that_never_evaluates_never_asks() -> None:
    words = ("--name", "bad", *TASKS, "-s", "train.evaluate_every=0")
    assert "so no task of lm_eval is ever asked" in one_message(forge("train", "mine.toml", *words), 2)
