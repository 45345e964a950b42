"""`forge eval --task` with files of tasks: numbers of transformers, whatever is beside a question."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
import torch

import eval_tasks
import forge_cli
import full_disk
from forge_cli import forge, one_message
from forge_train.mesh.distributed import DistributedContext
from forge_train_kit.format import format_number
from forge_train_tools.evaluation.asking import Asked
from forge_train_tools.evaluation.local_tasks import pass_at
from forge_train_tools.evaluation.paired import compare
from forge_train_tools.evaluation.results import Metric

pytest.importorskip("transformers")
CPU = {"FORGE_SET": "run.device=cpu"}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    eval_tasks.write_desk(folder)
    return folder


@pytest.fixture(autouse=True)
def here(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)


@pytest.fixture(scope="module")
def oracle(desk: Path) -> eval_tasks.ByTransformers:
    return eval_tasks.ByTransformers(desk / "hf")


def run(*more: object, path: object = "hf", task: object = "tasks.toml") -> dict[str, Any]:
    ended = forge("eval", path, "--task", task, *more, "--json", environment=CPU)
    assert ended.code == 0, ended.err
    return ended.json


def refusal(*more: object, path: object = "hf", code: int = 2) -> str:
    return one_message(forge("eval", path, *more, environment=CPU), code)


def test_a_full_disk_does_not_lose_the_numbers(tmp_path: Path) -> None:
    with full_disk.full_for(".json"):
        said = refusal("--task", "tasks.toml", "--samples", tmp_path / "kept", code=1)
    first, numbers = next(iter(run()["tasks"].items()))
    name, metric = next(iter(numbers["metrics"].items()))
    assert f"{tmp_path / 'kept'}: can't be written: No space left on device" in said
    assert f"Computed and not written: {first} {name} {format_number(metric['value'])}" in said


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()]


def value(found: Mapping[str, Any], task: str, metric: str) -> float:
    return float(found["tasks"][task]["metrics"][metric]["value"])


def test_log_likelihoods_are_those_of_transformers(tmp_path: Path, oracle: eval_tasks.ByTransformers) -> None:
    found = run("--samples", tmp_path / "out")
    choices = samples(tmp_path / "out", "modules")
    assert choices[1]["prompt"].startswith("Modules of Python.\n\nModule: json\nSays: ")
    assert choices[1]["prompt"].endswith("\n\nModule: keyword\nSays:")
    for one in choices:
        expected = [oracle.pair(one["prompt"], f" {choice}")[0] for choice in one["choices"]]
        assert one["log_likelihoods"] == pytest.approx(expected, rel=1e-6)
    texts = samples(tmp_path / "out", "prose")
    assert texts[0]["tokens"] > 2 * oracle.longest, "the first is read in windows"
    sums = [one["log_likelihood"] for one in texts]
    assert sums == pytest.approx([oracle.rolling(one["text"]) for one in texts], rel=1e-6)
    for unit in ("token", "byte", "word"):
        size = sum(one[f"{unit}s"] for one in texts)
        assert value(found, "prose", f"{unit}_perplexity") == pytest.approx(math.exp(-sum(sums) / size))
    assert [one["bytes"] for one in texts][1:] == [6, 24]
    assert found["tasks"]["modules"]["cut"] == 12, "all prompts are longer than what the model reads"


def test_accuracy_counts_likeliest_choices(tmp_path: Path) -> None:
    found = run("--samples", tmp_path / "out")
    each = {"accuracy": lambda text: 1, "accuracy_per_character": len, "accuracy_per_byte": lambda t: len(t.encode())}
    for name, size in each.items():
        right = []
        for one in samples(tmp_path / "out", "modules"):
            rates = [value / size(text) for value, text in zip(one["log_likelihoods"], one["choices"], strict=True)]
            right.append(float(rates.index(max(rates)) in one["answer"]))
        metric = found["tasks"]["modules"]["metrics"][name]
        assert metric == {"value": sum(right) / 4, "error": pytest.approx(stdev(right) / 2)}
    assert len({value(found, "modules", name) for name in each}) > 1, "the task tells them apart"


@pytest.mark.parametrize("batch", [1, 3, 32])
def test_what_is_beside_a_question_changes_nothing(tmp_path: Path, batch: int) -> None:
    run("--samples", tmp_path / "eight")
    run("--samples", tmp_path / "out", "--batch", batch)
    for task, field in (("modules", "log_likelihoods"), ("prose", "log_likelihood")):
        for mine, theirs in zip(samples(tmp_path / "out", task), samples(tmp_path / "eight", task), strict=True):
            assert mine[field] == pytest.approx(theirs[field], rel=1e-6)
    assert samples(tmp_path / "out", "words") == samples(tmp_path / "eight", "words")


def test_sampled_answers_do_not_depend_on_what_else_is_asked(tmp_path: Path) -> None:
    run("--samples", tmp_path / "all")
    run("--samples", tmp_path / "two", "--limit", 2)
    assert samples(tmp_path / "two", "words") == samples(tmp_path / "all", "words")[:2]
    answers = [answer for one in samples(tmp_path / "all", "words") for answer in one["answers"]]
    assert len({*answers}) > 3, "each is drawn by itself"


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer() -> None:
    for marks in itertools.product((0.0, 1.0), repeat=4):
        for k in (1, 2, 4):
            subsets = [*itertools.combinations(marks, k)]
            assert pass_at(k, marks) == pytest.approx(sum(any(one) for one in subsets) / len(subsets))


CHECKS = """\
def long(answer, record):
    return len(answer) > record["least"]

