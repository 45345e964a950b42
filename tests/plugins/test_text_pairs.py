"""`text_pairs`: both members of a pair side by side, with masks."""

from __future__ import annotations

from pathlib import Path

import pytest

import chat_model
from forge_train import ConfigError
from forge_train_kit import model_files
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
