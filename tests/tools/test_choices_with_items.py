"""Choice tasks whose prompts have items: the log-likelihoods of one forward pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import items_data
import tiny_models
from forge_cli import forge, one_message
from forge_train import ConfigError
from forge_train_kit.data.items import ItemPrompts, padded
from forge_train_tools import open_model

TASK = """
[seen]
kind = "choice"
data = "asked.jsonl"
prompt = "{question}"
choices = "choices"
answer = "answer"
items = { scan = "shown" }
"""
RECORDS = (
    {"question": "<scan> is", "choices": ["one", "another"], "answer": 0, "shown": "0.npy"},
    {"question": "a <scan> b <scan>", "choices": ["x", "yy", "z"], "answer": 2, "shown": ["1.npy", "2.npy"]},
    {"question": "before", "choices": ["one", "another"], "answer": 1, "shown": "2.npy"},
)


@pytest.fixture(scope="module", params=["prefix", "cross_attention"])
def desk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, scans and questions about them."""
    folder = tmp_path_factory.mktemp("choices")
    items_data.write_scans(folder, (2, 5, 3))
    items_data.write_records(folder / "asked.jsonl", RECORDS)
    (folder / "seen.toml").write_text(TASK, encoding="utf-8")
    settings = ("cross_attention.every=1", "cross_attention.gate=1.0") if request.param == "cross_attention" else ()
    tiny_models.trained(folder, *settings, plugins=("items_data:Scans", request.param)).rename(folder / "run")
    return folder


def alone(desk: Path) -> list[list[float]]:
    """The log-likelihood of each choice, in a forward pass of its own."""
    opened = open_model(desk / "run")
    prompts, model, found = ItemPrompts(opened._opened.job), opened.module, []
    for record in RECORDS:
        files = record["shown"] if isinstance(record["shown"], list) else [record["shown"]]
        lead = "" if "<scan>" in str(record["question"]) else "<scan>"
        each = []
        for choice in record["choices"]:  # type: ignore[attr-defined]
            ids = prompts.tokenizer.encode(f"{lead}{record['question']} {choice}")
            whole, items = prompts.place(ids, {"scan": files}, "a record", str(desk))
            asked = len(choice) + 1
            extras = {name: torch.from_numpy(one) for name, one in padded([items.read(len(whole))]).items()}
            with torch.no_grad():
                log = model.head(model(torch.tensor([whole]), **extras))[0].double().log_softmax(-1)
            each.append(sum(float(log[at - 1, whole[at]]) for at in range(len(whole) - asked, len(whole))))
        found.append(each)
    return found


def test_log_likelihoods_are_those_of_one_forward(desk: Path, tmp_path: Path) -> None:
    asked = ("eval", desk / "run", "--task", desk / "seen.toml", "--samples", tmp_path, "--json", "--batch", "3")
    ended = forge(*asked)
    assert ended.code == 0, ended.err
    samples = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    for sample, expected in zip(samples, alone(desk), strict=True):
        assert sample["log_likelihoods"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('scan = "shown"', 'image = "shown"'), "This model takes text and 'scan', but no 'image'"),
        (('answer = "answer"', 'answer = "answer"\nshots = 1\nshots_data = "asked.jsonl"'), "leave shots out"),
        (("{question}", "{question}<scan><scan><scan>"), "the text has 4 placeholders <scan> for 1 scan"),
        (("{question}", f"{{question}}{'x' * 70}"), "the model reads 64 at once; shorten it"),
    ],
)
def test_a_task_that_can_not_be_asked_is_told(desk: Path, change: tuple[str, str], message: str) -> None:
    (desk / "bad.toml").write_text(TASK.replace(*change), encoding="utf-8")
    assert message in one_message(forge("eval", desk / "run", "--task", desk / "bad.toml"), 2)


def test_a_run_that_would_ask_it_is_told(desk: Path, tmp_path: Path) -> None:
    tasks = f'lm_eval.tasks=["{desk / "seen.toml"}"]'
    with pytest.raises(ConfigError, match="seen.items: choices are shown items by forge eval alone"):
        tiny_models.trained(tmp_path, tasks, "train.evaluate_every=1", plugins=("items_data:Scans", "lm_eval"))
