"""Right answers of tasks: what they are measured by, examples before a prompt, and records that can't be asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import eval_tasks
from forge_train.base.errors import ConfigError
from forge_train_tools.evaluation.local_tasks import Answers, LocalTask, prepare, summary
from forge_train_tools.evaluation.task_files import open_file

RECORDS = [{"prompt": f"say {one}", "choices": ["one", "two"], "answer": "one", "least": 1} for one in "abc"]
SHIFTED = [{**one, "answer": "two"} for one in RECORDS]
OTHER = [{**one, "least": 2} for one in RECORDS]


def task(folder: Path, kind: str, more: str = "", records: Any = RECORDS) -> LocalTask:
    eval_tasks.write_lines(folder / "a.jsonl", records)
    (folder / "task.toml").write_text(f'[mine]\nkind = "{kind}"\ndata = "a.jsonl"\n{more}\n', encoding="utf-8")
    (opened,) = open_file(folder / "task.toml", 0)
    return prepare(opened)


def digest(*asked: Any) -> str:
    return summary(task(*asked), {}, Answers()).digest


def test_results_that_were_measured_otherwise_are_not_compared(tmp_path: Path) -> None:
    assert digest(tmp_path, "choice", "", RECORDS) == digest(tmp_path, "choice", "", OTHER)
    assert digest(tmp_path, "choice", "", RECORDS) != digest(tmp_path, "choice", "", SHIFTED)
    several = "samples = 2\ntemperature = 1.0"
    assert digest(tmp_path, "generate", several) == digest(tmp_path, "generate", f'{several}\ncheck = "exact"')
    kinds = ["", 'check = "regex"', 'extract = "a(b)"', "k = [1, 2]"]
    found = {digest(tmp_path, "generate", f"{several}\n{more}") for more in kinds}
    assert len(found | {digest(tmp_path, "generate", several, SHIFTED)}) == len(kinds) + 1


def test_a_function_is_measured_by_its_text_and_its_records(tmp_path: Path) -> None:
    found = []
    for name, body, records in (("x", "1", RECORDS), ("y", "1", RECORDS), ("z", "0", RECORDS), ("u", "1", OTHER)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "own.py").write_text(f"def check(answer, record):\n    return {body}\n", encoding="utf-8")
        found.append(digest(folder, "generate", 'check = "own.py:check"', records))
    assert found[0] == found[1], "wherever its file is"
    assert len({*found}) == 3


@pytest.mark.parametrize("kind", ["choice", "generate"])
def test_a_record_is_no_example_of_itself(tmp_path: Path, kind: str) -> None:
    made = task(tmp_path, kind, 'shots = 1\nshots_data = "a.jsonl"')
    prompts = [context for context, _ in made.questions.pairs[::2]] or [one.prompt for one in made.questions.prompts]
    assert prompts == ["say b one\n\nsay a", "say a one\n\nsay b", "say a one\n\nsay c"]
    assert summary(made, {}, Answers()).shots == 1
    with pytest.raises(ConfigError, match=r"line 1: mine.shots: without this record, the first 3 .* are fewer than 3;"):
        task(tmp_path, kind, 'shots = 3\nshots_data = "a.jsonl"')


@pytest.mark.parametrize(
    ("check", "answer", "said"),
    [
        ("regex", "", "right answer '' is empty"),
        ("exact", ["one", " "], "right answer ' ' is empty"),
        ("normalised", "The", "right answer 'The' is empty"),
        ("exact", True, "expected a text or a number, found True"),
        ("exact", ["one", None], "expected a text or a number, found None"),
    ],
)
def test_an_answer_that_is_none_is_refused(tmp_path: Path, check: str, answer: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"a.jsonl.*line 2: 'answer': .*{said}"):
        task(tmp_path, "generate", f'check = "{check}"', [RECORDS[0], {"prompt": "say", "answer": answer}])


@pytest.mark.parametrize(
    ("first", "second"),
    [("choice", "generate"), ("generate", "choice"), ("perplexity", "generate"), ("generate", "perplexity")],
)
def test_records_of_two_kinds_are_no_task(tmp_path: Path, first: str, second: str) -> None:
    kinds = {"choice": RECORDS[0], "generate": {"prompt": "say", "answer": "one"}, "perplexity": {"text": "say"}}
    eval_tasks.write_lines(tmp_path / "a.jsonl", [kinds[first], kinds[first], kinds[second]])
    with pytest.raises(ConfigError, match=rf"a.jsonl.*line 3: a record of kind {second} after one of kind {first};"):
        open_file(tmp_path / "a.jsonl", 0)
