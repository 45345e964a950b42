"""`text_labels`: tokens and classes of texts and words, each text once, and what is said of mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import heads_data
from forge_train import MASKED, Batch, ConfigError
from forge_train_kit.data.labels import Labels
from forge_train_kit.data.tokenizers import open_tokenizer
from forge_train_kit.heads import Classes
from forge_train_plugins.data.text_labels import TextLabels
from forge_train_plugins.data.tokenizer import Tokenizer
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.testing import run_forge

pytestmark = [pytest.mark.unit]

NAMES = ("ham", "spam")
COUNT = 11


def job(of: str = "text", path: str = "bytes", rank: int = 0, ranks: int = 1, **train: int) -> Any:
    section = Tokenizer.Config(path=path)
    plugin = Tokenizer(section)

    def call(spec: Any, arguments: Any) -> Any:
        if spec.name == "tokenizer":
            return open_tokenizer(path)
        return [] if spec.name == "modalities" else Classes(NAMES, of)  # type: ignore[arg-type]

    return SimpleNamespace(
        hooks=SimpleNamespace(
            call=call,
            provider=lambda slot: slot,
            plugins={"tokenizer": plugin},
        ),
        config=SimpleNamespace(
            train=SimpleNamespace(**{"sequence": 48, "micro_batch": 1, "evaluate_every": 0, **train}),
            sections={"tokenizer": section},
        ),
        dist=SimpleNamespace(data_rank=rank, data_ranks=ranks),
        device=torch.device("cpu"),
        seed=0,
    )


def labels(folder: Path, *records: object, **options: Any) -> TextLabels:
    file = heads_data.write(folder / "labelled.jsonl", records)
    values = {"path": str(file), "cache": str(folder / "cache"), "held_out": 0.0, **options}
    return TextLabels(TextLabels.Config(**values))


def texts() -> list[dict[str, Any]]:
    return [{"text": f"text {number} " * (1 + number % 3), "label": NAMES[number % 2]} for number in range(COUNT)]


def documents(batch: Batch) -> list[tuple[str, dict[int, int]]]:
    """Of each text in a batch: what it says, and its labels by place."""
    assert batch.document_ids is not None
    assert batch.position_ids is not None
    tokenizer, found = open_tokenizer("bytes"), []
    for row in range(len(batch.inputs)):
        ids = batch.document_ids[row]
        for number in ids.unique().tolist():
            here = ids == number
            text = tokenizer.decode(batch.inputs[row][here].tolist())
            assert batch.position_ids[row][here].tolist() == list(range(int(here.sum())))
            classes = batch.labels[row][here]
            learned = {at: int(classes[at]) for at in (classes != MASKED).nonzero().flatten().tolist()}
            if text:
                found.append((text, learned))
            else:
                assert not learned  # padding
    return found


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_text_is_there_once_with_its_class_at_its_last_token(tmp_path: Path, packing: str, ranks: int) -> None:
    records = texts()
    plugin = labels(tmp_path, *records, packing=packing)
    rows = COUNT if packing == "pad" else None
    loaders = [plugin.build_data(job(rank=rank, ranks=ranks), "train") for rank in range(ranks)]
    seen: list[tuple[str, dict[int, int]]] = []
    count = 0
    while len(seen) < COUNT:
        seen += documents(next(loaders[count % ranks]))
        count += 1
    assert rows is None or count == rows
    wanted = sorted((one["text"], {len(one["text"]) - 1: NAMES.index(one["label"])}) for one in records)
    assert sorted(seen, key=lambda one: one[0]) == sorted(wanted, key=lambda one: one[0])


@pytest.mark.parametrize(("long", "text"), [("right", "abcdefgh"), ("left", "ijklmnop")])
def test_a_text_that_is_cut_keeps_its_class_at_its_last_token(tmp_path: Path, long: str, text: str) -> None:
    plugin = labels(tmp_path, {"text": "abcdefghijklmnop", "label": 1}, long=long)
    assert documents(next(plugin.build_data(job(sequence=8), "train"))) == [(text, {7: 1})]


def test_a_cut_that_leaves_no_label_is_refused(tmp_path: Path) -> None:
    record = {"tokens": ["abcd", "efgh"], "labels": [None, 1]}
    assert documents(next(labels(tmp_path, record, long="left").build_data(job("token", sequence=4), "train"))) == [
        ("efgh", {3: 1})
    ]
    with pytest.raises(ConfigError, match=r"text_labels\.long: 'right' cuts away all that is learned of 1 of 1 texts"):
        labels(tmp_path, record, long="right").build_data(job("token", sequence=4), "train")


def test_words_that_share_a_token_are_refused(tmp_path: Path) -> None:
    class Joined:
        begin = ()

        def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
            return [7], [(0, len(text))]

    read = Labels(Classes(NAMES, "token"), "tokens", "labels", "").read
    with pytest.raises(ConfigError, match=r"^here: word 2, 'York', has a label and no token of its own"):
        read({"tokens": ["New", "York"], "labels": [0, 1]}, "here", Joined())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("align", "places"),
    [("first", [0, 3, 11]), ("last", [1, 9, 11]), ("", [1, 9, 11]), ("all", [0, 1, *range(3, 10), 11])],
)
def test_words_have_their_labels_where_they_are_wanted(tmp_path: Path, align: str, places: list[int]) -> None:
    record = {"tokens": ["is", "Größe", "?", "x"], "labels": ["ham", 1, 0, None]}
    plugin = labels(tmp_path, record, align=align)
    ((text, found),) = documents(next(plugin.build_data(job("token"), "train")))
    assert text == "is Größe ? x"
    assert sorted(found) == places
    assert [found[place] for place in places] == [0 if place < 2 or place == 11 else 1 for place in places]


def test_every_token_of_a_real_tokenizer_finds_its_word(tmp_path: Path) -> None:
    chat_model = pytest.importorskip("chat_model")
    chat_model.write_tokenizer(tmp_path / "hf")
    tokenizer = open_tokenizer(str(tmp_path / "hf"))
    words = ["say", "yes", "not", "(", "number", ")"]
    plugin = labels(tmp_path, {"tokens": words, "labels": [0, 1, 0, 1, 0, 1]}, align="all")
    batch = next(plugin.build_data(job("token", path=str(tmp_path / "hf")), "train"))
    learned = [
        (tokenizer.decode([int(token)]).strip(), int(label))
        for token, label in zip(batch.inputs[0], batch.labels[0], strict=True)
        if label != MASKED
    ]
    assert ("", 0) not in learned
    for word, label in zip(words, [0, 1, 0, 1, 0, 1], strict=True):
        pieces = "".join(piece for piece, one in learned if one == label)
        assert word in pieces


@pytest.mark.parametrize(
    ("of", "record", "says"),
    [
        (
            "text",
            {"text": "a", "label": "spm"},
            "line 2: label 'spm' is not one of the classes ham, spam. Did you mean 'spam'?",
        ),
        ("text", {"text": "a", "label": 2}, "line 2: label 2 is neither the name of a class nor a number from 0 to 1."),
        (
            "text",
            {"text": "a", "label": True},
            "line 2: expected a label under 'label'; the fields are 'text', 'label'.",
        ),
        ("text", {"body": "a", "label": 0}, "line 2: expected a text under 'text'; the fields are 'body', 'label'."),
        ("text", {"text": "", "label": 0}, "line 2: the text has no token."),
        ("text", {"text": "a", "label": -100}, "line 2: the text has no label."),
        ("token", {"tokens": ["a"], "labels": [0, 1]}, "line 2: 1 words ('tokens') and 2 labels ('labels')."),
        ("token", {"tokens": "a b", "labels": [0, 1]}, "line 2: expected a list of words under 'tokens'"),
        ("token", {"tokens": [], "labels": []}, "line 2: 'tokens': expected a list of words, at least one."),
        ("token", {"tokens": ["a"], "labels": ["x"]}, "line 2: label 'x' is not one of the classes"),
        ("token", {"tokens": ["a"], "labels": [0.5]}, "line 2: label 0.5 is neither the name of a class"),
        ("token", {"tokens": ["a", "b"], "labels": [None, -100]}, "line 2: every label is null or -100, so nothing is"),
        ("token", {"tokens": ["a", ""], "labels": [0, 1]}, "line 2: word 2, '', has a label and no token of its own;"),
        ("text", {"text": "\ud83d", "label": 0}, "line 2: 'text' has half a surrogate pair"),
        ("token", {"tokens": ["\ud83d"], "labels": [0]}, "line 2: 'tokens' has half a surrogate pair"),
    ],
)
def test_a_mistake_is_told_by_file_and_line(tmp_path: Path, of: str, record: object, says: str) -> None:
    right = {"text": "fine", "label": 0} if of == "text" else {"tokens": ["a"], "labels": [0]}
    plugin = labels(tmp_path, right, record)
    with pytest.raises(ConfigError) as error:
        plugin.build_data(job(of), "train")
    assert str(tmp_path / "labelled.jsonl") in str(error.value)
    assert says in str(error.value)


def test_options_without_an_effect_are_refused(tmp_path: Path) -> None:
    plugin = labels(tmp_path, *texts(), align="first")
    with pytest.raises(ConfigError, match=r"text_labels\.align: has no effect on labels of whole texts"):
        plugin.build_data(job(), "train")


@pytest.mark.parametrize(
    ("plugins", "config", "says"),
    [
        (("classify", "text_labels"), {}, r"classify\.classes: expected the names of at least two classes"),
        (("classify", "text_labels"), {"classify.classes": ["a", "a"]}, r"classify\.classes: 'a' appears twice"),
        (("text_labels",), {}, r"'text_labels' .* requires 'classes'"),
        (("classify",), {"classify.classes": ["a", "b"]}, "takes 'labelled_rows' from the slot 'build_data'"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, plugins: tuple[str, ...], config: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        run_forge(plugins, config, folder=tmp_path)


@pytest.mark.parametrize("exported", [False, True])
def test_a_new_head_begins_on_a_language_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, exported: bool
) -> None:
    start = run_forge([], {"decoder.vocabulary": 257}, steps=1, folder=tmp_path / "lm")
    if exported:
        export_checkpoint(start.run, tmp_path / "hf")
    file = heads_data.write(tmp_path / "labelled.jsonl", texts())
    config = {
        "classify.classes": NAMES,
        "text_labels.path": str(file),
        "text_labels.cache": str(tmp_path / "cache"),
        "text_labels.held_out": 0.3,
        "text_labels.long": "right",
        "train.init_from": str(tmp_path / "hf" if exported else start.run),
        "decoder.vocabulary": 257,
    }
    caplog.clear()
    run = run_forge(["classify", "text_labels"], {**config, "adamw.lr": 1e-9}, steps=1, folder=tmp_path / "runs")
    told = " ".join(record.getMessage() for record in caplog.records)
    assert "1 tensors keep their initial values: head.score.weight" in told
    assert "1 tensors were left out: head.weight" in told
    before = dict(start.model.parts[0].named_parameters())
    for name, parameter in run.model.parts[0].named_parameters():
        assert name.startswith("head.") or torch.allclose(parameter, before[name], atol=1e-6)
    back = {"train.init_from": str(run.run), "decoder.vocabulary": 257}
    with pytest.raises(ConfigError, match=r"holds another model:\n  head\.score\.weight"):
        run_forge([], back, steps=1, folder=tmp_path / "back")
    lines = [json.loads(line) for line in (run.run / "metrics.jsonl").read_text().splitlines()]
    assert 0 <= lines[-1]["classify.accuracy"] <= 1
    assert 0 <= lines[-1]["classify.macro_f1"] <= 1
