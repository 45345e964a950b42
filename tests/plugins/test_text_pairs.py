"""`text_pairs`: both members of a pair side by side, with masks, in one order on any number of ranks, resumed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import chat_model
from forge_train import MASKED, Batch, ConfigError
from forge_train_kit import model_files
from forge_train_kit.data.tokenizers import open_tokenizer
from forge_train_plugins.data.text_pairs import TextPairs
from forge_train_plugins.data.tokenizer import Tokenizer
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.testing import run_forge

pytest.importorskip("transformers")
pytestmark = [pytest.mark.unit]

COUNT = 13
TRIMMING = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
"""A template without a token that ends a turn."""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    chat_model.write_tokenizer(tmp_path / "hf")
    return tmp_path


def preferences(here: Path) -> None:
    write(here, *({"prompt": f"say {n}", "chosen": f"yes {n}", "rejected": f"no, not {n}"} for n in range(COUNT)))


def write(here: Path, *records: object) -> None:
    (here / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")


def job(here: Path, rank: int = 0, ranks: int = 1, micro_batch: int = 2, sequence: int = 48) -> Any:
    section = Tokenizer.Config(path=str(here / "hf"))
    plugin = Tokenizer(section)
    return SimpleNamespace(
        hooks=SimpleNamespace(
            call=lambda spec, arguments: plugin.tokenizer(None),  # type: ignore[arg-type]
            provider=lambda slot: slot,
            plugins={"tokenizer": plugin},
        ),
        config=SimpleNamespace(
            train=SimpleNamespace(sequence=sequence, micro_batch=micro_batch, evaluate_every=0),
            sections={"tokenizer": section},
        ),
        dist=SimpleNamespace(data_rank=rank, data_ranks=ranks),
        device=torch.device("cpu"),
        seed=0,
    )


def pairs(here: Path, **options: Any) -> TextPairs:
    options = {"path": str(here / "pairs.jsonl"), "cache": str(here / "cache"), "held_out": 0.0, **options}
    return TextPairs(TextPairs.Config(**options))


def texts(here: Path, batch: Batch) -> list[tuple[str, str]]:
    """Of each row: what it holds without padding, and what of it is learned."""
    tokenizer, found = open_tokenizer(str(here / "hf")), []
    for row in range(len(batch.inputs)):
        assert batch.document_ids is not None
        ids = batch.inputs[row][batch.document_ids[row] == 0]
        assert (batch.labels[row][len(ids) :] == MASKED).all()
        learned = batch.labels[row][batch.labels[row] != MASKED]
        found.append((tokenizer.decode(ids.tolist()), tokenizer.decode(learned.tolist())))
    return found


def test_an_epoch_has_each_pair_once_with_its_masks(here: Path) -> None:
    preferences(here)
    loader = pairs(here).build_data(job(here), "train")
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
    write(here, *({"anchor": f"a {n}", "positive": f"the text of a {n}"} for n in range(COUNT)))
    plugin = pairs(here, kind="embedding")
    loader = plugin.build_data(job(here, micro_batch=4), "train")
    found = [text for _ in range(COUNT) for text, _ in texts(here, next(loader))]
    for anchor, positive in zip(found[::2], found[1::2], strict=True):
        assert positive == f"the text of {anchor}"
    assert sorted(found[::2][:COUNT]) == sorted(f"a {n}" for n in range(COUNT))


@pytest.mark.parametrize("kind", ["preference", "embedding"])
def test_one_order_on_any_number_of_ranks_resumed_twice(here: Path, kind: str) -> None:
    preferences(here)
    if kind == "embedding":
        write(here, *({"anchor": f"a {n}", "positive": f"the text of a {n}"} for n in range(COUNT)))

    def rows(ranks: int, micro_batch: int, state: Any, count: int) -> tuple[list[Any], Any]:
        loaders = [
            pairs(here, kind=kind).build_data(job(here, one, ranks, micro_batch), "train") for one in range(ranks)
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


def test_both_members_share_a_side_and_a_fate(here: Path) -> None:
    preferences(here)
    plugin = pairs(here, held_out=0.4)
    sides = {side: plugin._open(job(here))[side] for side in ("train", "validation")}  # type: ignore[index]
    assert all(side.count and side.count % 2 == 0 for side in sides.values())
    assert sum(side.count for side in sides.values()) == 2 * COUNT
    long = {"prompt": "say 0", "chosen": "yes 0", "rejected": "no " * 60}
    write(here, {"prompt": "say 1", "chosen": "yes 1", "rejected": "no, not 1"}, long)
    with pytest.raises(ConfigError, match=r"text_pairs.long: 1 of 4 texts are longer than a row of 48 tokens"):
        pairs(here).build_data(job(here), "train")
    loader = pairs(here, long="drop").build_data(job(here), "train")
    assert {texts(here, next(loader))[0][1].strip() for _ in range(3)} == {"yes 1"}


@pytest.mark.parametrize(
    ("options", "record", "message"),
    [
        ({}, {"prompt": "a", "chosen": "b"}, r"pairs.jsonl, line 1: expected chosen and rejected"),
        ({}, {"prompt": "a", "chosen": "b", "rejected": None}, r"pairs.jsonl, line 1: rejected is null"),
        ({}, {"prompt": "a", "chosen": "b", "rejected": "b"}, r"pairs.jsonl, line 1: chosen and rejected are the same"),
        ({}, {"prompt": "a", "chosen": " ", "rejected": "b"}, r"pairs.jsonl, line 1: chosen is empty; a model would"),
        ({}, {"prompt": "a", "chosen": "b", "rejected": ""}, r"pairs.jsonl, line 1: rejected is empty; a pair needs"),
        (
            {},
            {"prompt": "a", "chosen": "b", "rejected": " \n"},
            r"pairs.jsonl, line 1: rejected is empty; a pair needs",
        ),
        (
            {},
            {"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c", "weight": 0}]},
            r"pairs.jsonl, line 1: every turn of the assistant has a weight of 0",
        ),
        (
            {"template": TRIMMING},
            {"prompt": "a", "chosen": "b", "rejected": "b "},
            r"pairs.jsonl, line 1: chosen and rejected have the same tokens with ",
        ),
        (
            {"template": TRIMMING},
            {"prompt": "a", "chosen": "b", "rejected": " "},
            r"pairs.jsonl, line 1: rejected has no text that counts",
        ),
        (  # `say` is one token, and it begins in the prompt
            {"template": TRIMMING},
            {"prompt": "sa", "chosen": "b", "rejected": "y"},
            r"pairs.jsonl, line 1: rejected has no token that counts",
        ),
        ({"kind": "embedding"}, {"anchor": "a"}, r"pairs.jsonl, line 1: expected a text as positive"),
        (
            {"kind": "embedding"},
            {"anchor": "a", "positive": "b", "negative": "c"},
            r"pairs.jsonl, line 1: negative: texts that do not belong together are not read",
        ),
        (
            {"kind": "embedding"},
            {"anchor": "a", "positive": "\ud83d"},
            r"pairs.jsonl, line 1: positive has half a surrogate pair",
        ),
        ({}, {"prompt": "a", "chosen": "b", "rejected": "\ud83d"}, r"pairs.jsonl, line 1 has half a surrogate pair"),
        (
            {},
            {
                "prompt": "a",
                "chosen": [{"role": "assistant", "content": "b", "reasoning_content": "why"}],
                "rejected": "c",
            },
            r"pairs.jsonl, line 1: .* leaves out messages\[1\]\.reasoning_content",
        ),
    ],
)
def test_bad_records_are_named(here: Path, options: dict[str, Any], record: object, message: str) -> None:
    write(here, record)
    if options.get("template") == TRIMMING:
        (here / "trimming.jinja").write_text(TRIMMING, encoding="utf-8")
        options = {**options, "template": str(here / "trimming.jinja")}
    with pytest.raises(ConfigError, match=message):
        pairs(here, **options).build_data(job(here), "train")


def test_an_odd_micro_batch_and_a_task_for_single_rows_are_refused(here: Path) -> None:
    preferences(here)
    with pytest.raises(ConfigError, match=r"train.micro_batch: 3 is odd, but a pair is two sequences"):
        pairs(here).build_data(job(here, micro_batch=3), "train")
    config = {"text_pairs.path": str(here / "pairs.jsonl"), "tokenizer.path": str(here / "hf"), "train.micro_batch": 2}
    with pytest.raises(
        ConfigError, match=r"'next_token' .* takes 'token_rows' .* 'build_data', .* 'text_pairs' .* gives 'pairs'"
    ):
        run_forge(
            ["text_pairs"], {**config, "text_pairs.cache": str(here / "cache")}, without=["text"], folder=here / "runs"
        )


def test_an_odd_batch_is_told_before_an_odd_share_of_it(here: Path) -> None:
    """A reference is composed with the share of the rank, which nobody has set."""
    preferences(here)
    warmup = "train.batch_warmup=[{ steps = 1, global_batch = 3 }]"
    options = ["dpo.weights=x", "train.micro_batch=0", f"text_pairs.path={here / 'pairs.jsonl'}"]
    for key, more in (("train.global_batch", ["train.global_batch=5"]), ("train.batch_warmup", [warmup])):
        with pytest.raises(ConfigError, match=rf"{key}: [35] is odd, but a pair is two sequences"):
            resolve(Request(plugins=("dpo", "text_pairs"), without=("text",), set=(*options, *more)))


@pytest.mark.parametrize(
    ("plugins", "others"),
    [("dpo", "text_pairs"), ("text_pairs", "dpo, embed.* or reward"), ("dpo,sft", "text_pairs")],
)
def test_plugins_that_do_not_fit_are_told_which_would(here: Path, plugins: str, others: str) -> None:
    preferences(here)
    paths = [f"{name}.path={here / 'pairs.jsonl'}" for name in ("text_pairs", "sft") if name in plugins.split(",")]
    with pytest.raises(ConfigError, match=rf"Enable another plugin for one of them, such as ({others})\."):
        resolve(Request(plugins=tuple(plugins.split(",")), set=(*paths, f"tokenizer.path={here / 'hf'}")))


def test_a_task_of_ones_own_trains_on_them(here: Path) -> None:
    preferences(here)
    config = {"text_pairs.path": str(here / "pairs.jsonl"), "tokenizer.path": str(here / "hf"), "train.micro_batch": 2}
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