def bad(answer, record):
    return "yes"
"""


@pytest.mark.slow
def test_checks(tmp_path: Path) -> None:
    (tmp_path / "checks.py").write_text(CHECKS, encoding="utf-8")
    eval_tasks.write_lines(tmp_path / "a.jsonl", [{"prompt": "say one", "answer": "x", "least": 0}])
    ended = run("--samples", tmp_path / "one", task=_task(tmp_path, "stop = []"))
    assert value(ended, "mine", "accuracy") == 0
    (one,) = samples(tmp_path / "one", "mine")
    (text,) = one["answers"]
    eval_tasks.write_lines(tmp_path / "a.jsonl", [{"prompt": "say one", "answer": f"  {text}", "least": 0}])
    for more in ("", 'check = "exact"', 'check = "normalised"', 'check = "checks.py:long"'):
        assert value(run(task=_task(tmp_path, f"stop = []\n{more}")), "mine", "accuracy") == 1, more
    eval_tasks.write_lines(
        tmp_path / "a.jsonl", [{"prompt": "say one", "answer": ["^q{9}$", "(?s)^.*$"], "least": 9999}]
    )
    assert value(run(task=_task(tmp_path, 'stop = []\ncheck = "regex"')), "mine", "accuracy") == 1
    assert value(run(task=_task(tmp_path, 'stop = []\ncheck = "checks.py:long"')), "mine", "accuracy") == 0
    said = refusal("--task", _task(tmp_path, 'check = "checks.py:bad"'))
    assert "must return true, false or a number from 0 to 1, found 'yes'" in said


def _task(folder: Path, more: str) -> Path:
    file = folder / "task.toml"
    file.write_text(f'[mine]\nkind = "generate"\ndata = "a.jsonl"\ntokens = 5\n{more}\n', encoding="utf-8")
    return file


BAD = {
    'kind = "choise"\ndata = "a.jsonl"': r"task.toml:1: mine.kind: .* found 'choise'. Did you mean 'choice'\?",
    'kind = "choice"\ndata = "a.jsonl"\nshotz = 1': r"task.toml:4: mine.shotz: .* Did you mean 'shots'\?",
    'kind = "choice"\ndata = "b.jsonl"': r"mine.data: '.*b.jsonl': no such file",
    'kind = "choice"\ndata = "a.jsonl"\nprompt = "{promt}"': r"line 1: has no field 'promt'.* Did you mean 'prompt'\?",
    'kind = "choice"\ndata = "a.jsonl"\nprompt = "{prompt"': r"'\{prompt' is no template",
    'kind = "choice"\ndata = "a.jsonl"\nprompt = "{prompt.x}"': r"line 1: has no field 'prompt.x'",
    'kind = "choice"\ndata = "a.jsonl"\nanswer = "none"': r"line 1: 'none': there is no right choice",
    'kind = "choice"\ndata = "a.jsonl"\nanswer = "far"': r"'far': expected a number from 0 to 1 or one of the choices",
    'kind = "choice"\ndata = "a.jsonl"\nchoices = "prompt"': r"choices: expected at least two texts, found 'say'",
    'kind = "choice"\ndata = "a.jsonl"\nshots = 1': r"shots and shots_data go together",
    'kind = "choice"\ndata = "a.jsonl"\nshots = 2\nshots_data = "a.jsonl"': r"has 1 records, fewer than 2",
    'kind = "generate"\ndata = "a.jsonl"\nanswer = "none"': r"line 1: 'none': there is no right answer",
    'kind = "generate"\ndata = "a.jsonl"\nstop = [""]': r"mine.stop: expected non-empty texts",
    'kind = "generate"\ndata = "a.jsonl"\nk = [2]': r"mine.k: expected numbers of at most samples = 1, found \[2\]",
    'kind = "generate"\ndata = "a.jsonl"\nsamples = 2': r"2 answers are all alike with temperature = 0",
    'kind = "generate"\ndata = "a.jsonl"\ntokens = 64': r"may have 64 tokens, and the model reads 64 with the prompt",
    'kind = "generate"\ndata = "a.jsonl"\nextract = "("': r"mine.extract: '\(' is no pattern",
    'kind = "generate"\ndata = "a.jsonl"\ncheck = "exakt"': r"found 'exakt'. Did you mean 'exact'\?",
    'kind = "generate"\ndata = "a.jsonl"\ncheck = "nowhere.there:f"': r"'nowhere.there:f' can't be imported: Module",
    'kind = "perplexity"\ndata = "a.jsonl"': r"line 1: has no field 'text'; the fields are 'prompt', 'choices'",
}


@pytest.mark.parametrize("table", BAD)
def test_a_task_that_can_not_be_asked_is_told_in_a_sentence(tmp_path: Path, table: str) -> None:
    record = {"prompt": "say", "choices": ["one", "two"], "answer": "one", "none": [], "far": 2}
    eval_tasks.write_lines(tmp_path / "a.jsonl", [record])
    (tmp_path / "task.toml").write_text(f"[mine]\n{table}\n", encoding="utf-8")
    said = refusal("--task", tmp_path / "task.toml")
    assert re.search(BAD[table], said), said


def test_other_mistakes(tmp_path: Path) -> None:
    assert "there is no file gone.toml" in refusal("--task", "gone.toml")
    assert "name one with --task" in refusal("--limit", 3)
    (tmp_path / "kept").write_text("x")
    assert "is a file" in refusal("--task", "tasks.toml", "--samples", tmp_path / "kept")
    assert "has no results of tasks" in refusal("--task", "tasks.toml", "--against", tmp_path)
    assert "gone: there is no such run, checkpoint" in refusal("--task", "tasks.toml", "--against", "gone")
    assert "two tasks are named 'modules'" in refusal("--task", "tasks.toml", "--task", "tasks.toml")
    (tmp_path / "plain.jsonl").write_text('{"body": "x"}\n')
    assert "its fields are 'body'" in refusal("--task", tmp_path / "plain.jsonl")


def test_records_are_a_task_as_they_are() -> None:
    for file, metric in (("modules", "prompt"), ("prose", "bits_per_byte"), ("words", "accuracy")):
        if file == "modules":
            assert "has no field 'prompt'" in refusal("--task", "modules.jsonl")
        else:
            assert metric in run(task=f"{file}.jsonl")["tasks"][file]["metrics"]


def test_results_are_in_the_run_and_runs_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    eval_tasks.write_desk(tmp_path)
    (tmp_path / "mine.toml").write_text(forge_cli.DECODER + '[text]\npath = "prose.jsonl"\n', encoding="utf-8")
    for name, steps in (("first", 1), ("second", 3)):
        ended = forge("train", "mine.toml", "--name", name, "--quiet", "-s", f"train.steps={steps}")
        assert ended.code == 0, ended.err
        found = run(path=f"runs/{name}")
        assert found["recorded"] == f"runs/{name}/evaluations/step-0000000{steps}"
    ended = forge("runs", "compare", "first", "second", "--json")
    value_of = ended.json["tasks"]["prose"]["bits_per_byte"]
    assert value_of["runs/second"] == found["tasks"]["prose"]["metrics"]["bits_per_byte"]
    told = forge("eval", "runs/second", "--task", "tasks.toml", "--against", "runs/first", "--json").json["differences"]
    assert told == ended.json["paired"]
    rates = told["prose"]["bits_per_byte"]
    assert 0 < rates["p"] <= 1
    assert (rates["before"], rates["now"]) == tuple(value_of[f"runs/{name}"]["value"] for name in ("first", "second"))
    shown = forge("runs", "compare", "first", "second").out
    assert "prose bits_per_byte" in shown
    assert "p = " in shown
    assert "bits_per_byte" in forge("runs", "show", "first").out
    other = forge("eval", "runs/second", "--task", "tasks.toml", "--limit", 2, "--against", "runs/first")
    assert "the questions, right answers or checks differ: modules, prose, words" in other.out


def test_right_and_wrong_are_compared_as_mcnemar_does() -> None:
    stats = pytest.importorskip("scipy.stats")
    now, before = [1.0] * 9 + [0.0] * 20, [0.0] * 7 + [1.0] * 12 + [0.0] * 10
    wins, losses = 7, 10
    found = compare(Metric.mean(now), Metric.mean(before))
    assert found.difference == pytest.approx((wins - losses) / 29)
    assert found.p == pytest.approx(stats.binomtest(wins, wins + losses).pvalue, abs=0.015)
    assert compare(Metric.mean(now), Metric.mean(now)).p == 1


def test_a_difference_of_perplexities_is_one_of_log_likelihoods() -> None:
    units = [5, 7, 9, 4, 6, 8, 5, 6, 7, 3]
    before = [-1.0 * unit for unit in units]
    better = compare(Metric.perplexity([-0.9 * unit for unit in units], units), Metric.perplexity(before, units))
    assert better.difference == pytest.approx(0.1)
    assert better.p == pytest.approx(2 / 2**10, rel=0.5)
    mixed = [one + (0.3 if at % 2 else -0.3) for at, one in enumerate(before)]
    assert compare(Metric.perplexity(mixed, units), Metric.perplexity(before, units)).p > 0.9


def test_requests_of_any_length_are_scored_as_alone(oracle: eval_tasks.ByTransformers) -> None:
    from forge_train_tools.evaluation.scoring import Request, Scorer
    from forge_train_tools.offline.opening import open_model

    opened = open_model(Path("hf"), device="cpu")
    random, vocabulary = torch.Generator().manual_seed(0), len(oracle.tokenizer)
    requests = []
    for context, continuation in ((1, 1), (3, 2), (1, 64), (63, 2), (64, 1), (90, 5), (200, 64), (7, 30)):
        ids = torch.randint(vocabulary, (context + continuation,), generator=random).tolist()
        requests.append((ids[:context], ids[context:]))
        best = list(ids[:context])
        for _ in range(min(continuation, 3)):  # what greedy decoding gives
            with torch.no_grad():
                best.append(int(oracle.model(torch.tensor([best[-64:]])).logits[0, -1].argmax()))
        if len(best) <= oracle.longest:
            requests.append((best[:context], best[context:]))
    expected = [oracle.of_ids(*one) for one in requests]
    assert {greedy for _, greedy in expected} == {True, False}
    for batch in (1, 3, 32):
        scorer = Scorer(opened.job, opened.model, batch)
        found = scorer([Request(tuple(context), tuple(asked)) for context, asked in requests])
        assert [one.greedy for one in found] == [greedy for _, greedy in expected]
        assert [one.log_likelihood for one in found] == pytest.approx([total for total, _ in expected], rel=1e-6)
        assert [one.cut for one in found] == [max(len(a) + len(b) - 65, 0) for a, b in requests]
        assert [one.tokens for one in found] == [len(asked) for _, asked in requests]


def test_others_wait_for_the_main_process_as_long_as_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []
    lead = Asked.lead
    monkeypatch.setattr(DistributedContext, "settle", lambda self, seconds: order.append(seconds))
    monkeypatch.setattr(Asked, "lead", lambda self, work: (order.append("lead"), lead(self, work))[1])
    run("-s", "run.timeout=77", task="prose.jsonl")
    assert order == [77.0, "lead"]


def test_a_run_is_compared_with_its_own_earlier_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    eval_tasks.write_desk(tmp_path)
    (tmp_path / "mine.toml").write_text(forge_cli.DECODER + '[text]\npath = "prose.jsonl"\n', encoding="utf-8")
    ended = forge(
        "train", "mine.toml", "--name", "first", "--quiet", "-s", "checkpoint.every=1", "-s", "checkpoint.keep=3"
    )
    assert ended.code == 0, ended.err
    before = run(path="runs/first/checkpoints/step-00000001", task="prose.jsonl")
    now = run("--against", "runs/first", path="runs/first", task="prose.jsonl")
    found = now["differences"]["prose"]["bits_per_byte"]
    assert (found["before"], found["now"]) == (
        value(before, "prose", "bits_per_byte"),
        value(now, "prose", "bits_per_byte"),
    )
    assert found["difference"] != 0
