"""The plugin `lm_eval`: the numbers of `forge eval --task`, on every layout, and a run that is bit for bit the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import eval_tasks
import forge_cli
import warm
from crossed import marked
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
doc_to_choice: !function share.choices
doc_to_target: 0
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WRITTEN = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: modules.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: 'say {{{{name}}}}'
doc_to_target: a
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4, do_sample: true, temperature: 1.0}}
metric_list: [{{metric: share, aggregation: mean, higher_is_better: true}}]
process_results: !function share.of_letters
"""
SHARE = """\
import random

def choices(doc):
    random.seed(1)
    return doc["choices"]

def of_letters(doc, results):
    random.seed(2)
    return {"share": sum(ord(one) for one in results[0]) / 1000}
"""
SCORED, ALL = ("scored.toml", "chosen.yaml"), ("tasks.toml", "chosen.yaml", "written.yaml", "drawn.yaml")


def asking(*tasks: str) -> tuple[str, ...]:
    return "-p", "lm_eval", "-s", f"lm_eval.tasks={json.dumps(tasks)}"


TASKS = asking(*ALL)
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "fsdp2": ("-p", "fsdp2", *TASKS),
    "tp2": ("-p", "tp", "-s", "parallel.tp=2", *TASKS),
    "pp2": ("-p", "pp", "-s", "parallel.pp=2", *TASKS),
    "cp2": ("-p", "cp", "-s", "parallel.cp=2", *TASKS),
}
KEPT = ("--quiet", "-s", "checkpoint.every=2")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that asks tasks, and one that does not."""
    warm.preload("lm_eval.evaluator", "lm_eval.tasks")
    folder = tmp_path_factory.mktemp("during")
    eval_tasks.write_desk(folder)
    (folder / "scored.toml").write_text(eval_tasks.TOML.partition("[words]")[0], encoding="utf-8")
    (folder / "chosen.yaml").write_text(YAML, encoding="utf-8")
    (folder / "share.py").write_text(SHARE, encoding="utf-8")
    for name in ("written", "drawn"):
        (folder / f"{name}.yaml").write_text(WRITTEN.format(name=name), encoding="utf-8")
    (folder / "mine.toml").write_text(SETTINGS + '[text]\npath = "long.txt"\n', encoding="utf-8")
    (folder / "long.txt").write_text("say one and then say two\n" * 400, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        for name, more in (("plain", ()), ("asked", TASKS)):
            ended = forge("train", "mine.toml", "--name", name, *KEPT, *more)
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
        words = [word for task in ALL for word in ("--task", task)]
        ended = forge("eval", f"runs/asked/checkpoints/step-0000000{step}", *words, "--json")
        assert ended.code == 0, ended.err
        expected = {
            f"lm_eval.{task}.{metric}": pytest.approx(one["value"], rel=1e-5)
            for task, result in ended.json["tasks"].items()
            for metric, one in result["metrics"].items()
        }
        assert {key: one for key, one in metrics.items() if key.startswith("lm_eval.")} == expected
        assert {"lm_eval.prose.bits_per_byte", "lm_eval.modules.accuracy", "lm_eval.chosen.acc_norm"} <= metrics.keys()
        assert "lm_eval.words.pass@2" in metrics
        assert metrics["lm_eval.written.share"] == metrics["lm_eval.drawn.share"] > 0, "what else is asked changes none"
    assert found[2] != found[4]


@pytest.mark.parametrize("layout", [(), ("--nproc", "2", "-p", "fsdp2")], ids=["one", "fsdp2"])
def test_no_bit_of_the_run_is_another(layout: tuple[str, ...]) -> None:
    asked, plain = "asked", "plain"
    if layout:
        asked, plain = "asked-on-two", "plain-on-two"
        for name, more in ((asked, TASKS), (plain, ())):
            assert not (ended := forge("train", "mine.toml", "--name", name, *KEPT, *layout, *more)).code, ended.err

    def numbers(run: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in Path("runs", run, "metrics.jsonl").read_text().splitlines()]
        return [{key: line[key] for key in ("step", "loss", "grad_norm", "lr")} for line in lines]

    assert numbers(asked) == numbers(plain)
    assert [one["loss"] for one in evaluations(asked)] == [one["loss"] for one in evaluations(plain)]
    found = forge("checkpoint", "diff", f"runs/{asked}", f"runs/{plain}", "--json").json
    assert not found["tensors"], "weights, optimizer, random numbers"
    assert [one["key"] for one in found["state"]] == ["plugin lm_eval"]


@pytest.mark.parametrize("layout", marked(LAYOUTS, ["fsdp2", "pp2", "cp2"]))
def test_layouts_agree(layout: str) -> None:
    ended = forge("train", "mine.toml", "--name", layout, "--quiet", "--nproc", "2", *LAYOUTS[layout])
    assert ended.code == 0, ended.err
    for mine, theirs in zip(evaluations(layout), evaluations("asked"), strict=True):
        assert mine["metrics"] == {key: pytest.approx(one, rel=1e-4) for key, one in theirs["metrics"].items()}
        assert "lm_eval.chosen.acc" in mine["metrics"]


def test_its_own_interval_holds_after_a_resume_and_at_the_end() -> None:
    own = ("-s", "train.steps=5", "-s", "train.evaluate_every=1", "-s", "lm_eval.every=3")
    words = ("--quiet", *own, *asking("tasks.toml"))
    assert not (ended := forge("train", "mine.toml", "--name", "whole", *words)).code, ended.err
    first = ("-s", "checkpoint.every=2", "-s", "checkpoint.keep=3")
    assert not (ended := forge("train", "mine.toml", "--name", "parts", *words, *first)).code, ended.err
    began = "runs/parts/checkpoints/step-00000002"
    assert not (ended := forge("train", "mine.toml", "--name", "rest", "--resume", began, *words)).code, ended.err
    for run, steps in (("whole", range(1, 6)), ("rest", range(3, 6))):
        found = {one["step"]: one["metrics"] for one in evaluations(run)}
        assert [*found] == [*steps]
        for step, metrics in found.items():
            for key in ("lm_eval.words.accuracy", "lm_eval.prose.bits_per_byte"):
                assert (key in metrics) == (step in (3, 5)), (run, step)
            assert "text.bits_per_byte" in metrics


def test_it_costs_only_its_forward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_train_kit import evaluators
    from forge_train_tools.generation.forwards import Forwards

    passes, tokens = [], []
    measure, write = evaluators.measure, Forwards.__call__
    monkeypatch.setattr(evaluators, "measure", lambda *given: (passes.append(given[3]), measure(*given))[1])
    monkeypatch.setattr(Forwards, "__call__", lambda self, call: (tokens.append(1), write(self, call))[1])
    assert not (ended := forge("eval", "runs/asked", *asking(*SCORED))).code, ended.err
    texts = [json.loads(line)["text"] for line in Path("prose.jsonl").read_text().splitlines()]
    windows = sum(-(-len(text.encode()) // 64) for text in texts)
    rows = 4 * 3 + 4 * 3 + windows  # choices of two tasks, and windows
    assert passes == [-(-rows // (2 * 2)) * 2], "micro-batches of two rows, in whole global batches of two"
    assert not tokens
    passes.clear()
    assert not (ended := forge("eval", "runs/asked", *asking("written.yaml"))).code, ended.err
    assert passes[0] < 0, "no batch is taken"
    assert 0 < len(tokens) <= 4 + 4 * 4, "a pass for each prompt, and one for each further token of two rows"


BAD = {
    ("lm_eval.tasks=[]",): "lm_eval.tasks: name at least one task",
    ('lm_eval.tasks=["gone.toml"]',): "there is no file gone.toml",
    (
        'lm_eval.tasks=["tasks.toml"]',
        "train.sequence=6",
    ): "an answer of words may have 6 tokens, and train.sequence = 6",
    ('lm_eval.tasks=["failing.toml"]',): "lost.py:check failed: KeyError: 'there' (answer '')",
    ('lm_eval.tasks=["chosen.yaml"]', "lm_eval.every=3"): "3 is no multiple of train.evaluate_every = 2",
    (
        'lm_eval.tasks=["chosen.yaml"]',
        "lm_eval.every=4",
        "checkpoint.best=evaluation.lm_eval.chosen.acc",
    ): "is needed at each evaluation, and lm_eval.every = 4 leaves some out",
}


@pytest.mark.parametrize("settings", BAD)
def test_mistakes(settings: tuple[str, ...]) -> None:
    Path("lost.py").write_text("def check(answer, record):\n    return record['there']\n", encoding="utf-8")
    made = '[failing]\nkind = "generate"\ndata = "words.jsonl"\ncheck = "lost.py:check"\n'
    Path("failing.toml").write_text(made, encoding="utf-8")
    words = [word for one in settings for word in ("-s", one)]
    said = one_message(forge("train", "mine.toml", "--name", "bad", "-p", "lm_eval", *words), 2)
    assert BAD[settings] in said
    assert not Path("runs/bad").exists()


def test_a_run_that_never_evaluates_never_asks() -> None:
    words = ("--name", "bad", *TASKS, "-s", "train.evaluate_every=0")
    assert "so no task of lm_eval is ever asked" in one_message(forge("train", "mine.toml", *words), 2)
