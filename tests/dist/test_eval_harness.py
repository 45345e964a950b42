"""Tasks of lm-eval: a task of each output type, on a run, a checkpoint and an export, by one process and by two."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import eval_tasks
import warm
from forge_cli import forge, one_message

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.dist, pytest.mark.e2e]

TASKS: Mapping[str, str] = {
    "last_words": """\
output_type: loglikelihood
doc_to_text: 'Module {{name}} says:'
doc_to_target: ' {{choices[0]}}'
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "whole_texts": """\
output_type: loglikelihood_rolling
doc_to_text: ''
doc_to_target: '{{name}} says {{choices | join(" and ")}}, or so it says in {{name}}'
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "chosen": """\
output_type: multiple_choice
doc_to_text: '{{name}}:'
doc_to_choice: choices
doc_to_target: 0
num_fewshot: 1
fewshot_split: test
metric_list: [{metric: acc}]
""",
    "normalised": """\
output_type: multiple_choice
doc_to_text: '{{name}}:'
doc_to_choice: choices
doc_to_target: '{{[0, 2]}}'
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "written": """\
output_type: generate_until
doc_to_text: 'say {{name}}'
doc_to_target: one
generation_kwargs: {until: ["\\n", "e"], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
""",
}
SCORED = [name for name, text in TASKS.items() if "generate" not in text]
WORDS = [word for name in TASKS for word in ("--task", f"{name}.yaml")]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, its export, the tasks, and what one process says of the run."""
    warm.preload("lm_eval.evaluator", "lm_eval.tasks")
    folder = tmp_path_factory.mktemp("harness")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        eval_tasks.write_desk(folder)
        for name, text in TASKS.items():
            head = f"task: {name}\ndataset_path: json\ntest_split: test\n"
            data = f"dataset_kwargs:\n  data_files:\n    test: {folder / 'records.jsonl'}\n"
            (folder / f"{name}.yaml").write_text(head + data + text, encoding="utf-8")
        records = [json.loads(line) for line in (folder / "modules.jsonl").read_text().splitlines()]
        eval_tasks.write_lines(folder / "records.jsonl", ({**one, "answer": 0} for one in records))
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        words = (
            "-p",
            "text",
            "-s",
            "text.path=prose.jsonl",
            "-s",
            "train.steps=2",
            "-s",
            "train.evaluate_every=0",
            "-s",
            "train.sequence=32",
        )
        small = ("-s", "train.global_batch=2", "-s", "train.micro_batch=1", "-s", "run.device=cpu")
        assert not (ended := forge("train", "hf", "--name", "tuned", "--quiet", *words, *small)).code, ended.err
        assert not (ended := forge("checkpoint", "export", "runs/tuned", "exported")).code, ended.err
        evaluated(folder, "runs/tuned", "run")
    return folder


def evaluated(folder: Path, path: str, out: str, *more: str) -> dict[str, Any]:
    environment = {"FORGE_SET": "run.device=cpu", "HF_DATASETS_CACHE": str(folder / "cache")}
    ended = forge("eval", path, *WORDS, "--samples", out, "--json", *more, environment=environment)
    assert ended.code == 0, ended.err
    return ended.json["tasks"]


def kept(out: str) -> list[dict[str, Any]]:
    """Results with what each record contributes, and samples."""
    found = []
    for name in TASKS:
        found.append(json.loads(Path(out, f"{name}.json").read_text()))
        found += [json.loads(line) for line in Path(out, f"{name}.jsonl").read_text().splitlines()]
    return found


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("runs/tuned/checkpoints/step-00000002", ()),
        ("exported", ()),
        ("runs/tuned", ("--nproc", "2", "-p", "fsdp2")),
        ("exported", ("--nproc", "2", "-p", "fsdp2")),
    ],
)
def test_the_scores_are_the_same_wherever_the_weights_are(
    desk: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str, more: tuple[str, ...]
) -> None:
    monkeypatch.chdir(desk)
    evaluated(desk, path, str(tmp_path / "out"), *more)
    assert kept(str(tmp_path / "out")) == kept("run")


def test_the_scores_are_those_of_its_own_model(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(desk)
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    tasks = TaskManager(include_defaults=False).load([f"{name}.yaml" for name in SCORED])
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=1234)
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    model = HFLM(pretrained="exported", device="cpu", batch_size=4, dtype="float32")
    theirs = lm_eval.evaluate(model, tasks, bootstrap_iters=1000)
    for name in SCORED:
        mine = json.loads(Path("run", f"{name}.json").read_text())
        for metric, one in mine["metrics"].items():
            assert one["value"] == pytest.approx(theirs["results"][name][f"{metric},none"], rel=1e-5), (name, metric)
            error = theirs["results"][name][f"{metric}_stderr,none"]
            assert one["error"] > 0 if error == "N/A" else one["error"] == pytest.approx(error, rel=1e-4)
        samples = [json.loads(line) for line in Path("run", f"{name}.jsonl").read_text().splitlines()]
        for own, other in zip(samples, theirs["samples"][name], strict=True):
            expected = json.loads(json.dumps(other["resps"]))
            assert own["resps"] == [[_near(one) for one in request] for request in expected]
            assert own["arguments"] == json.loads(json.dumps(other["arguments"]))


def _near(value: Any) -> Any:
    if isinstance(value, list):  # log-likelihood, and whether it is greedy
        return [pytest.approx(value[0], rel=1e-5), value[1]]
    return pytest.approx(value, rel=1e-5)


def test_answers_end_before_their_stop_text(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    samples = [json.loads(line) for line in Path("run/written.jsonl").read_text().splitlines()]
    texts = [one["resps"][0][0] for one in samples]
    assert all(isinstance(text, str) for text in texts)
    assert any(texts)
    assert not any("e" in text or "\n" in text for text in texts)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("doc_to_target: one", "doc_to_target: two"),
        ("metric: exact_match", "metric: exact_match, ignore_case: true"),
        (
            "metric_list:",
            "filter_list: [{name: none, filter: [{function: lowercase}, {function: take_first}]}]\nmetric_list:",
        ),
    ],
)
def test_results_that_were_measured_otherwise_are_not_compared(
    desk: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, old: str, new: str
) -> None:
    monkeypatch.chdir(desk)
    file = tmp_path / "written.yaml"
    file.write_text((desk / "written.yaml").read_text().replace(old, new), encoding="utf-8")
    environment = {"FORGE_SET": "run.device=cpu", "HF_DATASETS_CACHE": str(desk / "cache")}
    ended = forge("eval", "exported", "--task", file, "--against", "run", "--json", environment=environment)
    assert ended.code == 0, ended.err
    assert [*ended.json["differences"]["written"]] == ([] if new else ["exact_match"])


def test_what_can_not_be_had_is_told_before_anything_is_computed(
    desk: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(desk)
    monkeypatch.setattr("forge_train_tools.evaluation.harness._answers", lambda host, port: False)

    def refused(task: str) -> str:
        return one_message(forge("eval", "exported", "--task", task, environment={"FORGE_SET": "run.device=cpu"}), 2)

    assert "there is no file gone.yaml" in refused("gone.yaml")
    hub = (desk / "chosen.yaml").read_text().replace("dataset_path: json", "dataset_path: allenai/ai2_arc")
    (tmp_path / "hub.yaml").write_text(hub.partition("dataset_kwargs")[0] + TASKS["chosen"], encoding="utf-8")
    assert "its data set can't be had here" in (said := refused(str(tmp_path / "hub.yaml")))
    assert "dataset_path: json" in said
    unsafe = (desk / "written.yaml").read_text() + "unsafe_code: true\n"
    (tmp_path / "unsafe.yaml").write_text(unsafe, encoding="utf-8")
    assert "runs what the model wrote" in refused(str(tmp_path / "unsafe.yaml"))
    odd = (desk / "written.yaml").read_text().replace("max_gen_toks: 6", "max_gen_toks: 6, num_beams: 3")
    (tmp_path / "odd.yaml").write_text(odd, encoding="utf-8")
    assert "num_beams can't be had here" in refused(str(tmp_path / "odd.yaml"))
    long = (desk / "written.yaml").read_text().replace("max_gen_toks: 6", "max_gen_toks: 64")
    (tmp_path / "long.yaml").write_text(long, encoding="utf-8")
    assert "may have 64 tokens, and the model reads 64" in refused(str(tmp_path / "long.yaml"))


def test_a_misspelt_name_gets_a_suggestion(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    said = one_message(forge("eval", "exported", "--task", "hellaswagg"), 2)
    assert "lm-eval has no such task" in said
    assert "Did you mean 'hellaswag'?" in said
