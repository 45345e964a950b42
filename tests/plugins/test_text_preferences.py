"""`text_pairs` and `text_feedback` alike: one order on any number of ranks, and records they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge_train import ConfigError
from forge_train_tools.testing import run_forge
from preference_data import RECORDS, TRIMMING, job, opened, said, texts, write

pytest.importorskip("transformers")
pytestmark = [pytest.mark.unit]


@pytest.mark.parametrize("kind", RECORDS)
def test_one_order_on_any_number_of_ranks_resumed_twice(here: Path, kind: str) -> None:
    write(here, *RECORDS[kind])

    def rows(ranks: int, micro_batch: int, state: Any, count: int) -> tuple[list[Any], Any]:
        loaders = [
            opened(here, kind).build_data(job(here, one, ranks, micro_batch, 64), "train") for one in range(ranks)
        ]
        for loader in loaders:
            if state:
                loader.load_state_dict(state)
        found = []
        while len(found) < count:
            for loader in loaders:
                batch = next(loader)
                found += list(zip(*(tensor.tolist() for tensor in batch.tensors().values()), strict=True))
        return found, json.loads(json.dumps(loaders[0].state_dict()))

    whole, _ = rows(1, 2, None, 72)
    first, state = rows(2, 2, None, 12)
    second, state = rows(3, 4, state, 24)
    third, _ = rows(1, 6, state, 36)
    assert first + second + third == whole


@pytest.mark.parametrize(
    ("kind", "record", "message"),
    [
        ("preference", {"prompt": "a", "chosen": "b"}, r"expected chosen and rejected"),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": None}, r"rejected is null"),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": "b"}, r"chosen and rejected are the same"),
        ("preference", {"prompt": "a", "chosen": " ", "rejected": "b"}, r"chosen is empty; a model would"),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": ""}, r"rejected is empty; a pair needs"),
        (
            "preference",
            {"prompt": "a", "chosen": "b", "rejected": " \n"},
            r"rejected is empty; a pair needs",
        ),
        (
            "preference",
            {"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c", "weight": 0}]},
            r"every turn of the assistant has a weight of 0",
        ),
        (
            "preference, trimmed",
            {"prompt": "a", "chosen": "b", "rejected": "b "},
            r"chosen and rejected have the same tokens with ",
        ),
        (
            "preference, trimmed",
            {"prompt": "a", "chosen": "b", "rejected": " "},
            r"rejected has no text that counts",
        ),
        (  # `say` is one token, and it begins in the prompt
            "preference, trimmed",
            {"prompt": "sa", "chosen": "b", "rejected": "y"},
            r"rejected has no token that counts",
        ),
        ("embedding", {"anchor": "a"}, r"expected a text as positive"),
        (
            "embedding",
            {"anchor": "a", "positive": "b", "negative": "c"},
            r"negative: texts that do not belong together are not read",
        ),
        (
            "embedding",
            {"anchor": "a", "positive": "\ud83d"},
            r"positive has half a surrogate pair",
        ),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": "\ud83d"}, r"has half a surrogate pair"),
        (
            "preference",
            {
                "prompt": "a",
                "chosen": [{"role": "assistant", "content": "b", "reasoning_content": "why"}],
                "rejected": "c",
            },
            r".* leaves out messages\[1\]\.reasoning_content",
        ),
        ("feedback", {"prompt": "a", "completion": "b"}, r"there is no label; expected true \(a desirable answer\)"),
        ("feedback", {"prompt": "a", "completion": "b", "label": None}, r"there is no label; expected true"),
        (
            "feedback",
            {"prompt": "a", "completion": "b", "label": 1},
            r"label is 1; expected true \(a desirable answer\)",
        ),
        ("feedback", {"prompt": "a", "completion": "b", "label": "good"}, r"label is 'good'; expected true"),
        (
            "feedback",
            {"prompt": "a", "completion": "b", "lable": True},
            r"'lable' is not read\. Did you mean 'label'\?",
        ),
        (
            "feedback",
            {"prompt": "a", "completion": " ", "label": True},
            r"the answer is empty, so that there is nothing",
        ),
        ("feedback", {"prompt": "a", "completion": None, "label": True}, r"completion is null"),
        ("feedback", {"prompt": "a", "label": True}, r"its fields \(prompt\) are no conversation's"),
        ("feedback", {"prompt": "a", "chosen": "b", "rejected": "c"}, r"chosen and rejected are a pair of answers"),
        (
            "feedback",
            {"messages": said("a", "b", "c"), "label": True},
            r"the last message is the user's, but the label judges an answer of the assistant",
        ),
        (
            "feedback",
            {"messages": said("c", "b", weight=0.5), "label": True},
            r"a message of feedback has a weight of 0 or 1",
        ),
        (
            "feedback",
            {"messages": said("c", "b", weight=0), "label": True},
            r"every turn of the assistant has a weight of 0",
        ),
        (  # `say` is one token, and it begins in the prompt
            "feedback, trimmed",
            {"prompt": "sa", "completion": "y", "label": True},
            r"the answer has no token that counts",
        ),
    ],
)
def test_bad_records_are_named(here: Path, kind: str, record: object, message: str) -> None:
    kind, trimmed, _ = kind.partition(", trimmed")
    write(here, RECORDS[kind][0], record)
    options = {"template": TRIMMING} if trimmed else {}
    with pytest.raises(ConfigError, match=rf"records\.jsonl, line 2:? {message}"):
        opened(here, kind, **options).build_data(job(here), "train")


def too_long(kind: str) -> dict[str, Any]:
    """A record of which one text is longer than a row."""
    return {**RECORDS[kind][9], "rejected" if kind == "preference" else "completion": "no " * 60}


@pytest.mark.parametrize("kind", ["preference", "feedback"])
def test_texts_longer_than_a_row_are_refused_or_dropped(here: Path, kind: str) -> None:
    write(here, *RECORDS[kind][:2], too_long(kind))
    name, count = ("text_pairs", 6) if kind == "preference" else ("text_feedback", 3)
    with pytest.raises(ConfigError, match=rf"{name}\.long: 1 of {count} texts are longer than a row of 48 tokens"):
        opened(here, kind).build_data(job(here), "train")
    loader = opened(here, kind, long="drop").build_data(job(here), "train")
    assert {learned.split()[-1] for _ in range(3) for _, learned in texts(here, next(loader))} == {"0", "1"}


@pytest.mark.parametrize(
    ("kind", "split", "message"),
    [
        ("preference", "train", "leaves no pair for training."),
        ("preference", "validation", r"leaves no pair for evaluation: raise text_pairs\.held_out, or set"),
        ("feedback", "train", "leaves fewer than two answers for training."),
        ("feedback", "validation", r"fewer than two answers for evaluation: raise text_feedback\.held_out, or set"),
    ],
)
def test_too_few_records_are_refused(here: Path, kind: str, split: Any, message: str) -> None:
    write(here, too_long(kind))
    with pytest.raises(ConfigError, match=message):
        opened(here, kind, long="drop").build_data(job(here), split)


@pytest.mark.parametrize(("kind", "gives"), [("preference", "pairs"), ("feedback", "feedback")])
def test_tasks_for_single_rows_do_not_learn_from_them(here: Path, kind: str, gives: str) -> None:
    write(here, *RECORDS[kind])
    name = f"text_{gives}"
    config = {f"{name}.path": str(here / "records.jsonl"), f"{name}.cache": str(here / "cache")}
    config |= {"tokenizer.path": str(here / "hf"), "train.micro_batch": 2}
    with pytest.raises(ConfigError, match=rf"'next_token' .* takes 'token_rows' .* '{name}' .* gives '{gives}'"):
        run_forge([name], config, without=["text"], folder=here / "runs")
