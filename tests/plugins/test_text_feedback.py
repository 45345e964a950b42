"""`text_feedback`: answers with their labels and masks, beside them mismatched ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_train import MASKED, ConfigError
from forge_train_kit.data.mismatched import DESIRABLE, split_mismatched
from preference_data import COUNT, RECORDS, job, opened, said, texts, write

pytest.importorskip("transformers")
pytestmark = [pytest.mark.unit]


def test_an_epoch_has_each_answer_once_with_its_label_and_a_mismatched_one(here: Path) -> None:
    write(here, *RECORDS["feedback"])
    loader = opened(here, "feedback").build_data(job(here, micro_batch=1), "train")
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
        loader = opened(here, "feedback", shuffle=False).build_data(job(here, micro_batch=1), "train")
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
    loader = opened(here, "feedback", shuffle=False).build_data(job(here, micro_batch=2, sequence=36), "train")
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
    own, _ = split_mismatched(
        next(opened(here, "feedback", shuffle=False).build_data(job(here, micro_batch=2), "train"))
    )
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
    own, _ = split_mismatched(
        next(opened(here, "feedback", shuffle=False).build_data(job(here, micro_batch=2), "train"))
    )
    assert texts(here, own)[0][1].strip() == "two"
    assert "one" in texts(here, own)[0][0]


def test_files_of_a_table(here: Path) -> None:
    (here / "feedback.csv").write_text("prompt,completion,label\nsay 1,one,True\nsay 2,1,false\n", encoding="utf-8")
    loader = opened(here, "feedback", "feedback.csv", shuffle=False).build_data(job(here, micro_batch=2), "train")
    assert next(loader).targets[DESIRABLE].tolist() == [1, 0]


def test_all_answers_to_a_prompt_share_a_side_and_fill_an_evaluation(here: Path) -> None:
    both = [(n, word) for n in range(COUNT) for word in ("yes", "no")]
    write(here, *({"prompt": f"say {n}", "completion": f"{word} {n}", "label": word == "yes"} for n, word in both))
    plugin = opened(here, "feedback", held_out=0.4)
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


@pytest.mark.parametrize("label", [True, False])
def test_one_kind_of_label_is_refused(here: Path, label: bool) -> None:
    write(here, *({"prompt": f"say {n}", "completion": "yes", "label": label} for n in range(3)))
    word, other = ("true", "undesirable") if label else ("false", "desirable")
    with pytest.raises(ConfigError, match=rf"path: all 3 answers of .*jsonl have the label {word}; add {other} ones"):
        opened(here, "feedback").build_data(job(here), "train")


def test_so_is_one_kind_that_is_left_of_two(here: Path) -> None:
    """The undesirable answers are too long for a row."""
    write(here, *({"prompt": "say", "completion": "no " * n, "label": n < 60} for n in (1, 2, 60, 3, 61)))
    with pytest.raises(ConfigError, match=r"path: all 3 answers of .*jsonl have the label true; add undesirable ones"):
        opened(here, "feedback", long="drop").build_data(job(here), "train")
