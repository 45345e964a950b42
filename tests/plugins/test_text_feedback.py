"""`text_feedback`: answers with their labels and masks, beside them mismatched ones, in one order on any number of
ranks, resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import chat_model
from forge_train import MASKED, Batch, ConfigError
from forge_train_kit.data.mismatched import DESIRABLE, split_mismatched
from forge_train_kit.data.tokenizers import open_tokenizer
from forge_train_plugins.data.text_feedback import TextFeedback
from forge_train_tools.testing import run_forge
from test_text_pairs import TRIMMING, job

pytest.importorskip("transformers")
pytestmark = [pytest.mark.unit]

COUNT = 13


@pytest.fixture
def here(tmp_path: Path) -> Path:
    chat_model.write_tokenizer(tmp_path / "hf")
    return tmp_path


def said(*contents: str, **more: Any) -> list[dict[str, Any]]:
    """Messages of the user and the assistant by turns; more keys of the last one."""
    found: list[dict[str, Any]] = [
        {"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)
    ]
    found[-1] |= more
    return found


def write(here: Path, *records: object, name: str = "feedback.jsonl") -> None:
    (here / name).write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")


def answers(here: Path) -> None:
    """Answers of which every third is desirable."""
    write(here, *({"prompt": f"say {n}", "completion": f"no {n}", "label": n % 3 == 0} for n in range(COUNT)))


def feedback(here: Path, name: str = "feedback.jsonl", **options: Any) -> TextFeedback:
    options = {"path": str(here / name), "cache": str(here / "cache"), "held_out": 0.0, **options}
    return TextFeedback(TextFeedback.Config(**options))


def texts(here: Path, batch: Batch) -> list[tuple[str, str]]:
    """Of each row: what it holds without padding, and what of it is learned."""
    tokenizer, found = open_tokenizer(str(here / "hf")), []
    assert batch.document_ids is not None
    assert batch.position_ids is not None
    for row, ids in enumerate(batch.document_ids):
        size = int((ids == 0).sum())
        assert (batch.labels[row][size:] == MASKED).all()
        places = [*range(size), *range(len(ids) - size)]
        assert batch.position_ids[row].tolist() == places
        learned = batch.labels[row][batch.labels[row] != MASKED]
        found.append((tokenizer.decode(batch.inputs[row][:size].tolist()), tokenizer.decode(learned.tolist())))
    return found


def test_an_epoch_has_each_answer_once_with_its_label_and_a_mismatched_one(here: Path) -> None:
    answers(here)
    loader = feedback(here).build_data(job(here, micro_batch=1), "train")
    seen, others = [], []
    for _ in range(2 * COUNT):
        own, other = split_mismatched(next(loader))
        assert not [name for name in own.targets if name.startswith("mismatched")]
        ((text, learned),) = texts(here, own)
        number = int(learned.split()[1])
        assert own.targets[DESIRABLE].tolist() == [int(number % 3 == 0)]
        assert text.startswith(f"user\nsay {number}\n")
        assert learned.strip() == f"no {number}"
        ((text, learned),) = texts(here, other)
        foreign = int(learned.split()[1])
        assert foreign != number
        assert text.startswith(f"user\nsay {number}\n")
        assert learned.strip() == f"no {foreign}"
        assert f"no {foreign}" in text
        assert other.targets[DESIRABLE].tolist() == own.targets[DESIRABLE].tolist()
        seen.append(number)
        others.append((number, foreign))
    assert sorted(seen[:COUNT]) == sorted(seen[COUNT:]) == list(range(COUNT))
    assert seen[:COUNT] != sorted(seen[:COUNT])
    assert sorted(others[:COUNT]) == sorted(others[COUNT:])  # the same in every epoch, as a stored reference needs
    assert sorted(foreign for _, foreign in others[:COUNT]) == list(range(COUNT))


def test_answers_to_one_prompt_are_mismatched_with_those_to_another(here: Path) -> None:
    """Whether they lie side by side, or desirable ones come first."""
    beside = [(prompt, label) for prompt in range(20) for label in (True, False, True)]
    halves = [(prompt, label) for label in (True, False) for prompt in range(20)]
    for order in (beside, halves):
        write(
            here,
            *(
                {"prompt": f"say {p}", "completion": f"it is {p}", "label": label, "n": n}
                for n, (p, label) in enumerate(order)
            ),
        )
        loader = feedback(here, shuffle=False).build_data(job(here, micro_batch=1), "train")
        for _ in order:
            own, other = (texts(here, one)[0][1] for one in split_mismatched(next(loader)))
            assert own != other


def test_a_mismatched_answer_is_cut_at_the_end_of_the_row(here: Path) -> None:
    long = "zero one two three four five six seven eight nine"
    records = [
        {"prompt": long, "completion": "a b c", "label": True},
        {"prompt": "a", "completion": long, "label": False},
    ]
    write(here, *records)
    loader = feedback(here, shuffle=False).build_data(job(here, micro_batch=2, sequence=36), "train")
    own, other = split_mismatched(next(loader))
    (_, short), (_, whole) = texts(here, own)
    (text, cut), (_, other_short) = texts(here, other)
    assert (other_short, cut) == (short, whole[: len(cut)])
    assert 0 < len(cut) < len(whole)
    assert other.document_ids is not None
    assert not other.document_ids[0].any()
    assert text.startswith(f"user\n{long}\n")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "say 1", "completion": "one", "label": True},
        {"prompt": "say 1", "completion": "one", "label": "true"},  # as in CSV
        {"prompt": said("say 1"), "completion": said("say 1", "one")[1:], "label": True},
        {"messages": said("say 1", "one"), "label": True},
        {"conversations": [{"from": "human", "value": "say 1"}, {"from": "gpt", "value": "one"}], "label": True},
        {"instruction": "say 1", "output": "one", "label": True},
    ],
)
def test_every_shape_of_a_record_is_the_same_answer(here: Path, record: dict[str, Any]) -> None:
    write(here, record, {"prompt": "a", "completion": "b", "label": False})
    own, _ = split_mismatched(next(feedback(here, shuffle=False).build_data(job(here, micro_batch=2), "train")))
    assert [(text.split("\n")[1], learned.strip()) for text, learned in texts(here, own)] == [
        ("say 1", "one"),
        ("a", "b"),
    ]
    assert own.targets[DESIRABLE].tolist() == [1, 0]


def test_of_a_conversation_the_last_answer_is_judged(here: Path) -> None:
    write(
        here,
        {"messages": said("say 1", "one", "say 2", "two"), "label": True},
        {"prompt": "a", "completion": "b", "label": False},
    )
    own, _ = split_mismatched(next(feedback(here, shuffle=False).build_data(job(here, micro_batch=2), "train")))
    assert texts(here, own)[0][1].strip() == "two"
    assert "one" in texts(here, own)[0][0]


def test_files_of_a_table(here: Path) -> None:
    (here / "feedback.csv").write_text("prompt,completion,label\nsay 1,one,True\nsay 2,1,false\n", encoding="utf-8")
    loader = feedback(here, "feedback.csv", shuffle=False).build_data(job(here, micro_batch=2), "train")
    assert next(loader).targets[DESIRABLE].tolist() == [1, 0]


def test_one_order_on_any_number_of_ranks_resumed_twice(here: Path) -> None:
    answers(here)

    def rows(ranks: int, micro_batch: int, state: Any, count: int) -> tuple[list[Any], Any]:
        loaders = [feedback(here).build_data(job(here, one, ranks, micro_batch), "train") for one in range(ranks)]
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
    first, state = rows(2, 3, None, 12)
    second, state = rows(3, 4, state, 24)
    third, _ = rows(1, 6, state, 36)
    assert first + second + third == whole


def test_all_answers_to_a_prompt_share_a_side_and_fill_an_evaluation(here: Path) -> None:
    both = [(n, word) for n in range(COUNT) for word in ("yes", "no")]
    write(here, *({"prompt": f"say {n}", "completion": f"{word} {n}", "label": word == "yes"} for n, word in both))
    plugin = feedback(here, held_out=0.4)
    sides = plugin._open(job(here))
    assert sides["train"].count + sides["validation"].count == 2 * COUNT
    loader = plugin.build_data(job(here, micro_batch=4), "validation")
    prompts, counted = [], 0
    for _ in range(-(-sides["validation"].count // 4) + 1):
        own, _ = split_mismatched(next(loader))
        kept = own.targets[DESIRABLE] >= 0
        counted += int(kept.sum())
        assert (own.labels[~kept] == MASKED).all()
        prompts += [text.split("\n")[1] for (text, _), one in zip(texts(here, own), kept.tolist(), strict=True) if one]
    assert counted == sides["validation"].count == len(prompts)
    assert {prompts.count(one) for one in prompts} == {2}


@pytest.mark.parametrize(
    ("options", "record", "message"),
    [
        ({}, {"prompt": "a", "completion": "b"}, r"there is no label; expected true \(a desirable answer\)"),
        ({}, {"prompt": "a", "completion": "b", "label": None}, r"there is no label; expected true"),
        ({}, {"prompt": "a", "completion": "b", "label": 1}, r"label is 1; expected true \(a desirable answer\)"),
        ({}, {"prompt": "a", "completion": "b", "label": "good"}, r"label is 'good'; expected true"),
        ({}, {"prompt": "a", "completion": "b", "lable": True}, r"'lable' is not read\. Did you mean 'label'\?"),
        ({}, {"prompt": "a", "completion": " ", "label": True}, r"the answer is empty, so that there is nothing"),
        ({}, {"prompt": "a", "completion": None, "label": True}, r"completion is null"),
        ({}, {"prompt": "a", "label": True}, r"its fields \(prompt\) are no conversation's"),
        ({}, {"prompt": "a", "chosen": "b", "rejected": "c"}, r"chosen and rejected are a pair of answers"),
        (
            {},
            {"messages": said("a", "b", "c"), "label": True},
            r"the last message is the user's, but the label judges an answer of the assistant",
        ),
        (
            {},
            {"messages": said("c", "b", weight=0.5), "label": True},
            r"a message of feedback has a weight of 0 or 1",
        ),
        (
            {},
            {"messages": said("c", "b", weight=0), "label": True},
            r"every turn of the assistant has a weight of 0",
        ),
        (  # `say` is one token, and it begins in the prompt
            {"template": TRIMMING},
            {"prompt": "sa", "completion": "y", "label": True},
            r"the answer has no token that counts",
        ),
    ],
)
def test_bad_records_are_named(here: Path, options: dict[str, Any], record: object, message: str) -> None:
    write(here, {"prompt": "one", "completion": "two", "label": True}, record)
    if options.get("template") == TRIMMING:
        (here / "trimming.jinja").write_text(TRIMMING, encoding="utf-8")
        options = {**options, "template": str(here / "trimming.jinja")}
    with pytest.raises(ConfigError, match=rf"feedback\.jsonl, line 2: {message}"):
        feedback(here, **options).build_data(job(here), "train")


@pytest.mark.parametrize("label", [True, False])
def test_one_kind_of_label_is_refused(here: Path, label: bool) -> None:
    write(here, *({"prompt": f"say {n}", "completion": "yes", "label": label} for n in range(3)))
    word, other = ("true", "undesirable") if label else ("false", "desirable")
    with pytest.raises(ConfigError, match=rf"path: all 3 answers of .*jsonl have the label {word}; add {other} ones"):
        feedback(here).build_data(job(here), "train")


def test_so_is_one_kind_that_is_left_of_two(here: Path) -> None:
    """The undesirable answers are too long for a row."""
    write(here, *({"prompt": "say", "completion": "no " * n, "label": n < 60} for n in (1, 2, 60, 3, 61)))
    with pytest.raises(ConfigError, match=r"path: all 3 answers of .*jsonl have the label true; add undesirable ones"):
        feedback(here, long="drop").build_data(job(here), "train")


def test_too_few_and_too_long_answers_are_refused(here: Path) -> None:
    write(here, {"prompt": "say 0", "completion": "yes", "label": True})
    with pytest.raises(ConfigError, match=r"leaves fewer than two answers for training\."):
        feedback(here).build_data(job(here), "train")
    with pytest.raises(ConfigError, match=r"fewer than two answers for evaluation: raise text_feedback\.held_out"):
        feedback(here).build_data(job(here), "validation")
    write(here, *({"prompt": "say", "completion": "no " * n, "label": n < 3} for n in (1, 2, 60, 3)))
    with pytest.raises(ConfigError, match=r"text_feedback\.long: 1 of 4 texts are longer than a row of 48 tokens"):
        feedback(here).build_data(job(here), "train")
    loader = feedback(here, long="drop").build_data(job(here, micro_batch=3), "train")
    assert sorted(len(learned.split()) for _, learned in texts(here, split_mismatched(next(loader))[0])) == [1, 2, 3]


def test_other_tasks_do_not_learn_from_it(here: Path) -> None:
    answers(here)
    config = {"text_feedback.path": str(here / "feedback.jsonl"), "tokenizer.path": str(here / "hf")}
    config["text_feedback.cache"] = str(here / "cache")
    with pytest.raises(ConfigError, match=r"'next_token' .* takes 'token_rows' .* 'text_feedback' .* gives 'feedback'"):
        run_forge(["text_feedback"], config, without=["text"], folder=here / "runs")
