"""`text_pairs`: both members of a pair side by side, with masks, in two rows or in one with other pairs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import chat_model
from forge_train import MASKED, Batch, ConfigError
from forge_train.contract.batch import TOKENS
from forge_train_kit import model_files
from forge_train_kit.data.tokenizers import open_tokenizer
from forge_train_kit.model import pair_weights
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.testing import run_forge
from preference_data import COUNT, RECORDS, job, opened, texts, write

pytest.importorskip("transformers")
pytestmark = [pytest.mark.unit]
PAIRS = RECORDS["preference"]


def test_an_epoch_has_each_pair_once_with_its_masks(here: Path) -> None:
    write(here, *PAIRS)
    loader = opened(here).build_data(job(here), "train")
    seen = []
    for _ in range(COUNT):
        batch = next(loader)
        assert batch.targets["member"].tolist() == [0, 1]
        (chosen, better), (rejected, worse) = texts(here, batch)
        number = int(better.split()[1])
        assert (better.strip(), worse.strip()) == (f"yes {number}", f"no, not {number}")
        assert chosen.startswith(f"user\nsay {number}\n")
        assert rejected.startswith(f"user\nsay {number}\n")
        seen.append(number)
    assert sorted(seen) == list(range(COUNT))
    assert seen != sorted(seen)


def test_texts_for_embeddings(here: Path) -> None:
    write(here, *RECORDS["embedding"])
    plugin = opened(here, "embedding")
    loader = plugin.build_data(job(here, micro_batch=4), "train")
    found = [text for _ in range(COUNT) for text, _ in texts(here, next(loader))]
    for anchor, positive in zip(found[::2], found[1::2], strict=True):
        assert positive == f"the text of {anchor}"
    assert sorted(found[::2][:COUNT]) == sorted(f"a {n}" for n in range(COUNT))


def test_both_members_share_a_side(here: Path) -> None:
    write(here, *PAIRS)
    plugin = opened(here, held_out=0.4)
    sides = {side: plugin._open(job(here))[side] for side in ("train", "validation")}  # type: ignore[index]
    assert all(side.count and side.count % 2 == 0 for side in sides.values())
    assert sum(side.count for side in sides.values()) == 2 * COUNT


def test_an_odd_micro_batch_is_refused(here: Path) -> None:
    write(here, *PAIRS)
    with pytest.raises(ConfigError, match=r"train.micro_batch: 3 is odd, but a pair is two sequences"):
        opened(here).build_data(job(here, micro_batch=3), "train")


def test_an_odd_batch_is_told_before_an_odd_share_of_it(here: Path) -> None:
    """A reference is composed with the share of the rank, which nobody has set."""
    write(here, *PAIRS)
    warmup = "train.batch_warmup=[{ steps = 1, global_batch = 3 }]"
    options = ["dpo.weights=x", "train.micro_batch=0", f"text_pairs.path={here / 'records.jsonl'}"]
    for key, more in (("train.global_batch", ["train.global_batch=5"]), ("train.batch_warmup", [warmup])):
        with pytest.raises(ConfigError, match=rf"{key}: [35] is odd, but a pair is two sequences"):
            resolve(Request(plugins=("dpo", "text_pairs"), without=("text",), set=(*options, *more)))


@pytest.mark.parametrize(
    ("plugins", "others"),
    [("dpo", "text_pairs"), ("text_pairs", "dpo, embed.* or reward"), ("dpo,sft", "text_pairs")],
)
def test_plugins_that_do_not_fit_are_told_which_would(here: Path, plugins: str, others: str) -> None:
    write(here, *PAIRS)
    paths = [f"{name}.path={here / 'records.jsonl'}" for name in ("text_pairs", "sft") if name in plugins.split(",")]
    with pytest.raises(ConfigError, match=rf"Enable another plugin for one of them, such as ({others})\."):
        resolve(Request(plugins=tuple(plugins.split(",")), set=(*paths, f"tokenizer.path={here / 'hf'}")))


def test_a_task_of_ones_own_trains_on_them(here: Path) -> None:
    write(here, *PAIRS)
    config = {
        "text_pairs.path": str(here / "records.jsonl"),
        "tokenizer.path": str(here / "hf"),
        "train.micro_batch": 2,
    }
    (here / "own.jinja").write_text(chat_model.CHATML + "{# mine #}", encoding="utf-8")
    config |= {
        "text_pairs.template": str(here / "own.jinja"),
        "text_pairs.cache": str(here / "cache"),
        "train.sequence": 48,
        "adamw.lr": 1e-2,
        "text_pairs.held_out": 0.0,
    }
    run = run_forge(["text_pairs", "pair_task:Contrast"], config, without=["text"], steps=12, folder=here / "runs")
    assert run.losses[0] == pytest.approx(0.69, abs=0.1)
    assert run.losses[-1] < run.losses[0] / 2
    saved = run.run / model_files.FOLDER / "chat_template.jinja"  # exports take it from there
    assert saved.read_text(encoding="utf-8").endswith("{# mine #}")


# -- several pairs in a row -------------------------------------------------------------------------------------------


def answers(here: Path, batch: Batch, *, cut: bool = False) -> list[tuple[int, str, str]]:
    """Each answer's place in its pair, its text and what of it is learned, row by row; checks that the rest is
    padding."""
    tokenizer, found = open_tokenizer(str(here / "hf")), []
    assert batch.position_ids is not None
    assert batch.document_ids is not None
    assert batch.axes_of("answers") == TOKENS
    member, numbers = batch.targets["member"], batch.targets["answers"]
    assert torch.equal(numbers, batch.document_ids)
    for row, places in enumerate(member.tolist()):
        count = len(places) - places.count(-1)
        assert places == [0, 1] * (count // 2) + [-1] * (len(places) - count)
        assert (batch.labels[row][numbers[row] >= count] == MASKED).all()
        for number, place in enumerate(places[:count]):
            own = numbers[row] == number
            assert batch.position_ids[row][own].tolist() == [*range(int(own.sum()))]
            labels = batch.labels[row][own]
            learned = labels[labels != MASKED]
            assert cut or labels[-1] == MASKED
            text, answer = (tokenizer.decode(ids.tolist()) for ids in (batch.inputs[row][own], learned))
            found.append((place, text, answer.strip()))
    return found


def test_packed_rows_hold_each_pair_once_and_no_half_of_one(here: Path) -> None:
    records = RECORDS["packed"]
    write(here, *records)
    plugin, sizes = opened(here, "packed"), job(here, micro_batch=1, sequence=128)
    loader = plugin.build_data(sizes, "train")
    assert loader.epoch is not None
    assert loader.epoch < COUNT / 2
    batches = [next(loader) for _ in range(2 * loader.epoch)]
    rows = [answers(here, batch) for batch in batches]
    for epoch in (rows[: loader.epoch], rows[loader.epoch :]):
        assert any(len(row) > 2 for row in epoch)
        seen = []
        for row in epoch:
            for (first, chosen, better), (second, rejected, worse) in zip(row[::2], row[1::2], strict=True):
                number = int(chosen.split("\n")[1].split()[1])
                assert (first, second) == (0, 1)
                assert chosen.split("\n")[1] == rejected.split("\n")[1] == f"say {number}"
                assert (better, worse) == (records[number]["chosen"].strip(), f"no, not {number}")
                seen.append(number)
        assert sorted(seen) == list(range(COUNT))
    assert rows[: loader.epoch] != rows[loader.epoch :]
    last = zip(batches[: loader.epoch], rows, strict=False)
    tokens = sum(int((batch.targets["answers"] < len(row)).sum()) for batch, row in last)
    now, alone = (1 - tokens / 128 / count for count in (loader.epoch, 2 * COUNT))
    padding = f"{now:.1%} of the rows is padding ({alone:.1%} with one text in a row)"
    assert dict(plugin.data_stages(sizes))["pack"] == f"several pairs in a row, each chosen, rejected; {padding}"


def test_a_pair_longer_than_a_row_is_refused_dropped_or_cut(here: Path) -> None:
    """Of two texts, that of more than half a row is cut, to what the other leaves; or both, to halves."""
    write(here, RECORDS["packed"][0], {"prompt": "say 1", "chosen": "yes 1", "rejected": "no " * 50})
    sizes = job(here, micro_batch=1, sequence=64)
    with pytest.raises(ConfigError, match=r"text_pairs\.long: 1 of 2 pairs are longer than a row of 64 tokens, the"):
        opened(here, "packed").build_data(sizes, "train")
    loader = opened(here, "packed", long="drop").build_data(sizes, "train")
    assert loader.epoch == 1
    assert {answer for _, _, answer in answers(here, next(loader))} == {"yes", "no, not 0"}
    write(here, {"prompt": "say 1", "chosen": "yes 1", "rejected": "no " * 50})
    batch = next(opened(here, "packed", long="right").build_data(sizes, "train"))
    (_, chosen, better), (_, rejected, _) = answers(here, batch, cut=True)
    assert (better, chosen[:11], rejected[:11]) == ("yes 1", "user\nsay 1\n", "user\nsay 1\n")
    assert batch.targets["answers"].max() == 1  # no padding
    write(here, {"prompt": "say 1", "chosen": "yes " * 40, "rejected": "no " * 50})
    for long in ("left", "right"):
        batch = next(opened(here, "packed", long=long).build_data(sizes, "train"))
        assert batch.targets["answers"].tolist() == [[0] * 32 + [1] * 32]
        assert [text.startswith("user") for _, text, _ in answers(here, batch, cut=True)] == [long == "right"] * 2
    write(here, {"prompt": "say " * 15, "chosen": "yes", "rejected": "no"})
    with pytest.raises(ConfigError, match=r"text_pairs\.long: 'right' cuts away all that is learned of 2 of 2 texts"):
        opened(here, "packed", long="right").build_data(sizes, "train")


def test_held_out_packed_pairs_count_once(here: Path) -> None:
    write(here, *RECORDS["packed"])
    plugin = opened(here, "packed", held_out=0.4)
    loader = plugin.build_data(job(here, micro_batch=2, sequence=128), "validation")
    first, after = [next(loader) for _ in range(3)], next(loader)
    assert sum(int(pair_weights(batch).sum()) for batch in first) == plugin._open(None)["validation"].count / 2
    assert not pair_weights(after).any()
    assert (after.labels == MASKED).all()


def test_packing_is_refused_for_texts_and_for_tasks_that_compare_rows(here: Path) -> None:
    write(here, *RECORDS["preference"])
    config = {
        "text_pairs.path": str(here / "records.jsonl"),
        "tokenizer.path": str(here / "hf"),
        "train.micro_batch": 1,
    }
    config |= {"text_pairs.cache": str(here / "cache"), "text_pairs.packing": "best_fit"}
    for task in ("reward", "pair_task:Contrast"):
        with pytest.raises(
            ConfigError, match=r"text_pairs\.packing: plugin '.*', which provides the task, learns from p"
        ):
            run_forge([task, "text_pairs"], config, without=["text"], folder=here / "runs")
    with pytest.raises(ConfigError, match=r"text_pairs\.packing: texts \(text_pairs.kind = 'embedding'\) take a row"):
        run_forge(["embed", "text_pairs"], {**config, "text_pairs.kind": "embedding"}, without=["text"], folder=here)
